"""
History of the autoscaler: trend of the demand, lasting recommendations, start-up times and capacity of a
worker.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from baton_operator.cluster.state import Pod

TREND_S = 300.0
"""Length of the past for the linear fit, in seconds."""

GROWTH_LIMIT = 1.5
"""Maximum forecast relative to the present demand."""

LEAST_SAMPLES = 8

DOUBT = 3.0
"""Standard errors subtracted from the slope. Rates over two minutes, sampled every 15 s, overlap: eight
samples hold the information of one, so the error of the slope is about sqrt(8) times larger."""

TimedValue = tuple[float, float]
"""Time and value."""


def forecast(samples: Sequence[TimedValue], now_value: float, ahead_s: float) -> float:
    """
    Return the demand `ahead_s` from now, at least `now_value`: a linear fit, only upwards.

    >>> rising = [(15.0 * step, 100.0 + 15.0 * step) for step in range(10)]
    >>> forecast(rising, 235.0, 60.0)
    295.0
    >>> forecast(rising[::-1], 235.0, 600.0)
    352.5
    """
    return max(now_value, min(GROWTH_LIMIT * now_value, now_value + max(0.0, slope(samples)) * ahead_s))


def slope(samples: Sequence[TimedValue]) -> float:
    """Return the rise per second less its uncertainty; 0 for too few samples."""
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
"""Time and recommended workers."""

WINDOW_FILLED = 0.9
"""Share of a window that must be recorded before a fall counts."""


@dataclass(frozen=True, slots=True)
class RecommendationWindows:
    """Recommendations of the last minutes. Times are seconds of one clock. Only values that may still become
    a minimum or maximum are kept, so a window of a day costs as little as one of a minute.
    """

    since: float
    """Start of the recording."""
    rises: tuple[Recommendation, ...] = ()
    """Candidates for the minimum of a window."""
    falls: tuple[Recommendation, ...] = ()
    """Candidates for the maximum of a window."""

    def with_one(self, now: float, raw: int, up_s: float, down_s: float) -> RecommendationWindows:
        """Return the windows with a new recommendation."""
        rises = _kept(self.rises, now - up_s, lambda old: old < raw)
        falls = _kept(self.falls, now - down_s, lambda old: old > raw)
        return replace(self, rises=(*rises, (now, raw)), falls=(*falls, (now, raw)))

    @property
    def lasting_rise(self) -> int:
        """Minimum of the recorded part of the window, so a new autoscaler may add workers."""
        return self.rises[0][1]

    def lasting_fall(self, now: float, down_s: float) -> int | None:
        """Return the maximum of the window; None while too little is recorded."""
        return self.falls[0][1] if now - self.since >= WINDOW_FILLED * down_s else None


def _kept(
    entries: tuple[Recommendation, ...], after: float, stays: Callable[[int], bool]
) -> tuple[Recommendation, ...]:
    return tuple(entry for entry in entries if entry[0] > after and stays(entry[1]))


STARTUPS_KEPT = 20
LEAST_S = 1.0


class StartupTimes:
    """Start-up times of the workers of one role: from creation to readiness of their pods."""

    def __init__(self) -> None:
        self._starting: set[str] = set()
        self._took: deque[float] = deque(maxlen=STARTUPS_KEPT)

    def look(self, pods: Iterable[Pod], now: float) -> None:
        """Record the pods of the role at this Unix time."""
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
        """90th percentile; None without a measurement."""
        ordered = sorted(self._took)
        return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))] if ordered else None


SAMPLES = 64
ENOUGH_SAMPLES = 20
"""Samples that replace the seed."""

QUANTILE = 0.8
STEP = 1.25
"""Maximum growth of the estimate by one sample."""


@dataclass(frozen=True, slots=True)
class CapacityEstimate:
    """Tokens per second of one worker at its target utilization, learned from samples. It is the 80th
    percentile of the last samples, so neither one slow worker nor one lucky minute decides.
    """

    samples: tuple[float, ...] = ()
    """The last samples, the newest at the end."""
    seed: float | None = None
    """Initial estimate: of the old revision, or of the previous operator."""

    @property
    def value(self) -> float | None:
        """
        The seed, until there are `ENOUGH_SAMPLES` samples; None without either.

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
        """Whether the samples count, and not the seed."""
        return len(self.samples) >= (1 if self.seed is None else ENOUGH_SAMPLES)

    def learned(self, sample: float | None) -> CapacityEstimate:
        """Return the estimate with one more sample, if it is known."""
        if sample is None or sample <= 0:
            return self
        before = self.value
        believed = sample if before is None else min(sample, STEP * before)
        return replace(self, samples=(*self.samples, believed)[-SAMPLES:])
