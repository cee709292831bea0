"""
Queued requests, the capacity of workers for them, and the check that wakes the queue.

A worker gets its next prompt shortly before it would be idle: a prompt that was sent can neither be reordered
nor moved. The queue is checked with every answer that begins. Checking each queued request would cost more
the more of them wait, so `QueueWakeup` decides by a bound, the smallest prompt meant for each worker. It may
wake the queue in vain, but never misses a request that could go.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from baton_router.scheduling.admission import PredictionTolerance, WaitCorrection
from baton_router.scheduling.dispatch import Dispatch
from baton_router.scheduling.picker import PickRequest
from baton_router.scheduling.tenant_queue import QueueEntry
from baton_router.scheduling.waiting_room import WaitingRoom
from baton_router.workers.worker_state import WorkerState

NEARLY_DONE_S = 0.020
"""A worker with less left to compute is free: the next prompt arrives before it would idle."""

BATCHED_PROMPTS_S = 0.25
"""Predicted seconds of prompts, one after the other, that a worker has at a time at most, if that is many
short ones: it computes them together, in about the time of one."""

BATCH_FREE_SHARE = 0.1
"""Share of a decode worker's KV blocks that work which nobody waits for leaves free."""


def has_capacity(state: WorkerState, tokens: int, most: int, now: float) -> bool:
    """Whether it can be given a prompt with so many tokens to compute, where `most` are given at a time."""
    prefills = state.prefills
    if not prefills.waiting:
        return True
    return prefills.tokens + tokens <= most and busy_s(state, now) <= 0


def busy_s(state: WorkerState, now: float) -> float:
    """Seconds until it has so little left that it can be given more; 0 or less if it can be now."""
    prefills = state.prefills
    if not prefills.waiting or not state.prefill_cost.taught:
        return 0.0  # of one that has said nothing yet, or never will, only the tokens are counted
    left = prefills.backlog_s(now)
    # What a prompt takes whatever its length is taken once by those that are computed together.
    constant = max(0.0, state.prefill_cost.line.coefficients[0])
    return max(left - prefills.waiting * constant - NEARLY_DONE_S, left - BATCHED_PROMPTS_S)


def has_spare_blocks(state: WorkerState) -> bool:
    """Whether work that nobody waits for may be generated there."""
    return not state.streams.count or state.free_blocks >= BATCH_FREE_SHARE * state.total_blocks


class QueueWakeup:
    """Of the requests that wait for the same workers."""

    __slots__ = ("_least", "_replan_at")

    def __init__(self) -> None:
        self._least: dict[WorkerState, int] = {}
        """Tokens to compute of the smallest prompt that was meant for it."""
        self._replan_at = math.inf
        """When the first of them may want another."""

    def add(self, state: WorkerState, tokens: int, replan_at: float) -> None:
        """One more with so many tokens to compute, who may want another worker from `replan_at` on."""
        self._least[state] = min(tokens, self._least.get(state, tokens))
        self._replan_at = min(replan_at, self._replan_at)

    def add_unplanned(self) -> None:
        """One more for whom there was no worker, and for whom one has to be looked for."""
        self._replan_at = -math.inf

    def may_go(self, most: int, now: float) -> bool:
        """Whether one of them might be taken, by workers that are given `most` tokens at a time."""
        if now >= self._replan_at:
            return True
        return any(has_capacity(state, tokens, most, now) for state, tokens in self._least.items())

    def seconds_until_free(self, now: float) -> float:
        """Seconds until the first of these workers that has too much left has not."""
        return min((left for state in self._least if (left := busy_s(state, now)) > 0), default=math.inf)


REPLAN_S = 0.25
"""For so long a request that waits for a busy worker is believed to want no other."""

BYTES_PER_TOKEN = 4
"""Of prompts, as long as no worker is there to have said it."""


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedRequest(QueueEntry):
    """One request that waits, and who waits for it."""

    request: PickRequest
    future: asyncio.Future[Dispatch]
    plan: Dispatch | None
    """Where it would have gone when that was asked last; None if nowhere."""
    planned: float
    predicted_s: float = 0.0
    """Until it goes, uncorrected."""

    @property
    def replan_at(self) -> float:
        """From when on it is worth asking where it would go now."""
        return self.planned + REPLAN_S

    @property
    def prompt_tokens(self) -> int:
        return prompt_tokens(self.request, self.plan)

    def register_wakeup(self, wakeup: QueueWakeup) -> None:
        """Leave word of where it is going to go."""
        if self.plan is None:
            wakeup.add_unplanned()
        else:
            wakeup.add(self.plan.prefill_state, self.plan.uncached, self.replan_at)


class RequestPool:
    """Those who wait for the same workers."""

    __slots__ = ("pace", "room", "tolerance", "wakeup")

    def __init__(self) -> None:
        self.room = WaitingRoom()
        self.wakeup = QueueWakeup()
        self.pace = WaitCorrection()
        self.tolerance = PredictionTolerance()


def prompt_tokens(request: PickRequest, plan: Dispatch | None) -> int:
    """Tokens to compute, as far as one can tell."""
    return plan.uncached if plan else max(1, request.prompt.bytes // BYTES_PER_TOKEN)
