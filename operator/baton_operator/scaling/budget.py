"""
Who grows where there are not accelerators for all: those who need it most, and only into what is free.

What a role gives up is free when its pods are gone, not when that was decided; until then it counts as taken.
Nobody is made smaller for the sake of another: the budget holds growth back, and moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wish:
    """What one role would like to have. All numbers are at least 0."""

    holder: str
    """Which role of which service."""
    gpus: int
    """Of one worker."""
    there: int
    """Workers that are asked for now."""
    pods: int
    """That are there, those that end too."""
    wished: int
    pressure: float
    """What it needs against what it has."""

    @property
    def taken(self) -> int:
        """Accelerators that are not free because of it."""
        return self.gpus * max(self.there, self.pods)


def granted(wishes: Iterable[Wish], gpus: int) -> Mapping[str, int]:
    """
    Workers for each holder: as many as it wishes, or less if it would grow.

    >>> small = Wish("chat/prefill", 1, there=2, pods=2, wished=6, pressure=1.2)
    >>> great = Wish("chat/decode", 2, there=1, pods=1, wished=3, pressure=2.0)
    >>> granted([small, great], 10)
    {'chat/decode': 3, 'chat/prefill': 4}
    """
    ordered = sorted(wishes, key=lambda one: (-one.pressure, one.holder))
    free = gpus - sum(one.taken for one in ordered)
    made = {}
    for one in ordered:
        if one.wished <= one.there or not one.gpus:
            made[one.holder] = one.wished
            continue
        # What of its own still ends will not be there for long, but is there.
        more = min(one.wished - one.there, max(0, free) // one.gpus)
        free -= more * one.gpus
        made[one.holder] = one.there + more
    return made
