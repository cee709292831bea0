"""
Which generation a request goes to while there are several: each gets the share of its weight.

Every request gives each generation its share of one request as credit, and takes one from the generation
that has it. The one with most credit is next; but a conversation stays where it lies as long as that
generation is not far ahead of its share. So weights hold for any traffic, to within a few requests, and a
canary of a hundredth gets a hundredth although all conversations began elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

AHEAD_LIMIT = 8.0
"""Requests by which a generation may be ahead of its share for the sake of what it holds."""

REVISIONS_LIMIT = 64


class Shares:
    """Belongs to one thread."""

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}
        """What each is owed, in requests; all together nothing."""

    def __len__(self) -> int:
        """Generations that are remembered."""
        return len(self._credit)

    def choose(self, weights: Mapping[str, float], preferred: str) -> str:
        """One of those with a weight, of which there is at least one; `preferred` need not be."""
        credit = self._credit
        if preferred in weights and credit.get(preferred, 0.0) > -AHEAD_LIMIT:
            return preferred
        total = sum(weights.values())
        return max(weights, key=lambda revision: credit.get(revision, 0.0) + weights[revision] / total)

    def sent(self, weights: Mapping[str, float], chosen: str) -> None:
        """A request went to `chosen`, when these were those with a weight."""
        credit = self._credit
        if len(credit) > REVISIONS_LIMIT:  # of generations long gone
            credit.clear()
        total = sum(weights.values())
        for revision, weight in weights.items():
            credit[revision] = credit.get(revision, 0.0) + weight / total
        credit[chosen] = credit.get(chosen, 0.0) - 1.0
