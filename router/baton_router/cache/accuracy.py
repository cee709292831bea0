"""
Whether a worker holds what it is believed to hold: the check that finds all that silently goes wrong.

Other tokens than we think, another template, a cache that is turned off, events that never come: whatever
it is, prompts that were expected to be cached are computed. A worker where that is so of half of what was
expected is chosen by its load alone, until it is right again.
"""

from __future__ import annotations

REQUESTS = 200
"""About as many are averaged over; fewer judge nobody."""

BROKEN_BELOW = 0.5
SOUND_FROM = 0.6

LEAST_TOKENS = 64
"""Expected ones: of fewer, whole blocks and the tokens' size in bytes are too large a part."""


class Parity:
    """One worker's tokens, actually cached against expected to be."""

    __slots__ = ("broken", "ratio", "requests")

    def __init__(self) -> None:
        self.ratio = 1.0
        self.requests = 0
        self.broken = False

    def learn(self, expected: float, actual: float) -> bool:
        """Whether that changed what is to be thought of the worker."""
        if expected < LEAST_TOKENS:
            return False
        self.requests += 1
        self.ratio += (min(1.0, actual / expected) - self.ratio) / min(self.requests, REQUESTS)
        before = self.broken
        if self.requests >= REQUESTS:
            self.broken = self.ratio < (SOUND_FROM if before else BROKEN_BELOW)
        return self.broken is not before
