"""
Who waits for a worker, and who goes next: classes before tenants, tenants by turns, then the shortest.

The classes are strict: a lower one is offered what the higher ones could not use. Strict does not mean for
ever: while somebody of a class has waited for 30 seconds, every fourth turn is that class's. Whose turn it is
within it is for its tenants' accounts to say even then, so that nobody gains by sending much. The lowest
class is for work that nobody waits for: it goes only while nothing else is here, and cannot starve.

An entry leaves exactly once: it is taken, discarded, or gives up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator

from baton_router.scheduling.fair_share import QUANTUM, DeficitRoundRobin
from baton_router.scheduling.tenant_queue import QueueEntry, SortedList, TenantQueue
from baton_router.tenants.tenants import CLASSES

LEVELS: dict[str, int] = {name: level for level, name in enumerate(CLASSES)}
LOWEST = LEVELS["batch"]
INTERACTIVE = LEVELS["interactive"]
"""The lowest class whose clients sit and wait."""

STARVED_S = 30.0
"""Of waiting, after which a class starves; and a request, if it is of one whose clients sit and wait."""

MAX_WAIT_SHARE = 0.8
"""Of its patience, after which a request of another class starves: it would soon have waited in vain. Sooner
promotion turns an overload into first come, first served, which makes everybody wait."""

STRICT_TURNS = 3
"""Between two turns of a class that starves."""

WINDOW = 256
"""Who waits and is asked at a time, at most: what is asked costs the router a choice each."""


class WaitingRoom:
    """The requests that wait for workers of one kind."""

    def __init__(self, quantum: float = QUANTUM) -> None:
        self._classes = tuple(_ClassQueues(quantum) for _ in CLASSES)
        self._alarms: SortedList[QueueEntry] = SortedList()
        """By the time at which something is to happen to them."""
        self._alarms_by_entry: dict[QueueEntry, float] = {}
        """Of all that are here."""
        self._strict_turns = 0
        """Since a class that starves had one."""

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
        """It goes, for whatever reason; whether it was here."""
        if entry not in self._alarms_by_entry:
            return False
        self._alarms.remove(self._alarms_by_entry.pop(entry), entry.number)
        self._classes[entry.level].remove(entry)
        return True

    def oldest(self, level: int) -> float | None:
        """When the one of this class arrived that has waited for longest; None if there is none."""
        first = self._classes[level].arrivals.first
        return first and first[0]

    def precedes(self, level: int, now: float) -> bool:
        """Whether one of those who wait is to be asked before a request of this class that comes now."""
        for number, one in enumerate(self._classes):
            if one.count and (number <= level or self._starves(number, now)):
                return True
        return False

    def offer(
        self, take: Callable[[QueueEntry], bool], more: Callable[[], bool], now: float, most: int = WINDOW
    ) -> int:
        """
        Ask those who wait, in their order, each once, whether they go; gives how many went.

        `more` is asked after each that went: whether another one could.
        """
        taken = 0
        walks = [one.walk(now) for one in self._classes]
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
        """Let time change what it does; gives those whose patience has ended, who are gone."""
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
        """When time next changes something here."""
        return self._alarms.first[0] if self._alarms.first else math.inf

    def seconds_before(self, entry: QueueEntry) -> float:
        """
        What the workers would compute for others before `entry`, were it added: all of the higher
        classes, and of its own what its tenant's turns allow the others until then.
        """
        own_class = self._classes[entry.level]
        own = own_class.queues.get(entry.tenant)
        own_s = own.seconds_before(entry) if own else 0.0
        higher = sum(queue.seconds for one in self._classes[: entry.level] for queue in one.queues.values())
        others = sum(
            min(queue.seconds, own_s + entry.best_s)
            for tenant, queue in own_class.queues.items()
            if tenant != entry.tenant
        )
        return higher + own_s + others

    def _order(self, now: float) -> list[int]:
        """The classes that may go now, in which order."""
        order = [level for level, one in enumerate(self._classes) if one.count]
        if len(order) > 1 and order[-1] == LOWEST:
            order.pop()
        if self._strict_turns >= STRICT_TURNS and len(order) > 1:
            order.sort(key=lambda level: not self._starves(level, now))
        return order

    def _starves(self, level: int, now: float) -> bool:
        oldest = self.oldest(level)
        return level != LOWEST and oldest is not None and now >= oldest + STARVED_S

    def _set_alarm(self, entry: QueueEntry) -> None:
        alarm = entry.arrived + entry.max_wait_s
        if entry.level != LOWEST and not entry.starved:
            share = 0.0 if entry.level <= INTERACTIVE else MAX_WAIT_SHARE
            alarm = min(alarm, entry.arrived + max(STARVED_S, share * entry.max_wait_s))
        self._alarms_by_entry[entry] = alarm
        self._alarms.add(alarm, entry.number, entry)


class _ClassQueues:
    """The lines of one class, one for each tenant that has something in it."""

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
        """All of them as turns have it; it wants to be told of each, by `send`, whether it went."""
        queues = {tenant: queue.ordered(now) for tenant, queue in self.queues.items()}
        skipped: set[str] = set()
        while (tenant := self.fair_share.next(skipped)) is not None:
            for entry in queues[tenant]:
                if (yield entry):
                    break
            else:
                skipped.add(tenant)
