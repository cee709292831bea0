"""
Worker capacity, and queue wake-up: whether a worker takes another prompt, and whether a queued one can go.

A worker gets its next prompt when it would be idle otherwise, not before: a prompt that was sent can neither
be reordered nor moved. The queue is checked with every answer that begins. Checking each queued request
would cost more the more of them wait, so the wake-up answers from a bound, the smallest prompt meant for
each worker. It may wake the queue in vain, but never misses a request that could go.
"""

from __future__ import annotations

import math

from baton_router.workers.state import Known

NEARLY_DONE_S = 0.020
"""A worker with less left to compute is free: the next prompt arrives before it would idle."""

TOGETHER_S = 0.25
"""Predicted seconds of prompts, one after the other, that a worker has at a time at most, if that is many
short ones: it computes them together, in about the time of one."""

BATCH_SPARE = 0.1
"""Share of a decode worker's KV blocks that work which nobody waits for leaves free."""


def takes(known: Known, tokens: int, most: int, now: float) -> bool:
    """Whether it can be given a prompt with so many tokens to compute, where `most` are given at a time."""
    booked = known.computing
    if not booked.waiting:
        return True
    return booked.tokens + tokens <= most and busy_s(known, now) <= 0


def busy_s(known: Known, now: float) -> float:
    """Seconds until it has so little left that it can be given more; 0 or less if it can be now."""
    booked = known.computing
    if not booked.waiting or not known.prefill_cost.taught:
        return 0.0  # of one that has said nothing yet, or never will, only the tokens are counted
    left = booked.backlog_s(now)
    # What a prompt takes whatever its length is taken once by those that are computed together.
    constant = max(0.0, known.prefill_cost.line.coefficients[0])
    return max(left - booked.waiting * constant - NEARLY_DONE_S, left - TOGETHER_S)


def has_spare_blocks(known: Known) -> bool:
    """Whether work that nobody waits for may be generated there."""
    return not known.streams.count or known.free_blocks >= BATCH_SPARE * known.total_blocks


class Wishes:
    """Of the requests that wait for the same workers."""

    __slots__ = ("_again", "_least")

    def __init__(self) -> None:
        self._least: dict[Known, int] = {}
        """Tokens to compute of the smallest prompt that was meant for it."""
        self._again = math.inf
        """When the first of them may want another."""

    def add(self, known: Known, tokens: int, again: float) -> None:
        """One more with so many tokens to compute, who may want another worker from `again` on."""
        self._least[known] = min(tokens, self._least.get(known, tokens))
        self._again = min(again, self._again)

    def anywhere(self) -> None:
        """One more for whom there was no worker, and for whom one has to be looked for."""
        self._again = -math.inf

    def could_go(self, most: int, now: float) -> bool:
        """Whether one of them might be taken, by workers that are given `most` tokens at a time."""
        if now >= self._again:
            return True
        return any(takes(known, tokens, most, now) for known, tokens in self._least.items())

    def free_in(self, now: float) -> float:
        """Seconds until the first of these workers that has too much left has not."""
        return min((left for known in self._least if (left := busy_s(known, now)) > 0), default=math.inf)
