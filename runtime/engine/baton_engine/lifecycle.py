"""
The sequences of one engine from submission to end, the results of their passes, and their outputs.

Only the engine's thread uses this module, except `Lifecycle.reserve` and `Lifecycle.arriving`.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from baton_api import logs
from baton_api.errors import BatonError, InternalError, InvalidRequest, Overloaded
from baton_api.limits import TENANT_SHARE
from baton_api.messages import TokenChoice
from baton_engine.forward_pass import Sampled, ScheduledChunk
from baton_engine.kv.cache import KVCache
from baton_engine.metrics.counters import EngineCounters
from baton_engine.requests import FinishReason, Output, PromptLogprobs, PromptTiming, RelayRecord, Vector
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.scheduling.sequence import Sequence, Stage
from baton_engine.streams import Event

log = logging.getLogger(__name__)


class Lifecycle:
    """Adds sequences to the scheduler, reports their outputs, and removes them once they have ended."""

    def __init__(self, scheduler: Scheduler, counters: EngineCounters, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self._clock = clock
        self._lock = threading.Lock()
        self._outputs: list[Output] = []
        self._sequences: dict[str, Sequence] = {}
        """Unfinished sequences, and finished ones whose blocks are held for export."""
        self._ids: set[str] = set()
        """Ids of `_sequences`, and of requests whose command to add them has not run yet."""
        self._arriving: Counter[str] = Counter()
        """The latter by tenant."""

    # --- From any thread ---

    def reserve(self, request_id: str, tenant: str, post: Callable[[], bool]) -> bool:
        """
        Reserve the id of a request, then call `post` to post the command that adds it.

        Returns the result of `post`. Raises Overloaded if the queue is full, or the share of `tenant`, which
        leaves room for others. Raises InvalidRequest if the id is in use.
        """
        limit = self._scheduler.limits.max_queued
        with self._lock:
            queued = len(self._scheduler.waiting) + self.arriving
            if queued >= limit:
                raise Overloaded(queued, limit)
            queued_of_tenant = self._scheduler.waiting.count(tenant) + self._arriving[tenant]
            share = math.ceil(TENANT_SHARE * (limit - queued + queued_of_tenant))
            if tenant and queued_of_tenant and queued_of_tenant >= share:
                raise Overloaded(queued_of_tenant, share)
            if request_id in self._ids:
                raise InvalidRequest(f"A request with the id {request_id[:128]!r} is already being served.")
            self._ids.add(request_id)
            self._arriving[tenant] += 1
            if not post():
                self._ids.discard(request_id)
                return False
            return True

    @property
    def arriving(self) -> int:
        """Requests whose command to add them has not run yet."""
        return max(0, len(self._ids) - len(self._sequences))

    # --- On the engine's thread ---

    @property
    def empty(self) -> bool:
        """Whether there is no sequence, not even a finished one whose blocks are held for export."""
        return not self._sequences

    def get(self, request_id: str) -> Sequence | None:
        return self._sequences.get(request_id)

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.request.id] = sequence
        self._scheduler.add(sequence)
        tenant = sequence.request.tenant
        with self._lock:
            self._arriving[tenant] -= 1
            if not self._arriving[tenant]:
                del self._arriving[tenant]

    def add_token(
        self,
        sequence: Sequence,
        choice: TokenChoice,
        *,
        relay: RelayRecord | None = None,
        prompt_output: Vector | PromptLogprobs | None = None,
    ) -> None:
        """Report a token sampled by this engine or by a prefill worker; it may end the request."""
        request = sequence.request
        sequence.output.append(choice.token)
        try:
            sequence.sampling_state.push(choice.token)
        except Exception as error:  # an error of one request's matcher must not end the other requests
            log.error("Request %s ends.", request.id, exc_info=error, extra=log_fields(sequence))
            client_error = error if isinstance(error, BatonError) else InternalError()
            self.end(sequence, FinishReason.ERROR, client_error)
            return
        finish = self._finish_reason(sequence, choice.token)
        first = len(sequence.output) == 1
        if finish is None and not first and relay is None and prompt_output is None:
            self._outputs.append(Output(request.id, (choice,)))
            return
        self._outputs.append(
            Output(
                request.id,
                (choice,),
                finish,
                stop_id=choice.token if choice.token in request.sampling.stop_ids else None,
                cached_tokens=sequence.cached_tokens,
                peer_tokens=sequence.peer_tokens,
                tier_tokens=sequence.tier_tokens,
                tail=sequence.tail if first else b"",
                fallback=sequence.fallback if first else "",
                relay=relay,
                timing=self._timing(sequence) if first and relay is None else None,
                prompt_output=prompt_output,
            )
        )
        if finish is not None:
            self._leave(sequence, finish)

    def end_with_prompt(self, sequence: Sequence, result: Vector | PromptLogprobs | None) -> None:
        """End a request that generates no tokens."""
        request = sequence.request
        finish = FinishReason.LENGTH if request.pooling is None else FinishReason.STOP
        self._outputs.append(
            Output(request.id, finish=finish, cached_tokens=sequence.cached_tokens, prompt_output=result)
        )
        self._leave(sequence, finish)

    def end(self, sequence: Sequence, finish: FinishReason, error: Exception | None = None) -> None:
        request = sequence.request
        self._outputs.append(
            Output(request.id, finish=finish, cached_tokens=sequence.cached_tokens, error=error)
        )
        self._leave(sequence, finish)

    def abort(self, request_id: str) -> None:
        """End a request with ABORT if it has not ended, and free its exported blocks."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.cancelled:
            return
        if sequence.stage is not Stage.HELD:
            self._outputs.append(
                Output(request_id, finish=FinishReason.ABORT, cached_tokens=sequence.cached_tokens)
            )
        self._leave(sequence, FinishReason.ABORT, hold=False)

    def finish(self, request_id: str) -> None:
        """End a request with STOP if it is running, or waits or is being restored after a retraction."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.cancelled:
            return
        if sequence.stage in (Stage.WAITING, Stage.FETCHING, Stage.RUNNING):
            self.end(sequence, FinishReason.STOP)

    def end_all(self, finish: FinishReason, error: Exception | None = None) -> None:
        """End every request, also those whose command to add them has not run yet."""
        for request_id in list(self._ids):
            sequence = self._sequences.get(request_id)
            if sequence is not None and (sequence.cancelled or sequence.stage is Stage.HELD):
                continue
            source = None if sequence is None else sequence.source
            if sequence is not None and sequence.stage is Stage.FETCHING and source is not None:
                source.cancel(request_id)
            self._outputs.append(Output(request_id, finish=finish, error=error))

    def forget(self, sequence: Sequence) -> None:
        """Release the id of a sequence that has ended."""
        del self._sequences[sequence.request.id]
        self._ids.discard(sequence.request.id)

    def take_outputs(self) -> list[Output]:
        """Return and clear the outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        request, mask = sequence.request, sequence.sampling_state.token_mask
        if token in request.sampling.stop_ids or (mask is not None and mask.finished):
            return FinishReason.STOP
        if (
            len(sequence.output) >= request.sampling.max_tokens
            or sequence.length >= self._scheduler.limits.max_model_len
            or request.export is not None  # another worker generates the rest
        ):
            return FinishReason.LENGTH
        return None

    def _timing(self, sequence: Sequence) -> PromptTiming:
        admitted = sequence.admitted_at
        timing = PromptTiming(admitted - sequence.arrived_at, self._clock() - admitted)
        self._counters.add_first_token(timing)
        return timing

    def _leave(self, sequence: Sequence, finish: FinishReason, *, hold: bool = True) -> None:
        if sequence.stage is not Stage.HELD:  # held sequences were counted when they ended
            self._counters.totals.finished[finish] += 1
        self._scheduler.end(sequence, hold=hold)
        if sequence.cancelled and sequence.source is not None:
            sequence.source.cancel(sequence.request.id)
        if sequence.stage is Stage.ENDED:
            self.forget(sequence)


class PassResults:
    """Counts computed tokens, adds sampled ones, and announces blocks of exported requests."""

    def __init__(
        self, scheduler: Scheduler, lifecycle: Lifecycle, cache: KVCache, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._cache = cache
        self._clock = clock

    def advance(self, chunk: ScheduledChunk, seconds: float, choice: Sampled, written: Event) -> None:
        """
        Process the results of a chunk that was computed in a forward pass of `seconds`.

        `written` is an event behind the pass.
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
            request.export.computed(request.id, sequence.computed, sequence.blocks, event)
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


def log_fields(sequence: Sequence) -> dict[str, Mapping[str, str]]:
    """The `extra` of a log line about a sequence."""
    return logs.of(sequence.request.client_id or sequence.request.id)
