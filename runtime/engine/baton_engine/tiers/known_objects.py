"""
What a worker knows of the objects of a shared store: those that exist, and those that lately did not.

It is bounded, and may be out of date. Routers are told of the blocks of objects that are found, and of those
that are gone; an object that is only forgotten is still there.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from baton_api.kv_events import SHARED_STORAGE
from baton_engine.kv.events import KvEvents
from baton_engine.tiers.index import ANNOUNCED
from baton_engine.tiers.objects import Found, Group

KNOWN = 8192
"""Objects whose headers are remembered, of about 7 kB each. The least recently used is forgotten first."""

MISSES = 8192
MISS_S = 10.0
"""Seconds for which an object that was not there is not asked for again."""


@dataclass(frozen=True, slots=True)
class _Known:
    found: Found
    seen_at: float


class KnownObjects:
    """On the engine's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.events: KvEvents | None = None
        """Where they are published. None: nowhere."""
        self._clock = clock
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        """By key; the least recently used first."""
        self._missing: OrderedDict[bytes, float] = OrderedDict()
        """Until when an object that did not exist is not asked for, by key."""
        self._announcing: Iterator[None] = iter(())

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def use(self, key: bytes) -> Found | None:
        """Return an object that is to be read."""
        known = self._known.get(key)
        if known is None:
            return None
        self._known.move_to_end(key)
        return known.found

    def add(self, found: Found) -> None:
        """There is this object."""
        key = found.group.key
        self._missing.pop(key, None)
        old = self._known.pop(key, None)
        self._known[key] = _Known(found, self._clock())
        if old is None:
            self._publish(found.group)
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)

    def remove(self, key: bytes) -> None:
        """There is no object of this key any more."""
        known = self._known.pop(key, None)
        if known is not None and self.events is not None:
            for name in reversed(known.found.group.names):
                self.events.removed(name, SHARED_STORAGE)

    def miss(self, key: bytes) -> None:
        """There is no object of this key, and none is asked for soon."""
        self.remove(key)
        self._missing[key] = self._clock() + MISS_S
        self._missing.move_to_end(key)
        if len(self._missing) > MISSES:
            self._missing.popitem(last=False)

    def is_missing(self, key: bytes) -> bool:
        return self._clock() < self._missing.get(key, 0.0)

    def keep_only(self, keys: Container[bytes], before: float) -> None:
        """Remove all but these, if they were seen before this time."""
        for key, known in list(self._known.items()):
            if key not in keys and known.seen_at < before:
                self.remove(key)

    def clear(self) -> None:
        self._missing.clear()
        for key in list(self._known):
            self.remove(key)

    def announce(self) -> None:
        """Begin to publish all blocks again."""
        self._announcing = self._announced([known.found.group for known in self._known.values()])

    def announces(self) -> bool:
        """Publish some of them. False: all are."""
        return next(self._announcing, self) is None

    def _announced(self, groups: Sequence[Group]) -> Iterator[None]:
        if self.events is None or not groups:
            return
        each = max(1, ANNOUNCED // len(groups[0].names))
        for start in range(0, len(groups), each):
            for group in groups[start : start + each]:
                if group.key in self._known:
                    self._publish(group)
            self.events.flush()
            yield

    def _publish(self, group: Group) -> None:
        if self.events is not None:
            for parent, name in itertools.pairwise((group.parent, *group.names)):
                self.events.stored(name, parent, (), medium=SHARED_STORAGE)
