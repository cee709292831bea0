"""How long workers take to start: from a pod's making to its readiness, of pods that became so."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from baton_operator.observed import Pod

REMEMBERED = 20
LEAST_S = 1.0


class Startups:
    """Of one role."""

    def __init__(self) -> None:
        self._starting: set[str] = set()
        self._took: deque[float] = deque(maxlen=REMEMBERED)

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
