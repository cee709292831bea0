"""Which blocks a tier has and where, in the order of their last use. Belongs to the engine's thread."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from baton_engine.kv.events import KvEvents

ANNOUNCED = 4096
"""Blocks that are published again at once, beside a forward pass: 20 ms."""


class Place(NamedTuple):
    """A block in a tier."""

    slot: int
    sum: int
    """xxh3-64 of its bytes, as they were in the pool."""
    parent: bytes


class TierIndex:
    """
    The slots of one tier. A slot is free, reserved for a block that is being copied, or has a block.

    The least recently used block is dropped for a new one. A slot that is being read is not used again until
    then.
    """

    def __init__(
        self,
        free: Sequence[int],
        medium: str,
        events: KvEvents | None,
        found: Iterable[tuple[bytes, Place]] = (),
        on_dropped: Callable[[bytes], None] | None = None,
    ) -> None:
        """
        `free` are the slots without a block, in the order of their use. `found` are blocks that it has from
        the start. `on_dropped` is called for each block that it drops.
        """
        self._medium = medium
        self._events = events
        self._on_dropped = on_dropped
        self._places: OrderedDict[bytes, Place] = OrderedDict(found)
        """By the chain hash; the first is dropped next."""
        self._free = deque(reversed(free))
        """The last is used next."""
        self.capacity = len(self._free) + len(self._places)
        self._reads: Counter[int] = Counter()
        """Reads under way, by slot."""
        self._leaving: set[int] = set()
        """Slots whose block was dropped, and that are still being read."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: bytes) -> bool:
        return name in self._places

    @property
    def free(self) -> int:
        return len(self._free)

    def place(self, name: bytes) -> Place | None:
        return self._places.get(name)

    def matched(self, names: Iterable[bytes]) -> int:
        """How many of these blocks, which follow one another, are here in a row from the first one."""
        count = 0
        for name in names:
            if name not in self._places:
                break
            count += 1
        return count

    def used(self, name: bytes) -> None:
        """The block was used, or has left the pool. Of a chain, call it for the last block first."""
        if name in self._places:
            self._places.move_to_end(name)

    def reserve(self) -> int | None:
        """Return a slot for a new block, after dropping one if none is free. None: all are in use."""
        if not self._free:
            oldest = next((n for n, place in self._places.items() if not self._reads[place.slot]), None)
            if oldest is None:
                return None
            self.drop(oldest)
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """A reserved slot is not needed."""
        self._free.append(slot)

    def add(self, name: bytes, place: Place) -> None:
        """A reserved slot has this block, valid from now on."""
        assert name not in self._places, f"{name.hex()} is in the tier already"
        self._places[name] = place
        if self._events is not None:
            self._events.stored(name, place.parent, (), medium=self._medium)

    def drop(self, name: bytes) -> None:
        """
        The block is not read any more, except by reads that have begun.

        Its slot is used again after all other free ones: it may be one that cannot be read.
        """
        place = self._places.pop(name, None)
        if place is None:
            return
        if self._events is not None:
            self._events.removed(name, self._medium)
        if self._on_dropped is not None:
            self._on_dropped(name)
        if self._reads[place.slot]:
            self._leaving.add(place.slot)
        else:
            self._free.appendleft(place.slot)

    def hold(self, names: Sequence[bytes]) -> list[Place]:
        """Begin to read the leading ones of these blocks that are here. End it by `release`."""
        for name in reversed(names):
            self.used(name)
        places = [self._places[name] for name in names[: self.matched(names)]]
        self._reads.update(place.slot for place in places)
        return places

    def release(self, places: Iterable[Place]) -> None:
        for place in places:
            self._reads[place.slot] -= 1
            if not self._reads[place.slot]:
                del self._reads[place.slot]
                if place.slot in self._leaving:
                    self._leaving.remove(place.slot)
                    self._free.appendleft(place.slot)

    def clear(self) -> None:
        for name in list(self._places):
            self.drop(name)

    def announce(self) -> Iterator[None]:
        """
        Publish all blocks again, for subscribers that have just got a snapshot of the pool. Each step of the
        iterator publishes some of them. The index may change between the steps.

        The last block of a chain is dropped first. In the reverse order, a chain becomes one event.
        """
        return self._announced([] if self._events is None else list(reversed(self._places.items())))

    def _announced(self, blocks: Sequence[tuple[bytes, Place]]) -> Iterator[None]:
        for start in range(0, len(blocks), ANNOUNCED):
            assert self._events is not None
            for name, place in blocks[start : start + ANNOUNCED]:
                if self._places.get(name) is place:  # else it was dropped, or published since as a new one
                    self._events.stored(name, place.parent, (), medium=self._medium)
            self._events.flush()
            yield
