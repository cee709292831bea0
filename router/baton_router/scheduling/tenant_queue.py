"""
Queued requests, and the order of those that one tenant has in one class.

A request's rank is its predicted time to first token, at least 20 ms, minus a tenth of its waiting time. Near
saturation that order, not the choice of workers, decides the mean wait. Requests close to their deadline go
first, the earliest deadline first. Requests that miss their deadline in any case go last: running them
first would make others miss theirs too. Requests that came back from a worker, and those that have waited for
longer than the limit, go before all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from baton_router.scheduling.sorted_list import SortedList

AGING = 0.1
"""Seconds of prediction that one second of waiting outweighs."""

SHORT_S = 0.020
"""Prompts that are predicted to take less go in order of arrival. A worker gets several of them at a time, so
putting the shortest first would delay the others by ten times the difference without a gain."""

MARGIN = 0.1
"""Share of the objective that must be left when a request is sent. Requests sent at the last moment, as they
are under load, would all miss it by a little."""


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
