"""
Fills the masks of a pass's rows on threads of its own, while the pass is being computed.

A guide lets go of the interpreter's lock while it works, so that neither waits for the other. A mask that
cannot be filled is its own row's end and no other's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from baton_api.errors import BatonError, InternalError
from baton_engine import machine
from baton_engine.sampling.state import Draw
from baton_engine.sampling.token_masks import Permits, mask_words

log = logging.getLogger(__name__)

THREADS_LIMIT = 4
ROWS_PER_THREAD = 8
"""Fewer are not worth another thread."""

Mask = NDArray[np.int32] | BatonError | None
"""Of one row: a bit for each token that may be drawn, why there is none, or None if all may be."""


class Masks:
    """One per engine; used by its thread alone. One `begin`, one `Filling.wait`, and so on."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._threads = max(1, min(THREADS_LIMIT, machine.usable_cores() // 2))
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="masks")
        self._space = np.zeros((0, mask_words(vocab)), dtype=np.int32)

    def begin(self, draws: Sequence[Draw]) -> Filling:
        """Start on the masks of these rows."""
        permits = [(row, draw.permits) for row, draw in enumerate(draws) if draw.permits is not None]
        if len(permits) > len(self._space):
            self._space = np.zeros((2 * len(permits), self._space.shape[1]), dtype=np.int32)
        masks: list[Mask] = [None] * len(draws)
        rows = [(row, permit, self._space[place]) for place, (row, permit) in enumerate(permits)]
        parts = min(self._threads, -(-len(rows) // ROWS_PER_THREAD))
        filling = [self._pool.submit(self._fill, rows[part::parts], masks) for part in range(parts)]
        return Filling(masks, filling)

    def close(self) -> None:
        self._pool.shutdown()

    def _fill(self, rows: Sequence[tuple[int, Permits, NDArray[np.int32]]], masks: list[Mask]) -> None:
        for row, permits, mask in rows:
            try:
                masks[row] = mask if permits.fill(mask, self._vocab) else None
            except BatonError as error:
                masks[row] = error
            except Exception:  # our own mistake in one request's guide is not the other requests' end
                log.exception("A mask could not be filled.")
                masks[row] = InternalError()


class Filling:
    """Masks that are being filled."""

    def __init__(self, masks: list[Mask], parts: Sequence[Future[None]]) -> None:
        self._masks = masks
        self._parts = parts

    def wait(self) -> list[Mask]:
        """One for each row; they hold until the next `begin`."""
        for part in self._parts:
            part.result()
        return self._masks
