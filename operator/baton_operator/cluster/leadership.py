"""
Leader election: only the operator that holds and renews the Lease may write.

`lease` decides; this module reads and writes the Lease. A holder that cannot renew it for ten seconds
stops, five seconds before another operator may take it: its next write raises, and the process exits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from kubernetes.aio.client.exceptions import ApiException

from baton_api import labels
from baton_api.errors import SetupError
from baton_operator.cluster import lease
from baton_operator.cluster.api_server import CONFLICT, FORBIDDEN, ApiServer
from baton_operator.manifests.objects import Manifest

log = logging.getLogger(__name__)

API, KIND = "coordination.k8s.io/v1", "Lease"


class NotLeader(Exception):
    """The operator tried to write without holding the Lease."""


@dataclass(slots=True)
class Leadership:
    """The Lease of one operator."""

    api: ApiServer
    """Writes without a guard."""
    namespace: str
    name: str
    me: str
    clock: Callable[[], float]
    """Monotonic."""
    namespaces: Sequence[str] = ()
    """Those that the operator watches; empty: all."""
    renew_s: float = lease.RENEW_S
    looked: float | None = None
    """Monotonic time at which the API server last answered; None if it never did."""
    _view: lease.LeaseView = field(init=False)

    def __post_init__(self) -> None:
        self._view = lease.LeaseView(self.me)

    @property
    def holds(self) -> bool:
        return self._view.holds(self.clock())

    def guard(self) -> None:
        """Raise NotLeader if this operator may not write."""
        if not self.holds:
            raise NotLeader(f"{self.me} does not hold the Lease {self.namespace}/{self.name}.")

    async def take(self) -> None:
        """Wait until this operator holds the Lease."""
        while not await self._look():  # noqa: ASYNC110 - no event signals the expiry of a Lease
            await asyncio.sleep(self.renew_s)
        log.info("This operator is the leader: it holds the Lease %s/%s.", self.namespace, self.name)

    async def wait_until_sole(self) -> None:
        """
        Wait until no other operator can manage the same services. Call it while holding the Lease.

        Each operator writes its Lease before it searches for others, so at least one of two sees the other.
        An operator of some namespaces may not list Leases elsewhere and skips the search. Raises SetupError
        if there is another operator.
        """
        rivals = lease.OtherLeases(self.namespace, self.name, self.clock())
        selector = f"{labels.MANAGED_BY}={labels.OPERATOR}"
        while not self.namespaces:
            try:
                other = rivals.look(await self.api.list(API, KIND, selector=selector), self.clock())
            except ApiException as error:
                log.warning("Cannot list the Leases of other operators: %s %s", error.status, error.reason)
                if error.status == FORBIDDEN:
                    return
                other = False
            if other is True:
                return
            if other:
                raise SetupError(_conflict(other))
            await asyncio.sleep(self.renew_s)

    async def keep(self) -> None:
        """Renew the Lease; return when it is lost."""
        while self.holds:
            await asyncio.sleep(self.renew_s)
            await self._look()
        log.error("Lost the Lease %s/%s.", self.namespace, self.name)

    async def release(self) -> None:
        """Release the Lease, so that the next operator need not wait for its expiry."""
        try:
            existing = await self.api.get(API, KIND, self.namespace, self.name)
            if existing is not None and lease.holder(existing) == self.me:
                self._view = lease.LeaseView(self.me)
                await self.api.replace(lease.released(existing))
        except ApiException as error:
            log.warning("Cannot release the Lease; it expires by itself: %s", error.reason)

    async def _look(self) -> bool:
        """Read the Lease, take or renew it if possible, and return whether this operator holds it."""
        try:
            async with asyncio.timeout(lease.GIVE_UP_S):
                return await self._renewed()
        except TimeoutError:
            log.warning("No response about the Lease from the API server within %.0f s.", lease.GIVE_UP_S)
        except ApiException as error:
            if error.status != CONFLICT:  # 409: another operator was faster
                log.warning("Cannot read or write the Lease: %s %s", error.status, error.reason)
        return False

    async def _renewed(self) -> bool:
        existing = await self.api.get(API, KIND, self.namespace, self.name)
        now, time = self.clock(), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self.looked = now
        if existing is None:
            first = lease.new(self.namespace, self.name, self.me, time, self.namespaces)
            return await self.api.create(first) and await self._renewed()
        self._view = self._view.seen(existing, now)
        if not self._view.may_take(existing, now):
            return False
        taken = lease.taken(existing, self.me, time, self.namespaces)
        self._view = self._view.wrote(await self.api.replace(taken), now)
        return True


def _conflict(other: Manifest) -> str:
    metadata = other["metadata"]
    where = metadata.get("annotations", {}).get(lease.NAMESPACES) or "all namespaces"
    return (
        f"Another operator manages the same services: {lease.holder(other)} holds the Lease "
        f"{metadata['namespace']}/{metadata['name']} and watches {where}. Two operators would revert each "
        "other's writes. Uninstall one of them, or set disjoint --namespaces (watch.namespaces of the chart)."
    )
