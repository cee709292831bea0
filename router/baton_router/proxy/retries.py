"""
The retry budget: overloaded and crashing workers may cause retries for a share of all requests.

So failures cannot feed themselves. A crash costs one retry, however many requests were lost in it. A request
that crashes one worker after another costs one each.
"""

from __future__ import annotations

from collections.abc import Callable

RESERVE = 10.0
"""Retries that are possible without requests before them: enough for a quiet router's bad moment."""

REFILL_PER_S = 1.0
"""Retries regained without new requests, so that a waiting retry succeeds on an idle router too."""


CRASH_S = 1.0
"""Seconds after a crash was paid for in which other losses of the same worker belong to it."""


class RetryBudget:
    """Each request earns a part of a retry, and so does time; a retry spends a whole one."""

    def __init__(self, ratio: float, clock: Callable[[], float]) -> None:
        self._ratio = ratio
        self._clock = clock
        self._saved = RESERVE
        self._looked = clock()
        self._paid: dict[str, float] = {}
        """When a crash of a worker was paid for, by its name."""

    def earn(self) -> None:
        self._saved = min(RESERVE, self._saved + self._ratio)

    def spend(self) -> bool:
        """Whether there was one to spend; never, if requests earn nothing."""
        now = self._clock()
        self._saved = min(RESERVE, self._saved + REFILL_PER_S * (now - self._looked))
        self._looked = now
        if self._saved < 1.0 or not self._ratio:
            return False
        self._saved -= 1.0
        return True

    def spend_after_crash(self, worker: str) -> bool:
        """Whether a request that was lost with `worker` may go to another one."""
        now = self._clock()
        self._paid = {name: at for name, at in self._paid.items() if now - at < CRASH_S}
        if worker in self._paid:
            return True
        if not self.spend():
            return False
        self._paid[worker] = now
        return True
