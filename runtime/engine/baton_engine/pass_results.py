"""The results of forward passes, applied to their sequences. Only the engine's thread uses this module."""

from __future__ import annotations

import logging
from collections.abc import Callable

from baton_api.errors import BatonError, InternalError
from baton_engine.forward_pass import Sampled, ScheduledChunk
from baton_engine.kv.cache import KVCache
from baton_engine.lifecycle import Lifecycle, log_fields
from baton_engine.requests import FinishReason
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.scheduling.sequence import Sequence, Stage
from baton_engine.streams import Event

log = logging.getLogger(__name__)


class PassResults:
    """Counts computed tokens, adds sampled ones, and announces blocks of exported requests."""

    def __init__(
        self, scheduler: Scheduler, lifecycle: Lifecycle, cache: KVCache, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._cache = cache
        self._clock = clock

    def advance(
        self, chunk: ScheduledChunk, seconds: float, choice: Sampled, written: Event | None = None
    ) -> None:
        """
        Process the results of a chunk that was computed in a forward pass of `seconds`.

        `written` is an event behind the pass. None: one behind all work until now.
        """
        sequence = chunk.sequence
        request = sequence.request
        if request.step_summary is not None:
            request.step_summary.add(self._clock(), seconds, chunk.size, is_decode=chunk.is_decode)
        if chunk.draft and choice is None:
            sequence.speculates = False  # a draft token may be the cause: computed again without one
            return
        self._scheduler.advance(sequence, chunk.tokens)
        if request.export is not None:
            self.announce(sequence, written)
        if (chunk.samples or chunk.ends) and sequence.stage is Stage.RUNNING:
            self._take(sequence, choice, samples=chunk.samples)

    def take_further(self, sequence: Sequence, choice: Sampled) -> None:
        """Process the token sampled after an accepted draft token."""
        if choice is None:
            sequence.speculates = False  # a later draft token may be the cause: computed again without one
        else:
            self._scheduler.advance(sequence, 1)
            self._take(sequence, choice)

    def announce(self, sequence: Sequence, written: Event | None = None) -> None:
        """Announce the computed blocks of an exported request to its reader."""
        request = sequence.request
        assert request.export is not None
        try:
            event = written or self._cache.streams.record()
            request.export.computed(request.id, request.computed, request.blocks, event)
        except Exception:
            log.exception("Cannot announce the blocks of request %s.", request.id, extra=log_fields(sequence))
            self._lifecycle.end(sequence, FinishReason.ERROR, InternalError())

    def _take(self, sequence: Sequence, choice: Sampled, *, samples: bool = True) -> None:
        """Process the results of the last pending token: `choice` if it `samples`, and the prompt output."""
        output, sequence.prompt_output = sequence.prompt_output, None
        result = None if output is None else output.result
        if (samples and choice is None) or (output is not None and result is None):
            log.error(
                "Request %s ends: the model's logits are not finite.",
                sequence.request.id,
                extra=log_fields(sequence),
            )
            self._lifecycle.end(sequence, FinishReason.ERROR, InternalError())
        elif isinstance(choice, BatonError):
            self._lifecycle.end(sequence, FinishReason.ERROR, choice)
        elif choice is None:
            self._lifecycle.end_with_prompt(sequence, result)
        else:
            self._lifecycle.add_token(sequence, choice, prompt_output=result)
