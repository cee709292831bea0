"""
Whose turn it is among those who wait: deficit round robin, where each pays for what it was given.

Each round everybody's credit rises by the same amount, and whoever has credit is served and charged what
that costs. What a request costs is so not needed before it is known which of a tenant's requests goes. Of
two who wait all the time, one never gets more than the other by above twice a round's credit and the
dearest request; whoever comes back too soon finds the debt that it left.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection

QUANTUM = 4096.0
"""Credit of one round, in tokens: about what a usual request costs, so that turns alternate."""

DEBTS_LIMIT = 10_000


class DeficitRoundRobin:
    """Tenants that wait for turns, by name."""

    def __init__(self, quantum: float = QUANTUM) -> None:
        self._quantum = quantum
        self._credit: OrderedDict[str, float] = OrderedDict()
        """Of those who wait, in the order in which they are served when all have some."""
        self._granted = 0.0
        """What everybody was given in all rounds."""
        self._debts: OrderedDict[str, float] = OrderedDict()
        """Who left with a debt -> it, as if no round had ever been."""

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._credit

    def __len__(self) -> int:
        return len(self._credit)

    def join(self, tenant: str) -> None:
        """The tenant waits from now on, and is the last in the round."""
        debt = self._debts.pop(tenant, -math.inf)
        self._credit[tenant] = 0.0 if debt == -math.inf else min(0.0, debt + self._granted)

    def leave(self, tenant: str) -> None:
        """It has nothing left that waits. Credit is lost, a debt is not, unless nobody waits any more."""
        credit = self._credit.pop(tenant)
        if not self._credit:
            self._debts.clear()
        elif credit < 0:
            self._debts[tenant] = credit - self._granted
            if len(self._debts) > DEBTS_LIMIT:
                self._debts.popitem(last=False)

    def next(self, skipped: Collection[str] = ()) -> str | None:
        """Whose turn it is, of all but `skipped`; None if there is nobody. To ask changes nothing."""
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
        """The tenant is served: the rounds until its turn have passed, for all."""
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
            # Who was passed over, because its workers are busy, saves no more than a round.
            self._credit[tenant] = max(credit, min(credit + amount, self._quantum))
