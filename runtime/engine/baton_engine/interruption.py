"""Ends forward passes of patient sequences early when another request needs the next pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from baton_engine.batch import PassInterrupted
from baton_engine.forward_pass import ScheduledChunk
from baton_engine.model.decoder import Model
from baton_engine.scheduling.scheduler import YIELDS
from baton_engine.scheduling.sequence import Sequence


class PassInterruption:
    """Decides which passes a request may end. After `YIELDS` in a row, patient sequences get a whole one."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._allowed = False
        self._in_a_row = 0

    @contextlib.contextmanager
    def during(self, chunks: list[ScheduledChunk]) -> Iterator[None]:
        """Return a context in which a pass of `chunks` is computed. Used on the engine's thread."""
        patient = [chunk.sequence.request.patient for chunk in chunks]
        self._allowed = all(patient) and self._in_a_row < YIELDS
        try:
            yield
        except PassInterrupted:
            self._in_a_row += 1
            raise
        finally:
            self._allowed = False
        if any(patient):
            self._in_a_row = 0

    def interrupt_for(self, sequence: Sequence | None) -> None:
        """
        End the pass in progress if a command about `sequence` need not wait for it. Called on any thread.

        A pass that begins just now is not always ended.
        """
        if sequence is not None and not sequence.request.patient and self._allowed:
            self._model.interrupt()
