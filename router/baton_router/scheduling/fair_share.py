"""
The fair share of tenants: deficit round robin by the cost of their requests.

Each round adds the same credit to every waiting tenant. A tenant with credit is served and charged the cost,
so the cost of a request need not be known before it is chosen. Of two tenants that wait all the time, one
never gets more than the other by above two rounds' credit and the most expensive request. A tenant that
returns soon keeps the debt that it left. https://doi.org/10.1109/90.502236
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection

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
