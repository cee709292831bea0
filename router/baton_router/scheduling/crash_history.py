"""
Requests that crash workers.

A single lost worker proves nothing, so its requests go to other workers. A request that has lost two
workers, whatever their roles, is rejected for as long as it is remembered. Clients retry under a new id, so a
request is recognized by its tenant and a digest of the body. A complete answer clears it. Batch runners send
a suspicious line alone before they give it up, and are rejected only where a runner would have given up. A
broken stream may lose a third worker, because several workers may fail while it lasts.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from baton_api.errors import PoisonRequest

LOSSES_LIMIT = 2
"""Workers that one request may lose."""

BACKGROUND_LOSSES_LIMIT = 8
"""The same for a class of the background."""

REMEMBERED_S = 600.0
"""Seconds after its last loss for which a request is remembered."""

REMEMBERED_LIMIT = 4096
"""Requests that are remembered. The one whose last loss is oldest is dropped first."""

Key = tuple[str, int]
"""Tenant, and digest of the body."""


@dataclass(slots=True)
class _WorkerLosses:
    last: float
    workers: set[tuple[str, str]] = field(default_factory=set)
    """Name and epoch: a restarted worker is another one."""


class CrashHistory:
    """Belongs to one thread. Times are of the router's clock."""

    def __init__(self) -> None:
        self._lost: OrderedDict[Key, _WorkerLosses] = OrderedDict()
        """The request whose last loss is oldest first."""

    def __len__(self) -> int:
        return len(self._lost)

    def lost(self, key: Key, worker: str, epoch: str, now: float) -> None:
        """A worker died or stopped while it had the request. Requests without a digest are not remembered."""
        if not key[1]:
            return
        self._expire(now)
        losses = self._lost.setdefault(key, _WorkerLosses(now))
        losses.last = now
        if len(losses.workers) < BACKGROUND_LOSSES_LIMIT:
            losses.workers.add((worker, epoch))
        self._lost.move_to_end(key)
        while len(self._lost) > REMEMBERED_LIMIT:
            self._lost.popitem(last=False)

    def answered(self, key: Key) -> None:
        """A worker gave the whole answer: the request is not what kills workers."""
        self._lost.pop(key, None)

    def check(self, key: Key, now: float, *, background: bool) -> None:
        """Raise PoisonRequest if a request has lost as many workers as it may. `background`: of its class."""
        if not self._lost:
            return
        self._expire(now)
        losses = self._lost.get(key)
        limit = BACKGROUND_LOSSES_LIMIT if background else LOSSES_LIMIT
        if losses is not None and len(losses.workers) >= limit:
            raise PoisonRequest(len(losses.workers))

    def _expire(self, now: float) -> None:
        while self._lost and now - next(iter(self._lost.values())).last >= REMEMBERED_S:
            self._lost.popitem(last=False)
