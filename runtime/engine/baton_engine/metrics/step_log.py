"""Log lines of forward passes: each pass with prompt tokens, and every 40th decode pass."""

from __future__ import annotations

import logging
from collections.abc import Callable

from baton_engine.scheduling.scheduler import Scheduler, StepPlan

log = logging.getLogger("baton_engine.batches")

DECODE_INTERVAL = 40
"""Number of decode passes per log line."""


class BatchLog:
    """Accumulates the values of log lines. The format is that of SGLang, which existing tools read."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._passes = 0
        self._tokens = 0

    def note(self, plan: StepPlan, scheduler: Scheduler, accepted: int = 0) -> None:
        """Record a completed pass that accepted `accepted` draft tokens."""
        if plan.prefills:
            log.info(
                "Prefill batch. #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
                "#running-req: %d, #queue-req: %d",
                len(plan.prefills),
                sum(tokens for _, tokens in plan.prefills),
                sum(sequence.cached_tokens for sequence in plan.admitted),
                _usage(scheduler),
                len(plan.decodes),
                len(scheduler.waiting),
            )
        if not plan.decodes:
            return
        if not self._tokens:
            self._since = self._clock()  # excludes idle time and passes without decoding
        self._passes += 1
        self._tokens += len(plan.decodes) + accepted
        if self._passes == DECODE_INTERVAL:
            now = self._clock()
            log.info(
                "Decode batch. #running-req: %d, #token: %d, token usage: %.2f, "
                "gen throughput (token/s): %.2f, #queue-req: %d",
                len(plan.decodes),
                sum(sequence.length for sequence in plan.decodes),
                _usage(scheduler),
                self._tokens / max(now - self._since, 1e-9),
                len(scheduler.waiting),
            )
            self._passes = self._tokens = 0
            self._since = now


def _usage(scheduler: Scheduler) -> float:
    return 1 - scheduler.pool.available / scheduler.pool.capacity
