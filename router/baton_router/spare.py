"""
Whether a worker can be given another prompt: when the next one would else find it idle, and not before.

What it already has cannot be put in another order any more, nor go elsewhere.
"""

from __future__ import annotations

from baton_router.knowledge import Known

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
