"""How many retries an overload may cause: a share of the requests, so that it cannot feed itself."""

from __future__ import annotations

RESERVE = 10.0
"""Retries that are possible without requests before them: enough for a quiet router's bad moment."""


class RetryBudget:
    """Each request earns a part of a retry; a retry spends a whole one."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._saved = RESERVE if ratio else 0.0

    def earn(self) -> None:
        self._saved = min(RESERVE, self._saved + self._ratio)

    def spend(self) -> bool:
        """Whether there was one to spend."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True
