"""
What the autoscaler learns from past samples: trend of the demand, lasting recommendations, start-up times
and the capacity of a worker.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from baton_operator.cluster.state import Pod

TREND_S = 300.0
"""Of the past that a line is drawn through."""

GROWTH_LIMIT = 1.5
"""Times the present demand that is believed."""

LEAST_SAMPLES = 8

DOUBT = 3.0
"""Standard errors that are taken off. Rates over two minutes, looked at every 15 s, share most of what they
count: eight say as much as one does, so that a line is less certain by about the root of eight."""

TimedValue = tuple[float, float]
"""Time and value."""


def forecast(samples: Sequence[TimedValue], now_value: float, ahead_s: float) -> float:
    """
    The demand `ahead_s` from now, at least `now_value`.

    >>> rising = [(15.0 * step, 100.0 + 15.0 * step) for step in range(10)]
    >>> forecast(rising, 235.0, 60.0)
    295.0
    >>> forecast(rising[::-1], 235.0, 600.0)
    352.5
    """
    return max(now_value, min(GROWTH_LIMIT * now_value, now_value + max(0.0, slope(samples)) * ahead_s))


def slope(samples: Sequence[TimedValue]) -> float:
    """By which the values rise each second, less its uncertainty; 0 of too few samples."""
    count = len(samples)
    if count < LEAST_SAMPLES:
        return 0.0
    mean_time = sum(time for time, _ in samples) / count
    mean_value = sum(value for _, value in samples) / count
    spread = sum((time - mean_time) ** 2 for time, _ in samples)
    if not spread:
        return 0.0
    rise = sum((time - mean_time) * (value - mean_value) for time, value in samples) / spread
    missed = sum((value - mean_value - rise * (time - mean_time)) ** 2 for time, value in samples)
    return rise - DOUBT * math.sqrt(missed / (count - 2) / spread)


Recommendation = tuple[float, int]
"""Time and recommendation."""

WINDOW_FILLED = 0.9
"""Of a window that must have been seen before a fall counts."""


@dataclass(frozen=True, slots=True)
class RecommendationWindows:
    """Times are those of one clock, in seconds."""

    since: float
    """When looking began: nothing is known of before."""
    rises: tuple[Recommendation, ...] = ()
    """The least of any later time is among them."""
    falls: tuple[Recommendation, ...] = ()
    """The greatest of any later time is among them."""

    def with_one(self, now: float, raw: int, up_s: float, down_s: float) -> RecommendationWindows:
        """The same with what is recommended now."""
        rises = _kept(self.rises, now - up_s, lambda old: old < raw)
        falls = _kept(self.falls, now - down_s, lambda old: old > raw)
        return replace(self, rises=(*rises, (now, raw)), falls=(*falls, (now, raw)))

    @property
    def lasting_rise(self) -> int:
        """The least of the window, as far as it was seen: who has just begun to look may add workers."""
        return self.rises[0][1]

    def lasting_fall(self, now: float, down_s: float) -> int | None:
        """The greatest of the window; None while too little of it was seen."""
        return self.falls[0][1] if now - self.since >= WINDOW_FILLED * down_s else None


def _kept(
    entries: tuple[Recommendation, ...], after: float, stays: Callable[[int], bool]
) -> tuple[Recommendation, ...]:
    return tuple(entry for entry in entries if entry[0] > after and stays(entry[1]))


STARTUPS_KEPT = 20
LEAST_S = 1.0


class StartupTimes:
    """Of one role."""

    def __init__(self) -> None:
        self._starting: set[str] = set()
        self._took: deque[float] = deque(maxlen=STARTUPS_KEPT)

    def look(self, pods: Iterable[Pod], now: float) -> None:
        """The role's pods as they are at this Unix time."""
        starting = set()
        for pod in pods:
            if pod.terminating:
                continue
            if not pod.ready:
                starting.add(pod.name)
            elif pod.name in self._starting and not pod.restarts:
                self._took.append(max(LEAST_S, now - pod.created))
        self._starting = starting

    @property
    def most_s(self) -> float | None:
        """Nine of ten took no longer; None if none was seen."""
        ordered = sorted(self._took)
        return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))] if ordered else None


SAMPLES = 64
ENOUGH_SAMPLES = 20
"""Samples that count for more than what was believed before."""

QUANTILE = 0.8
STEP = 1.25
"""Times what was believed that one more sample can make of it."""


@dataclass(frozen=True, slots=True)
class CapacityEstimate:
    """Tokens a second of one worker at the load that is aimed at."""

    samples: tuple[float, ...] = ()
    """The last ones, the newest at the end."""
    seed: float | None = None
    """What was believed before: of the older revision, of a profile, or by the operator before this one."""

    @property
    def value(self) -> float | None:
        """
        What was believed before, until there are `ENOUGH` samples; None while there is neither.

        >>> CapacityEstimate((9.0, 10.0, 10.0, 11.0, 50.0)).value
        11.0
        >>> CapacityEstimate(seed=8.0).value, CapacityEstimate().value
        (8.0, None)
        >>> CapacityEstimate((2.0,) * 19, seed=8.0).value, CapacityEstimate((2.0,) * 20, seed=8.0).value
        (8.0, 2.0)
        """
        if not self.samples or (self.seed is not None and not self.learnt):
            return self.seed
        ordered = sorted(self.samples)
        return ordered[int(QUANTILE * (len(ordered) - 1))]

    @property
    def learnt(self) -> bool:
        """Whether what was seen counts."""
        return len(self.samples) >= (1 if self.seed is None else ENOUGH_SAMPLES)

    def learned(self, sample: float | None) -> CapacityEstimate:
        """The same with one sample more, if there is one."""
        if sample is None or sample <= 0:
            return self
        before = self.value
        believed = sample if before is None else min(sample, STEP * before)
        return replace(self, samples=(*self.samples, believed)[-SAMPLES:])
