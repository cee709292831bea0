"""A list that stays sorted while entries come and go, and can be walked meanwhile."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Generic, TypeVar

Thing = TypeVar("Thing")


class Ranking(Generic[Thing]):
    """Things by a key and a number; two of the same key are told apart, and ordered, by their numbers."""

    __slots__ = ("_keys", "_things")

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []
        self._things: list[Thing] = []

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: float, number: int, thing: Thing) -> None:
        place = bisect_left(self._keys, (key, number))
        self._keys.insert(place, (key, number))
        self._things.insert(place, thing)

    def remove(self, key: float, number: int) -> bool:
        """Whether it was there."""
        place = bisect_left(self._keys, (key, number))
        if place == len(self._keys) or self._keys[place] != (key, number):
            return False
        del self._keys[place], self._things[place]
        return True

    def walk(self) -> Iterator[Thing]:
        """The smallest key first. What comes and goes meanwhile, before or behind, disturbs nothing."""
        place = 0
        while place < len(self._keys):
            key, number = self._keys[place]
            yield self._things[place]
            place = bisect_left(self._keys, (key, number + 1))

    def until(self, key: float) -> list[Thing]:
        """All with this key or a smaller one."""
        return self._things[: bisect_left(self._keys, (key, 1 << 62))]

    @property
    def first(self) -> tuple[float, Thing] | None:
        """The smallest key and what has it."""
        return (self._keys[0][0], self._things[0]) if self._keys else None
