"""
When a busy worker can take its next prompt, and whether any queued request might go then.

A worker gets its next prompt shortly before it would be idle: a prompt that was sent can neither be reordered
nor moved. The queue is checked with every answer that begins. Checking each queued request would cost more
the more of them wait, so `QueueWakeup` decides by a bound, the smallest prompt meant for each worker. It may
wake the queue for nothing, but never misses a request that could go.
"""

from __future__ import annotations

import math

from baton_router.workers.worker_state import WorkerState

NEARLY_DONE_S = 0.020
"""A worker with less left to compute counts as free: the next prompt arrives before it is idle."""

BATCHED_PROMPTS_S = 0.25
"""Predicted seconds, one after the other, of short prompts that a worker may have at a time. It computes them
together, in about the time of one."""

BATCH_FREE_SHARE = 0.1
"""Share of a decode worker's KV blocks that requests of class batch leave free."""


def has_capacity(state: WorkerState, tokens: int, most: int, now: float) -> bool:
    """Whether the worker can take a prompt with `tokens` to compute; it gets at most `most` at a time."""
    prefills = state.prefills
    if not prefills.waiting:
        return True
    return prefills.tokens + tokens <= most and busy_s(state, now) <= 0


def busy_s(state: WorkerState, now: float) -> float:
    """Seconds until the worker can take more; 0 or less if it can now."""
    prefills = state.prefills
    if not prefills.waiting or not state.prefill_cost.is_calibrated:
        return 0.0  # without reports of its speed, only the tokens are counted
    left = prefills.backlog_s(now)
    # Prompts that are computed together share the constant part of the time.
    constant = max(0.0, state.prefill_cost.line.coefficients[0])
    return max(left - prefills.waiting * constant - NEARLY_DONE_S, left - BATCHED_PROMPTS_S)


def has_spare_blocks(state: WorkerState) -> bool:
    """Whether the worker may generate for class batch."""
    return not state.streams.count or state.free_blocks >= BATCH_FREE_SHARE * state.total_blocks


class QueueWakeup:
    """Decides whether one of a pool's requests might go."""

    __slots__ = ("_least", "_replan_at")

    def __init__(self) -> None:
        self._least: dict[WorkerState, int] = {}
        """Tokens of the smallest prompt planned for each worker."""
        self._replan_at = math.inf
        """Time from which a request may prefer another worker."""

    def add(self, state: WorkerState, tokens: int, replan_at: float) -> None:
        """Add a request with `tokens` to compute, which may prefer another worker from `replan_at` on."""
        self._least[state] = min(tokens, self._least.get(state, tokens))
        self._replan_at = min(replan_at, self._replan_at)

    def add_unplanned(self) -> None:
        """Add a request without a worker; it must be planned at the next check."""
        self._replan_at = -math.inf

    def may_go(self, most: int, now: float) -> bool:
        """Whether a request might be taken by workers that get `most` tokens at a time."""
        if now >= self._replan_at:
            return True
        return any(has_capacity(state, tokens, most, now) for state, tokens in self._least.items())

    def seconds_until_free(self, now: float) -> float:
        """Seconds until the first busy worker is free."""
        return min((left for state in self._least if (left := busy_s(state, now)) > 0), default=math.inf)
