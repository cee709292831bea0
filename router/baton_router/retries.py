"""How many retries an overload may cause: a share of the requests, so that it cannot feed itself."""

from __future__ import annotations

from collections.abc import Callable

RESERVE = 10.0
"""Retries that are possible without requests before them: enough for a quiet router's bad moment."""

LEAST_PER_S = 1.0
"""Retries that come back by themselves: what waits for one gets it, though nobody else comes."""


class RetryBudget:
    """Each request earns a part of a retry, and so does time; a retry spends a whole one."""

    def __init__(self, ratio: float, clock: Callable[[], float]) -> None:
        self._ratio = ratio
        self._clock = clock
        self._saved = RESERVE
        self._looked = clock()

    def earn(self) -> None:
        self._saved = min(RESERVE, self._saved + self._ratio)

    def spend(self) -> bool:
        """Whether there was one to spend; never, if requests earn nothing."""
        now = self._clock()
        self._saved = min(RESERVE, self._saved + LEAST_PER_S * (now - self._looked))
        self._looked = now
        if self._saved < 1.0 or not self._ratio:
            return False
        self._saved -= 1.0
        return True
