"""
What the demand will be when a worker that is started now is ready: a straight line through five minutes.

Only upwards, since a fall can be waited for, and to one and a half times what is there at most. The line's
own uncertainty is taken off it, so that noise around a constant demand forecasts next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

SEEN_S = 300.0
"""Of the past that a line is drawn through."""

MOST = 1.5
"""Times the present demand that is believed."""

LEAST_SAMPLES = 8

DOUBT = 3.0
"""Standard errors that are taken off. Rates over two minutes, looked at every 15 s, share most of what they
count: eight say as much as one does, so that a line is less certain by about the root of eight."""

Sample = tuple[float, float]
"""Time and value."""


def forecast(samples: Sequence[Sample], now_value: float, ahead_s: float) -> float:
    """
    The demand `ahead_s` from now, at least `now_value`.

    >>> rising = [(15.0 * step, 100.0 + 15.0 * step) for step in range(10)]
    >>> forecast(rising, 235.0, 60.0)
    295.0
    >>> forecast(rising[::-1], 235.0, 600.0)
    352.5
    """
    return max(now_value, min(MOST * now_value, now_value + max(0.0, slope(samples)) * ahead_s))


def slope(samples: Sequence[Sample]) -> float:
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
