"""
Where those who wait were last going to go, by worker: whether any of them could go now.

A look at the queue comes with every answer that begins. Asking all who wait each time would make a request
the dearer the more others wait, so this answers for them, from a bound: the smallest prompt that was meant
for each worker. It may say yes in vain, and never no.
"""

from __future__ import annotations

import math

from baton_router.knowledge import Known
from baton_router.spare import busy_s, takes


class Wishes:
    """Of the requests that wait for the same workers."""

    __slots__ = ("_again", "_least")

    def __init__(self) -> None:
        self._least: dict[Known, int] = {}
        """Tokens to compute of the smallest prompt that was meant for it."""
        self._again = math.inf
        """When the first of them may want another."""

    def add(self, known: Known, tokens: int, again: float) -> None:
        """One more with so many tokens to compute, who may want another worker from `again` on."""
        self._least[known] = min(tokens, self._least.get(known, tokens))
        self._again = min(again, self._again)

    def anywhere(self) -> None:
        """One more for whom there was no worker, and for whom one has to be looked for."""
        self._again = -math.inf

    def could_go(self, most: int, now: float) -> bool:
        """Whether one of them might be taken, by workers that are given `most` tokens at a time."""
        if now >= self._again:
            return True
        return any(takes(known, tokens, most, now) for known, tokens in self._least.items())

    def free_in(self, now: float) -> float:
        """Seconds until the first of these workers that has too much left has not."""
        return min((left for known in self._least if (left := busy_s(known, now)) > 0), default=math.inf)
