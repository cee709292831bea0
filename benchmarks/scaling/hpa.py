"""
The rule of a HorizontalPodAutoscaler for the CPU, with the defaults of Kubernetes.

The target is 80 % of the CPU, checked every 15 s, with a tolerance of a tenth. Some pods are not ready, or
were ready for only half a minute of their first five. They count as idle when more pods are needed, and are
ignored when fewer are. Every 15 s the number at most doubles or grows by four, whichever is more. It falls
only to the highest recommendation of the last 300 s, and at least one pod stays.
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
    """The autoscalers of all roles."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._recommended: dict[RoleName, list[tuple[float, int]]] = {name: [] for name in ROLES}

    def wanted(self, sample: Sight) -> dict[RoleName, int]:
        return {name: self._of(name, sample) for name in ROLES}

    def _of(self, name: RoleName, sample: Sight) -> int:
        pods = len(sample.pods[name])
        usage = {pod.name: sample.busy[pod.name] for pod in sample.pods[name] if pod.name in sample.busy}
        settled = [
            usage[pod.name] for pod in sample.pods[name] if pod.name in usage and _settled(pod, sample.now)
        ]
        replicas = recommended(settled, pods - len(settled), pods) if settled else pods
        recent = [(at, count) for at, count in self._recommended[name] if at > sample.now - DOWN_S]
        self._recommended[name] = [*recent, (sample.now, replicas)]
        if replicas < pods:
            replicas = min(pods, max(count for _, count in self._recommended[name]))
        return max(1, min(self._most, replicas, max(2 * pods, pods + 4)))


def recommended(busy: Sequence[float], starting: int, pods: int) -> int:
    """
    Return the number of pods by the CPU usage of settled pods and the number of starting ones.

    >>> recommended([0.95, 0.99], 0, 2), recommended([0.95, 0.99], 1, 3), recommended([0.2, 0.2], 1, 3)
    (3, 3, 1)
    """
    ratio = sum(busy) / len(busy) / TARGET
    if starting and ratio > 1:
        ratio = sum(busy) / (len(busy) + starting) / TARGET
        if ratio < 1:
            return pods
        return pods if ratio <= 1 + TOLERANCE else max(pods, math.ceil(ratio * (len(busy) + starting)))
    if abs(ratio - 1) <= TOLERANCE:
        return pods
    return math.ceil(ratio * len(busy))


def _settled(pod: Pod, now: float) -> bool:
    if pod.ready_s is None:
        return False
    return now - pod.started_s >= STARTING_S or now - pod.ready_s >= SETTLED_S
