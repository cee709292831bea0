"""
How many requests wait and how many bytes they are, against what the queue has room for.

A tenant may fill a share of the room that it and those who are not there yet have together: whoever comes
after a flood finds a place, and who is alone has nearly all of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from baton_api.errors import Overloaded

SHARE = 0.8
"""Of the room that it and those who are not there yet have together, that a tenant may fill."""


class Sized(Protocol):
    """A request that takes a place."""

    @property
    def tenant(self) -> str: ...

    @property
    def size(self) -> int:
        """Bytes of memory."""
        ...


class Places:
    """Of all who wait."""

    def __init__(self, requests: int, size: int) -> None:
        """Room for so many `requests` of together `size` bytes."""
        self._requests = requests
        self._size = size
        self._taken = 0
        self._bytes = 0
        self._counts: Counter[str] = Counter()
        """How many wait, by tenant."""
        self._held: Counter[str] = Counter()
        """Bytes of those who wait, by tenant."""

    def __len__(self) -> int:
        return self._taken

    def refuse(self, entry: Sized) -> None:
        """Raises Overloaded if its tenant has no place left."""
        count, held = self._counts[entry.tenant], self._held[entry.tenant]
        places = self._requests - self._taken + count
        room = self._size - self._bytes + held
        if count + 1 > SHARE * places:
            raise Overloaded(count, int(SHARE * places))
        if held + entry.size > SHARE * room:
            raise Overloaded(held, int(SHARE * room), what="bytes")

    def take(self, entry: Sized) -> None:
        self._count(entry, 1)

    def leave(self, entry: Sized) -> None:
        self._count(entry, -1)

    def _count(self, entry: Sized, by: int) -> None:
        self._taken += by
        self._bytes += by * entry.size
        self._counts[entry.tenant] += by
        self._held[entry.tenant] += by * entry.size
        if not self._counts[entry.tenant]:
            del self._counts[entry.tenant], self._held[entry.tenant]
