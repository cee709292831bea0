"""
Whether and when a process that ended is started again. Pure: times are passed in.

A worker that was ready once is wanted back whatever happened to it, sooner at first and then less and
less often. One that never was ready has something wrong with its setup: starting it again would hide
what it said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0

CALM_S = 60.0
"""Seconds of being ready after which earlier crashes no longer count."""


@dataclass(frozen=True, slots=True)
class History:
    """What is known of one process, over all its starts."""

    was_ready: bool = False
    ready_at: float | None = None
    """Since when the present start is ready."""
    crashes: int = 0
    """In a row, without a calm time between."""

    def ready(self, now: float) -> History:
        return replace(self, was_ready=True, ready_at=now)

    def ended(self, now: float) -> History:
        calm = self.ready_at is not None and now - self.ready_at >= CALM_S
        return replace(self, ready_at=None, crashes=1 if calm else self.crashes + 1)

    @property
    def delay_s(self) -> float | None:
        """Seconds until the next start after an end; None: do not start it again."""
        if not self.was_ready:
            return None
        return float(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(self.crashes - 1, 16)))


def threads_each(cores: int, workers: int) -> int:
    """Compute threads per worker so that all workers together fit the cores."""
    return max(1, cores // max(1, workers))


def end_order(roles: Sequence[str]) -> list[list[int]]:
    """
    Positions of processes in the order in which they are asked to end, those of one step together.

    The router first, so that nothing new comes in; decode workers before the prefill workers that
    their waiting requests still need.

    >>> end_order(["prefill", "decode", "router", "decode"])
    [[2], [1, 3], [0]]
    """
    steps = (("router",), ("decode", "both"), ("prefill",))
    order = [[position for position, role in enumerate(roles) if role in step] for step in steps]
    return [positions for positions in order if positions]
