"""
What has still to be looked at: each service once, however often something about it has changed.

A key that is being worked on and changes again is looked at again, and never by two at once. One that failed
comes back later, the later the oftener it fails; one that wants to be looked at in a while comes back then.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable

Key = tuple[str, str, str]
"""Kind, namespace and name."""

FIRST_S = 0.5
LIMIT_S = 300.0
"""Seconds after which a key that failed comes back: twice as many each time, at the most."""


class WorkQueue:
    """Belongs to one event loop. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float], rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._due: dict[Key, float] = {}
        """When each key that waits is to be taken."""
        self._order: list[tuple[float, Key]] = []
        self._working: set[Key] = set()
        self._again: set[Key] = set()
        """Keys that have changed while somebody works on them."""
        self._failures: dict[Key, int] = {}
        self._bell = asyncio.Event()

    def __len__(self) -> int:
        """Keys that wait and could be taken now."""
        now = self._clock()
        return sum(due <= now for due in self._due.values())

    def oldest_s(self) -> float:
        """Seconds for which one of them has waited at most."""
        now = self._clock()
        return max((now - due for due in self._due.values() if due <= now), default=0.0)

    def add(self, key: Key, after_s: float = 0.0) -> None:
        """Something about the key has changed, or will want a look in a while."""
        if key in self._working and not after_s:
            self._again.add(key)
            return
        due = self._clock() + after_s
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        heapq.heappush(self._order, (due, key))
        self._bell.set()

    async def take(self) -> Key:
        """The key that is due first, which is the caller's until `done` or `failed`."""
        while True:
            self._bell.clear()
            now = self._clock()
            while self._order and self._order[0][0] <= now:
                due, key = heapq.heappop(self._order)
                if self._due.get(key) != due:
                    continue  # it was taken, or is due earlier
                del self._due[key]
                if key in self._working:
                    self._again.add(key)
                    continue
                self._working.add(key)
                return key
            wait = self._order[0][0] - now if self._order else None
            try:
                async with asyncio.timeout(wait):
                    await self._bell.wait()
            except TimeoutError:
                pass

    def done(self, key: Key, again_s: float | None = None) -> None:
        """It was looked at; `again_s`: and wants to be again in so many seconds."""
        self._failures.pop(key, None)
        self._leave(key, again_s)

    def failed(self, key: Key) -> float:
        """It could not be looked at. Gives the seconds until it comes back."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause = min(LIMIT_S, FIRST_S * 2.0 ** min(failures - 1, 20)) * (0.5 + self._rng.random() / 2)
        self._leave(key, pause)
        return pause

    def _leave(self, key: Key, after_s: float | None) -> None:
        self._working.discard(key)
        self._bell.set()
        if key in self._again:
            self._again.discard(key)
            # What has changed while it failed is no reason to come back any sooner.
            self.add(key, after_s if key in self._failures and after_s else 0.0)
        elif after_s is not None:
            self.add(key, after_s)
