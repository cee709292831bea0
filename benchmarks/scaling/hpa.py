"""
A HorizontalPodAutoscaler's rule for the CPU, with every default of Kubernetes' own.

80 % of the CPU, looked at every 15 s; within a tenth of it nothing happens. A pod that is not ready, or has
only been so for half a minute of its first five, counts as idle where more are needed, and not at all where
fewer are. Growth is bounded by twice as many or four more each 15 s, whichever is more; a fall is to what was
recommended at most in the last 300 s. At least one stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton_operator.rollout.decision import RoleName
from benchmarks.scaling.case import ROLES
from benchmarks.scaling.world import Pod, Sight

TARGET, TOLERANCE = 0.8, 0.1
DOWN_S = 300.0
STARTING_S, SETTLED_S = 300.0, 30.0


class Hpa:
    """One for each role."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._recommended: dict[RoleName, list[tuple[float, int]]] = {name: [] for name in ROLES}

    def wanted(self, sample: Sight) -> dict[RoleName, int]:
        return {name: self._of(name, sample) for name in ROLES}

    def _of(self, name: RoleName, sample: Sight) -> int:
        there = len(sample.pods[name])
        known = {pod.name: sample.busy[pod.name] for pod in sample.pods[name] if pod.name in sample.busy}
        settled = [
            known[pod.name] for pod in sample.pods[name] if pod.name in known and _settled(pod, sample.now)
        ]
        wish = recommended(settled, there - len(settled), there) if settled else there
        recent = [(at, count) for at, count in self._recommended[name] if at > sample.now - DOWN_S]
        self._recommended[name] = [*recent, (sample.now, wish)]
        if wish < there:
            wish = min(there, max(count for _, count in self._recommended[name]))
        return max(1, min(self._most, wish, max(2 * there, there + 4)))


def recommended(busy: Sequence[float], starting: int, there: int) -> int:
    """
    Pods by the CPU of those that count, and how many there are that do not.

    >>> recommended([0.95, 0.99], 0, 2), recommended([0.95, 0.99], 1, 3), recommended([0.2, 0.2], 1, 3)
    (3, 3, 1)
    """
    ratio = sum(busy) / len(busy) / TARGET
    if starting and ratio > 1:
        ratio = sum(busy) / (len(busy) + starting) / TARGET
        if ratio < 1:
            return there
        return there if ratio <= 1 + TOLERANCE else max(there, math.ceil(ratio * (len(busy) + starting)))
    if abs(ratio - 1) <= TOLERANCE:
        return there
    return math.ceil(ratio * len(busy))


def _settled(pod: Pod, now: float) -> bool:
    if pod.ready_s is None:
        return False
    return now - pod.started_s >= STARTING_S or now - pod.ready_s >= SETTLED_S
