"""
What one page has been told, and what it has yet to be: news are made for it by comparing, when it looks.

Nothing is noted for a page that nobody has open. One that is open is told of a request when it is new, has
begun to be answered, or has ended, and of the rest as it is now; what a slow reader missed it never gets.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from baton_router.dispatcher import Dispatch
from baton_router.page.timelines import Epoch, timeline, visible
from baton_router.tenants import Tenant

REQUESTS_LIMIT = 40
"""Requests in one event, the newest; how many there were besides, the service's picture says."""

FOLLOWED_LIMIT = 400
"""Requests that run, of which a page hears when they go on."""


class Watch:
    """One page's."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self._last = 0
        """The number of the newest request that was told."""
        self._running: dict[int, Dispatch] = {}
        """Told, and to be told again; the oldest first."""
        self._told: dict[int, float | None] = {}
        """When those began to be answered, as far as was told."""

    def news(self, dispatches: deque[Dispatch], epoch: Epoch) -> list[dict[str, Any]]:
        """The records of what has changed since the last call, the oldest first."""
        changed = [made for made in self._running.values() if self._has_changed(made)]
        changed += self._new(dispatches)
        for made in changed:
            self._follow(made)
        return [timeline(made, self.tenant, epoch) for made in changed[-REQUESTS_LIMIT:]]

    def _has_changed(self, made: Dispatch) -> bool:
        return made.ended is not None or made.first_byte != self._told[made.number]

    def _new(self, dispatches: deque[Dispatch]) -> list[Dispatch]:
        found: list[Dispatch] = []
        newest = self._last
        for made in reversed(dispatches):
            if made.number <= self._last or len(found) == REQUESTS_LIMIT:
                break
            newest = max(newest, made.number)
            if visible(made, self.tenant):
                found.append(made)
        self._last = newest
        return found[::-1]

    def _follow(self, made: Dispatch) -> None:
        if made.ended is not None:
            self._running.pop(made.number, None)
            self._told.pop(made.number, None)
            return
        self._running[made.number] = made
        self._told[made.number] = made.first_byte
        if len(self._running) > FOLLOWED_LIMIT:
            oldest = next(iter(self._running))
            del self._running[oldest], self._told[oldest]
