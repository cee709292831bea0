"""
A list that stays sorted while items come and go.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class SortedList(Generic[Item]):
    """Items sorted by a key and a number."""

    __slots__ = ("_items", "_keys")

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []
        self._items: list[Item] = []

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: float, number: int, item: Item) -> None:
        place = bisect_left(self._keys, (key, number))
        self._keys.insert(place, (key, number))
        self._items.insert(place, item)

    def remove(self, key: float, number: int) -> bool:
        """Remove an item; return whether it was present."""
        place = bisect_left(self._keys, (key, number))
        if place == len(self._keys) or self._keys[place] != (key, number):
            return False
        del self._keys[place], self._items[place]
        return True

    def ascending(self) -> Iterator[Item]:
        """Smallest key first. Items may be added and removed meanwhile."""
        place = 0
        while place < len(self._keys):
            key, number = self._keys[place]
            yield self._items[place]
            place = bisect_left(self._keys, (key, number + 1))

    def up_to(self, key: float) -> list[Item]:
        """All items with this key or a smaller one."""
        return self._items[: bisect_left(self._keys, (key, 1 << 62))]

    @property
    def first(self) -> tuple[float, Item] | None:
        """The smallest key and its item."""
        return (self._keys[0][0], self._items[0]) if self._keys else None
