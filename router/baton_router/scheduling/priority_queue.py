"""
The order of queued requests: classes first, then tenants by fair share, then the shortest prompt.

Classes are strict: a lower class is offered what higher classes cannot use. While a request of a class has
waited for 30 seconds, every fourth turn goes to that class; its tenants still share fairly, so flooding gains
nothing. A class of the background, such as batch, goes only while nothing else waits, and cannot starve.

An entry leaves exactly once: it is taken, discarded, or times out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator

from baton_api.request_classes import CLASSES
from baton_router.scheduling.fair_share import QUANTUM, DeficitRoundRobin
from baton_router.scheduling.sorted_list import SortedList
from baton_router.scheduling.tenant_queue import QueueEntry, TenantQueue

LEVELS: dict[str, int] = {name: level for level, name in enumerate(CLASSES)}

_ROWS = tuple(CLASSES.values())

_FOREGROUND = sum(not row.background for row in _ROWS)
"""Levels below this one are of classes whose clients wait."""

STARVED_S = 30.0
"""Wait in seconds after which a class starves, and a request for which a person waits."""

MAX_WAIT_SHARE = 0.8
"""Share of its maximum wait after which a request of another class starves. Earlier promotion turns an
overload into first come, first served, which delays every request."""

STRICT_TURNS = 3
"""Turns between two turns of a starving class."""

WINDOW = 256
"""Maximum entries offered at a time; each costs one choice of workers."""


class PriorityQueue:
    """Requests that wait for the same workers."""

    def __init__(self, quantum: float = QUANTUM) -> None:
        self._classes = tuple(_ClassQueues(quantum) for _ in CLASSES)
        self._alarms: SortedList[QueueEntry] = SortedList()
        """Entries by the time of their next change."""
        self._alarms_by_entry: dict[QueueEntry, float] = {}
        self._strict_turns = 0
        """Turns since a starving class had one."""

    def __len__(self) -> int:
        return len(self._alarms_by_entry)

    def __contains__(self, entry: QueueEntry) -> bool:
        return entry in self._alarms_by_entry

    def __iter__(self) -> Iterator[QueueEntry]:
        return iter(self._alarms_by_entry)

    def count(self, level: int) -> int:
        return self._classes[level].count

    def add(self, entry: QueueEntry) -> None:
        self._classes[entry.level].add(entry)
        self._set_alarm(entry)

    def discard(self, entry: QueueEntry) -> bool:
        """Remove an entry. Returns whether it was queued."""
        if entry not in self._alarms_by_entry:
            return False
        self._alarms.remove(self._alarms_by_entry.pop(entry), entry.number)
        self._classes[entry.level].remove(entry)
        return True

    def reprice(self, entry: QueueEntry, best_s: float) -> None:
        """Move a queued entry to the rank of a new prediction; its tenant's turn stays."""
        self._classes[entry.level].queues[entry.tenant].reprice(entry, best_s)

    def oldest(self, level: int) -> float | None:
        """Arrival of the oldest entry of this class, or None."""
        first = self._classes[level].arrivals.first
        return first and first[0]

    def precedes(self, level: int, now: float) -> bool:
        """Whether a queued request goes before a request of this class that arrives now."""
        for number, level_queues in enumerate(self._classes):
            if level_queues.count and (number <= level or self._starves(number, now)):
                return True
        return False

    def offer(
        self, take: Callable[[QueueEntry], bool], more: Callable[[], bool], now: float, most: int = WINDOW
    ) -> int:
        """
        Offer queued entries in their order, each once. Returns how many were taken.

        `more` is called after each taken entry: whether another one could go.
        """
        taken = 0
        walks = [level_queues.walk(now) for level_queues in self._classes]
        heads = [next(walk, None) for walk in walks]
        order = self._order(now)
        while order and most:
            level = order[0]
            entry = heads[level]
            if entry is None:
                order.pop(0)
                continue
            most -= 1
            accepted = take(entry)
            if accepted:
                taken += 1
                self._strict_turns = 0 if self._starves(level, now) else self._strict_turns + 1
                self._classes[level].fair_share.charge(entry.tenant, entry.cost)
                self.discard(entry)
                if not more():
                    break
                order = self._order(now)
            try:
                heads[level] = walks[level].send(accepted)
            except StopIteration:
                heads[level] = None
        return taken

    def expire(self, now: float) -> list[QueueEntry]:
        """Apply the passing of time. Returns the entries whose maximum wait is over; they are removed."""
        expired = []
        for entry in self._alarms.up_to(now):
            self.discard(entry)
            if now >= entry.arrived + entry.max_wait_s:
                expired.append(entry)
            else:
                entry.starved = True
                self.add(entry)
        return expired

    @property
    def alarm(self) -> float:
        """Time of the next change."""
        return self._alarms.first[0] if self._alarms.first else math.inf

    @property
    def seconds(self) -> float:
        """Predicted seconds of all requests, except those of the background, which wait for the others."""
        return sum(
            queue.seconds
            for level_queues in self._classes[:_FOREGROUND]
            for queue in level_queues.queues.values()
        )

    def seconds_before(self, entry: QueueEntry) -> float:
        """
        Predicted seconds of work before `entry`, were it added: all higher classes, and of its own class what
        other tenants' fair share allows until then.
        """
        own_class = self._classes[entry.level]
        own = own_class.queues.get(entry.tenant)
        own_s = own.seconds_before(entry) if own else 0.0
        higher = sum(
            queue.seconds
            for level_queues in self._classes[: entry.level]
            for queue in level_queues.queues.values()
        )
        others = sum(
            min(queue.seconds, own_s + entry.best_s)
            for tenant, queue in own_class.queues.items()
            if tenant != entry.tenant
        )
        return higher + own_s + others

    def _order(self, now: float) -> list[int]:
        """The classes that may go now, in order."""
        order = [level for level, level_queues in enumerate(self._classes) if level_queues.count]
        while len(order) > 1 and _ROWS[order[-1]].background:
            order.pop()
        if self._strict_turns >= STRICT_TURNS and len(order) > 1:
            order.sort(key=lambda level: not self._starves(level, now))
        return order

    def _starves(self, level: int, now: float) -> bool:
        oldest = self.oldest(level)
        return level < _FOREGROUND and oldest is not None and now >= oldest + STARVED_S

    def _set_alarm(self, entry: QueueEntry) -> None:
        alarm = entry.arrived + entry.max_wait_s
        if entry.level < _FOREGROUND and not entry.starved:
            share = 0.0 if _ROWS[entry.level].waits_seconds else MAX_WAIT_SHARE
            alarm = min(alarm, entry.arrived + max(STARVED_S, share * entry.max_wait_s))
        self._alarms_by_entry[entry] = alarm
        self._alarms.add(alarm, entry.number, entry)


class _ClassQueues:
    """The tenant queues of one class."""

    __slots__ = ("arrivals", "fair_share", "queues")

    def __init__(self, quantum: float) -> None:
        self.queues: dict[str, TenantQueue] = {}
        self.fair_share = DeficitRoundRobin(quantum)
        self.arrivals: SortedList[QueueEntry] = SortedList()

    @property
    def count(self) -> int:
        return len(self.arrivals)

    def add(self, entry: QueueEntry) -> None:
        queue = self.queues.get(entry.tenant)
        if queue is None:
            queue = self.queues[entry.tenant] = TenantQueue()
            self.fair_share.join(entry.tenant)
        queue.add(entry)
        self.arrivals.add(entry.arrived, entry.number, entry)

    def remove(self, entry: QueueEntry) -> None:
        self.arrivals.remove(entry.arrived, entry.number)
        queue = self.queues[entry.tenant]
        queue.remove(entry)
        if not queue:
            del self.queues[entry.tenant]
            self.fair_share.leave(entry.tenant)

    def walk(self, now: float) -> Generator[QueueEntry, bool, None]:
        """All entries in fair-share order; `send` reports whether the last one was taken."""
        queues = {tenant: queue.ordered(now) for tenant, queue in self.queues.items()}
        skipped: set[str] = set()
        while (tenant := self.fair_share.next(skipped)) is not None:
            for entry in queues[tenant]:
                if (yield entry):
                    break
            else:
                skipped.add(tenant)
