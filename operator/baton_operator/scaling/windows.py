"""
What was recommended lately: a rise counts if it has lasted, a fall if it has lasted for much longer.

Of a window's values only those are kept that may still become its least, or its greatest, so that a window
of a day is as cheap as one of a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

Entry = tuple[float, int]
"""Time and recommendation."""

FULL = 0.9
"""Of a window that must have been seen before a fall counts."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Times are those of one clock, in seconds."""

    since: float
    """When looking began: nothing is known of before."""
    rises: tuple[Entry, ...] = ()
    """The least of any later time is among them."""
    falls: tuple[Entry, ...] = ()
    """The greatest of any later time is among them."""

    def with_one(self, now: float, raw: int, up_s: float, down_s: float) -> Windows:
        """The same with what is recommended now."""
        rises = _kept(self.rises, now - up_s, lambda old: old < raw)
        falls = _kept(self.falls, now - down_s, lambda old: old > raw)
        return replace(self, rises=(*rises, (now, raw)), falls=(*falls, (now, raw)))

    @property
    def lasting_rise(self) -> int:
        """The least of the window, as far as it was seen: who has just begun to look may add workers."""
        return self.rises[0][1]

    def lasting_fall(self, now: float, down_s: float) -> int | None:
        """The greatest of the window; None while too little of it was seen."""
        return self.falls[0][1] if now - self.since >= FULL * down_s else None


def _kept(entries: tuple[Entry, ...], after: float, stays: Callable[[int], bool]) -> tuple[Entry, ...]:
    return tuple(entry for entry in entries if entry[0] > after and stays(entry[1]))
