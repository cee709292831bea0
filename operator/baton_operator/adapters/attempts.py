"""Errors of attempts at pods, and when each may be repeated. An operator that restarts simply tries again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

FIRST_S = 1.0
LIMIT_S = 300.0
"""Limits of the exponential backoff in seconds."""

READING = ""
"""Name of the attempt to read the adapters of a pod; the others have the name of an adapter."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The last failure of an attempt."""

    message: str
    count: int
    due: float
    """When the next attempt may begin."""


class Attempts:
    """Failed attempts by pod key and name of the adapter. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: dict[tuple[str, str], Failure] = {}

    def is_due(self, pod: str, name: str = READING) -> bool:
        """Whether an attempt may begin now."""
        failure = self._failures.get((pod, name))
        return failure is None or failure.due <= self._clock()

    def failed(self, pod: str, message: str, name: str = READING) -> None:
        """Record a failure. The pause doubles with each."""
        before = self._failures.get((pod, name))
        count = before.count + 1 if before else 1
        pause = min(LIMIT_S, FIRST_S * 2.0 ** min(count - 1, 20))
        self._failures[pod, name] = Failure(message, count, self._clock() + pause)

    def succeeded(self, pod: str, name: str = READING) -> None:
        """Forget the failures of an attempt."""
        self._failures.pop((pod, name), None)

    def errors(self) -> Mapping[tuple[str, str], str]:
        """Return the last error by pod key and name."""
        return {key: one.message for key, one in self._failures.items()}

    def next_s(self, pods: Collection[str]) -> float | None:
        """Return the seconds until an attempt at these pods is due; None without failures."""
        waits = [one.due for (pod, _), one in self._failures.items() if pod in pods]
        return max(0.0, min(waits) - self._clock()) if waits else None

    def keep(self, pods: Collection[str], within: str) -> None:
        """Forget all pods of the service `within` (prefix of their keys) but these."""
        for pod, name in list(self._failures):
            if pod.startswith(within) and pod not in pods:
                del self._failures[pod, name]
