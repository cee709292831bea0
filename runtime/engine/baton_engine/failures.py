"""
Failures of forward passes: which ones the engine survives, and what it does then.

A pass that ran out of memory has changed nothing that counts, because tokens are counted and blocks are
published after a pass, except for states of a draft head (ADR 50). So the same tokens are computed again in
smaller passes. Errors of an accelerator
persist in its context until the process ends. After other errors only the pass's requests end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from baton_api.errors import InternalError
from baton_engine.forward_pass import ScheduledChunk
from baton_engine.lifecycle import Lifecycle
from baton_engine.metrics.counters import EngineCounters
from baton_engine.model.group import RankFailed
from baton_engine.pass_errors import FailureKind, failure_of
from baton_engine.requests import FinishReason
from baton_engine.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

FAILURES_LIMIT = 5
"""Consecutive failed forward passes after which the worker exits: a new process may recover."""

RECOVERY_PASSES = 1024
"""Successful passes after which the limits that were lowered are doubled, up to those at startup."""


class EngineFailed(Exception):
    """The engine cannot continue, for the reason in the text."""


@dataclass(frozen=True, slots=True)
class SmallerLimits:
    """Lower limits of the next passes. None: unchanged."""

    chunk_tokens: int | None = None
    running: int | None = None
    """Sequences; further ones are retracted."""


def smaller_limits(tokens: int, prompt_tokens: int, rows: int, least: int) -> SmallerLimits | None:
    """
    Return the limits after a pass of `tokens` in `rows` ran out of memory, or None if it cannot be smaller.

    Of the tokens, `prompt_tokens` are of prompts. They are halved first, down to `least` tokens, because
    generating sequences then lose no time. Then half of the sequences must wait.
    """
    if prompt_tokens > least:
        return SmallerLimits(chunk_tokens=tokens - prompt_tokens + max(least, prompt_tokens // 2))
    return SmallerLimits(running=rows // 2) if rows > 1 else None


class PassFailures:
    """Handles the failed passes of one engine, on its thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        lifecycle: Lifecycle,
        counters: EngineCounters,
        release_memory: Callable[[], None],
    ) -> None:
        """`release_memory` returns unused memory to the device."""
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._counters = counters
        self._release_memory = release_memory
        self._at_start = scheduler.limits
        self._in_a_row = 0
        self._since_reduced = 0

    def succeeded(self) -> None:
        """Count a successful pass."""
        self._in_a_row = 0
        now, most = self._scheduler.limits, self._at_start
        if now == most:
            return
        self._since_reduced += 1
        if self._since_reduced == RECOVERY_PASSES:
            self._since_reduced = 0
            self._scheduler.limits = replace(
                now,
                chunk_tokens=min(2 * now.chunk_tokens, most.chunk_tokens),
                max_running=min(2 * now.max_running, most.max_running),
            )

    def note(self, chunks: Collection[ScheduledChunk], error: Exception) -> tuple[FailureKind, str]:
        """Log a failed pass. Return its kind and text, without the traceback, which keeps its tensors."""
        failure, text = failure_of(error), str(error)
        if failure is FailureKind.LASTING and not isinstance(error, RankFailed):
            text = f"the accelerator failed permanently: {text}"
        if failure is FailureKind.MEMORY:
            self._counters.totals.out_of_memory += 1
            log.warning("A forward pass of %d tokens ran out of memory: %s", _tokens(chunks), error)
        else:
            names = ", ".join(chunk.sequence.request.id for chunk in chunks)
            log.error("A forward pass failed; these requests end: %s", names, exc_info=error)
        return failure, text

    def recover(self, chunks: Collection[ScheduledChunk], failure: FailureKind, text: str) -> str | None:
        """
        Make the next passes smaller, or end the requests of the failed one.

        Returns the reason if the worker should be replaced. Raises EngineFailed after a lasting failure.
        """
        if failure is FailureKind.MEMORY:
            self._release_memory()
            if self._relieve(chunks):
                return None
        for chunk in chunks:
            self._lifecycle.end(chunk.sequence, FinishReason.ERROR, InternalError())
        if failure is FailureKind.LASTING:
            raise EngineFailed(text)
        self._in_a_row += 1
        if self._in_a_row != FAILURES_LIMIT:
            return None
        return f"the last {FAILURES_LIMIT} forward passes failed, the last one with: {text}"

    def _relieve(self, chunks: Collection[ScheduledChunk]) -> bool:
        """Lower the limits after a pass that ran out of memory. Returns whether the next one is smaller."""
        scheduler = self._scheduler
        if drafted := [chunk.sequence for chunk in chunks if chunk.draft]:
            for sequence in drafted:
                sequence.speculates = False
                scheduler.trim(sequence, sequence.length)
            return True
        prompt_tokens = sum(chunk.tokens for chunk in chunks if not chunk.is_decode)
        # An encoder's prompt cannot be divided.
        least = prompt_tokens if scheduler.limits.whole_prompts else scheduler.block_size
        smaller = smaller_limits(_tokens(chunks), prompt_tokens, len(chunks), least)
        if smaller is None:
            return False
        limits = scheduler.limits
        if smaller.running is not None:
            retracted = scheduler.retract(len(scheduler.running) - smaller.running)
            self._counters.totals.retractions += len(retracted)
            if not retracted:
                return False
            limits = replace(limits, max_running=max(1, len(scheduler.running)))
        if smaller.chunk_tokens is not None:
            limits = replace(limits, chunk_tokens=smaller.chunk_tokens)
        scheduler.limits = limits
        self._since_reduced = 0
        log.warning(
            "Passes have at most %d tokens and %d requests from now on. Set --chunk-tokens, --max-running or "
            "--kv-cache-memory lower if this repeats.",
            limits.chunk_tokens,
            limits.max_running,
        )
        return True


def _tokens(chunks: Collection[ScheduledChunk]) -> int:
    return sum(chunk.size for chunk in chunks)
