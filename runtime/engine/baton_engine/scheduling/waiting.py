"""
The queue of a worker, in which tenants take turns.

Next is the first sequence of the tenant with the fewest sequences in the batch. Of several, the tenant whose
turn is longest ago is next, so that a tenant's thousand choices wait behind each other, and not in front of
those of others. Patient sequences follow all others.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping

from baton_engine.scheduling.sequence import Sequence

Turns = OrderedDict[str, deque[Sequence]]
"""The sequences of each tenant. The tenant whose turn is longest ago is first."""


class WaitingQueue:
    """Queued sequences. Belongs to the engine's thread; others may call `len`, `count` and `copy`."""

    def __init__(self) -> None:
        self._urgent: Turns = OrderedDict()
        self._patient: Turns = OrderedDict()
        self._counts: dict[str, int] = {}
        self._all: dict[Sequence, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def copy(self) -> list[Sequence]:
        """Return all sequences in any order. The keys of a dict are copied in one go."""
        return list(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        for turns in (self._urgent, self._patient):
            for queue in turns.values():
                yield from queue

    def count(self, tenant: str) -> int:
        """Number of a tenant's sequences."""
        return self._counts.get(tenant, 0)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence, last of its tenant's."""
        self._turns(sequence).setdefault(sequence.request.tenant, deque()).append(sequence)
        self._entered(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Add a sequence that was in the batch: it is next, unless its tenant has more in the batch."""
        turns, tenant = self._turns(sequence), sequence.request.tenant
        turns.setdefault(tenant, deque()).appendleft(sequence)
        turns.move_to_end(tenant, last=False)
        self._entered(sequence)

    def head(self, batch: Mapping[str, int], *, patient: bool) -> Sequence | None:
        """
        The next sequence; None without one. A patient one is next only if no other waits.

        `batch` is the number of each tenant's sequences in the batch.
        """
        if patient and self._urgent:
            return None
        best, least = None, 0
        for tenant, queue in (self._patient if patient else self._urgent).items():
            running = batch.get(tenant, 0)
            if best is None or running < least:
                best, least = queue[0], running
            if not running:
                break
        return best

    def take(self, sequence: Sequence) -> None:
        """Remove the next sequence. Its tenant's turn has passed."""
        self.remove(sequence)
        turns, tenant = self._turns(sequence), sequence.request.tenant
        if tenant in turns:
            turns.move_to_end(tenant)

    def remove(self, sequence: Sequence) -> None:
        turns, tenant = self._turns(sequence), sequence.request.tenant
        queue = turns[tenant]
        queue.remove(sequence)
        if not queue:
            del turns[tenant]
        del self._all[sequence]
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]

    def clear(self) -> None:
        self._urgent.clear()
        self._patient.clear()
        self._counts.clear()
        self._all.clear()

    def _turns(self, sequence: Sequence) -> Turns:
        return self._patient if sequence.request.patient else self._urgent

    def _entered(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        self._all[sequence] = None
        self._counts[tenant] = self._counts.get(tenant, 0) + 1
