"""
The order of queued requests: classes first, then tenants by fair share, then the shortest prompt.

Classes are strict: a lower class is offered what higher classes cannot use. While a request of a class has
waited for 30 seconds, every fourth turn goes to that class; its tenants still share fairly, so flooding gains
nothing. A class of the background, such as batch, goes only while nothing else waits, and cannot starve.

An entry leaves exactly once: it is taken, discarded, or times out.

A request's rank is its predicted time to first token, at least 20 ms, minus a tenth of its waiting time. Near
saturation that order, not the choice of workers, decides the mean wait. Requests close to their deadline go
first, the earliest deadline first. Requests that miss their deadline in any case go last: running them
first would make others miss theirs too. Requests that came back from a worker, and those that have waited for
longer than the limit, go before all others.

Each round adds the same credit to every waiting tenant. A tenant with credit is served and charged the cost,
so the cost of a request need not be known before it is chosen. Of two tenants that wait all the time, one
never gets more than the other by above two rounds' credit and the most expensive request. A tenant that
returns soon keeps the debt that it left.

A worker gets its next prompt shortly before it would be idle: a prompt that was sent can neither be reordered
nor moved. The queue is checked with every answer that begins. Checking each queued request would cost more
the more of them wait, so `QueueWakeup` decides by a bound, the smallest prompt meant for each worker. It may
wake the queue for nothing, but never misses a request that could go.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton_api.request_classes import CLASSES
from baton_router.cache.prompt_chunks import BYTES_PER_TOKEN
from baton_router.requests.picker import PickRequest
from baton_router.scheduling.placement import Placement
from baton_router.workers.worker_state import WorkerState


@dataclass(slots=True, eq=False)
class QueueEntry:
    """One queued request. Times are of the router's clock."""

    number: int
    """Later requests have higher numbers."""
    tenant: str
    level: int
    """Class, 0 for the most urgent."""
    arrived: float
    best_s: float
    """Predicted seconds to the first token on a free worker."""
    cost: float
    """In tokens, charged to the tenant."""
    size: int
    """Bytes of memory."""
    ttft_slo_s: float = math.inf
    """To the first token, from its arrival."""
    max_wait_s: float = math.inf
    """Maximum wait from the arrival on."""
    retried: bool = False
    """Whether a worker had it before."""
    missed: bool = False
    """Whether its objective can no longer be met."""
    starved: bool = False
    """Whether it waited longer than the limit of its class."""

    @property
    def deadline(self) -> float:
        """When its first token should be there."""
        return self.arrived + (1 - MARGIN) * self.ttft_slo_s

    @property
    def first(self) -> bool:
        """Whether it goes before the tenant's other requests."""
        return self.retried or self.starved

    @property
    def rank(self) -> float:
        # best_s - AGING * (now - arrived), of which `now` is the same for all.
        return max(self.best_s, SHORT_S) + AGING * self.arrived

    @property
    def urgent_from(self) -> float:
        """Time from which its slack is shorter than its own computation."""
        return self.deadline - 2 * self.best_s


NEARLY_DONE_S = 0.020
"""A worker with less left to compute counts as free: the next prompt arrives before it is idle."""

BATCHED_PROMPTS_S = 0.25
"""Predicted seconds, one after the other, of short prompts that a worker may have at a time. It computes them
together, in about the time of one."""

BATCH_FREE_SHARE = 0.1
"""Share of a decode worker's KV blocks that requests of class batch leave free."""


def has_capacity(state: WorkerState, tokens: int, most: int, now: float) -> bool:
    """Whether the worker can take a prompt with `tokens` to compute; it gets at most `most` at a time."""
    prefills = state.prefills
    if not prefills.waiting:
        return True
    return prefills.tokens + tokens <= most and busy_s(state, now) <= 0


def busy_s(state: WorkerState, now: float) -> float:
    """Seconds until the worker can take more; 0 or less if it can now."""
    prefills = state.prefills
    if not prefills.waiting or not state.prefill_cost.is_calibrated:
        return 0.0  # without reports of its speed, only the tokens are counted
    left = prefills.backlog_s(now)
    # Prompts that are computed together share the constant part of the time.
    constant = max(0.0, state.prefill_cost.line.coefficients[0])
    return max(left - prefills.waiting * constant - NEARLY_DONE_S, left - BATCHED_PROMPTS_S)


def has_spare_blocks(state: WorkerState) -> bool:
    """Whether the worker may generate for class batch."""
    return not state.streams.count or state.free_blocks >= BATCH_FREE_SHARE * state.total_blocks


class QueueWakeup:
    """Decides whether one of a pool's requests might go."""

    __slots__ = ("_least", "_replan_at")

    def __init__(self) -> None:
        self._least: dict[WorkerState, int] = {}
        """Tokens of the smallest prompt planned for each worker."""
        self._replan_at = math.inf
        """Time from which a request may prefer another worker."""

    def add(self, state: WorkerState, tokens: int, replan_at: float) -> None:
        """Add a request with `tokens` to compute, which may prefer another worker from `replan_at` on."""
        self._least[state] = min(tokens, self._least.get(state, tokens))
        self._replan_at = min(replan_at, self._replan_at)

    def add_unplanned(self) -> None:
        """Add a request without a worker; it must be planned at the next check."""
        self._replan_at = -math.inf

    def may_go(self, most: int, now: float) -> bool:
        """Whether a request might be taken by workers that get `most` tokens at a time."""
        if now >= self._replan_at:
            return True
        return any(has_capacity(state, tokens, most, now) for state, tokens in self._least.items())

    def seconds_until_free(self, now: float) -> float:
        """Seconds until the first busy worker is free."""
        return min((left for state in self._least if (left := busy_s(state, now)) > 0), default=math.inf)


REPLAN_S = 0.25
"""Seconds for which a request keeps its planned worker."""


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedRequest(QueueEntry):
    """A queued request and the future that its client awaits."""

    request: PickRequest
    future: asyncio.Future[Placement]
    plan: Placement | None
    """The last plan; None if no worker could serve it."""
    planned: float
    predicted_s: float = 0.0
    """Predicted wait, before the correction by `WaitBias`."""

    @property
    def replan_at(self) -> float:
        """Time from which to plan again."""
        return self.planned + REPLAN_S

    @property
    def prompt_tokens(self) -> int:
        return prompt_tokens(self.request, self.plan)

    def register_wakeup(self, wakeup: QueueWakeup) -> None:
        """Register the planned worker with the wake-up."""
        if self.plan is None:
            wakeup.add_unplanned()
        else:
            wakeup.add(self.plan.prefill_state, self.plan.uncached, self.replan_at)


def prompt_tokens(request: PickRequest, plan: Placement | None) -> int:
    """Tokens of all prompts to compute, estimated."""
    if plan is not None:
        return plan.uncached + plan.others
    return max(1, round(request.prompt.bytes / BYTES_PER_TOKEN)) + request.cost.others()


AGING = 0.1
"""Seconds of prediction that one second of waiting outweighs."""


SHORT_S = 0.020
"""Prompts that are predicted to take less go in order of arrival. A worker gets several of them at a time, so
putting the shortest first would delay the others by ten times the difference without a gain."""

MARGIN = 0.1
"""Share of the objective that must be left when a request is sent. Requests sent at the last moment, as they
are under load, would all miss it by a little."""


class TenantQueue:
    """One tenant's requests of one class."""

    __slots__ = ("_first", "_last", "_ranked", "_urgent", "seconds")

    def __init__(self) -> None:
        self._first: SortedList[QueueEntry] = SortedList()
        self._ranked: SortedList[QueueEntry] = SortedList()
        self._urgent: SortedList[QueueEntry] = SortedList()
        """Those of the ranked that have an objective, by the time at which they become urgent."""
        self._last: SortedList[QueueEntry] = SortedList()
        """Those that have missed it."""
        self.seconds = 0.0
        """Predicted seconds of all requests."""

    def __len__(self) -> int:
        return len(self._first) + len(self._ranked) + len(self._last)

    def add(self, entry: QueueEntry) -> None:
        if entry.first:
            self._first.add(entry.arrived, entry.number, entry)
        elif entry.missed:
            self._last.add(entry.arrived, entry.number, entry)
        else:
            self._ranked.add(entry.rank, entry.number, entry)
            if entry.ttft_slo_s < math.inf:
                self._urgent.add(entry.urgent_from, entry.number, entry)
        self.seconds += entry.best_s

    def remove(self, entry: QueueEntry) -> None:
        if entry.first:
            self._first.remove(entry.arrived, entry.number)
        elif entry.missed:
            self._last.remove(entry.arrived, entry.number)
        else:
            self._ranked.remove(entry.rank, entry.number)
            self._urgent.remove(entry.urgent_from, entry.number)
        # Sums of floating point drift; an empty line is a chance to be exact.
        self.seconds = self.seconds - entry.best_s if len(self) else 0.0

    def reprice(self, entry: QueueEntry, best_s: float) -> None:
        """Move an entry whose prediction has changed: its prefix was cached meanwhile, or evicted."""
        self.remove(entry)
        entry.best_s = best_s
        self.add(entry)

    def ordered(self, now: float) -> Iterator[QueueEntry]:
        """Each entry once, in the order of service; entries may leave meanwhile."""
        yield from self._first.ascending()
        urgent = self._urgent_ones(now)
        yield from urgent
        served = {entry.number for entry in urgent}
        for entry in self._ranked.ascending():
            if entry.number not in served:
                yield entry
        yield from self._last.ascending()

    def seconds_before(self, entry: QueueEntry) -> float:
        """Predicted seconds of entries before `entry`, were it added; urgency aside."""
        total = 0.0
        for other in self._first.ascending():
            if entry.first and other.arrived > entry.arrived:
                return total
            total += other.best_s
        return total + (
            0.0 if entry.first else sum(entry_ahead.best_s for entry_ahead in self._ranked.up_to(entry.rank))
        )

    def _urgent_ones(self, now: float) -> list[QueueEntry]:
        urgent = []
        for entry in self._urgent.up_to(now):
            if now + entry.best_s <= entry.deadline:
                urgent.append(entry)
            else:
                self.remove(entry)
                entry.missed = True
                self.add(entry)
        return sorted(urgent, key=lambda entry: (entry.deadline, entry.number))


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


QUANTUM = 4096.0
"""Credit per round, in tokens: about the cost of a usual request, so that tenants alternate."""

DEBTS_LIMIT = 10_000


class DeficitRoundRobin:
    """The fair share of tenants, by name."""

    def __init__(self, quantum: float = QUANTUM) -> None:
        self._quantum = quantum
        self._credit: OrderedDict[str, float] = OrderedDict()
        """Of waiting tenants, in the order of service when all have some."""
        self._granted = 0.0
        """Credit that each tenant was given in all rounds."""
        self._debts: OrderedDict[str, float] = OrderedDict()
        """Debt of tenants that left, as if no round had been."""

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._credit

    def __len__(self) -> int:
        return len(self._credit)

    def join(self, tenant: str) -> None:
        """Add a tenant, last in the round."""
        debt = self._debts.pop(tenant, -math.inf)
        self._credit[tenant] = 0.0 if debt == -math.inf else min(0.0, debt + self._granted)

    def leave(self, tenant: str) -> None:
        """Remove a tenant that has nothing queued. Its credit is lost; a debt stays while others wait."""
        credit = self._credit.pop(tenant)
        if not self._credit:
            self._debts.clear()
        elif credit < 0:
            self._debts[tenant] = credit - self._granted
            if len(self._debts) > DEBTS_LIMIT:
                self._debts.popitem(last=False)

    def next(self, skipped: Collection[str] = ()) -> str | None:
        """The next tenant except `skipped`, or None. Changes nothing."""
        best, least = None, math.inf
        for tenant, credit in self._credit.items():
            if tenant in skipped:
                continue
            rounds = self._rounds_until_served(credit)
            if not rounds:
                return tenant
            if rounds < least:
                best, least = tenant, rounds
        return best

    def charge(self, tenant: str, cost: float) -> None:
        """Charge a served tenant; the rounds until its turn have passed for all."""
        rounds = self._rounds_until_served(self._credit[tenant])
        if rounds:
            self._give(rounds * self._quantum)
        self._credit[tenant] -= cost
        if self._credit[tenant] <= 0:
            self._credit.move_to_end(tenant)

    def _rounds_until_served(self, credit: float) -> int:
        return 0 if credit > 0 else math.floor(-credit / self._quantum) + 1

    def _give(self, amount: float) -> None:
        self._granted += amount
        for tenant, credit in self._credit.items():
            # A tenant that was skipped because its workers are busy saves at most one round.
            self._credit[tenant] = max(credit, min(credit + amount, self._quantum))


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
