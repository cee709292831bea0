"""
Who may write: the holder of the Lease, as long as it renews it.

What is decided about the Lease is in `lease`; here it is read and written. A holder that cannot renew for
ten seconds is none any more, five seconds before anybody else may be: its next write raises, and the
process ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
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
    """A write was about to be made by an operator that does not hold the Lease."""


class Leadership:
    """One operator's part in it. `api` writes without asking; `clock` is monotonic."""

    def __init__(
        self,
        api: ApiServer,
        namespace: str,
        name: str,
        me: str,
        clock: Callable[[], float],
        namespaces: Sequence[str] = (),
        renew_s: float = lease.RENEW_S,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._clock = clock
        self._namespaces = namespaces
        self._renew_s = renew_s
        self._view = lease.LeaseView(me)
        self.looked: float | None = None
        """When the API server last answered."""

    @property
    def holds(self) -> bool:
        return self._view.holds(self._clock())

    def guard(self) -> None:
        """Raises NotLeader if this operator may not write."""
        if not self.holds:
            raise NotLeader(f"The Lease {self._namespace}/{self._name} is not held by {self._view.me}.")

    async def take(self) -> None:
        """Wait until the Lease is ours."""
        while not await self._look():  # noqa: ASYNC110 - nobody tells when the Lease runs out
            await asyncio.sleep(self._renew_s)
        log.info("This operator leads: it holds the Lease %s/%s.", self._namespace, self._name)

    async def alone(self) -> None:
        """
        Wait until it is certain that no other operator looks after the same services. The Lease is ours.

        Each operator writes its Lease before it looks for others, so of two at least one sees the other.
        An operator of some namespaces has no right to see the Leases of others, and does not look. Raises
        SetupError if there is another.
        """
        rivals = lease.OtherLeases(self._namespace, self._name, self._clock())
        selector = f"{labels.MANAGED_BY}={labels.OPERATOR}"
        while not self._namespaces:
            try:
                found = rivals.look(await self._api.list(API, KIND, selector=selector), self._clock())
            except ApiException as error:
                log.warning("Cannot look for other operators: %s %s", error.status, error.reason)
                if error.status == FORBIDDEN:
                    return
                found = False
            if found is True:
                return
            if found:
                raise SetupError(_told(found))
            await asyncio.sleep(self._renew_s)

    async def keep(self) -> None:
        """Renew it; ends when it is lost."""
        while self.holds:
            await asyncio.sleep(self._renew_s)
            await self._look()
        log.error("The Lease %s/%s is lost.", self._namespace, self._name)

    async def release(self) -> None:
        """Leave it to the next one at once."""
        try:
            there = await self._api.get(API, KIND, self._namespace, self._name)
            if there is not None and lease.holder(there) == self._view.me:
                self._view = lease.LeaseView(self._view.me)
                await self._api.replace(lease.released(there))
        except ApiException as error:
            log.warning("The Lease could not be released, and runs out by itself: %s", error.reason)

    async def _look(self) -> bool:
        """Read the Lease, and write it if it is ours or nobody's. Whether it is ours now."""
        try:
            async with asyncio.timeout(lease.GIVE_UP_S):
                return await self._renewed()
        except TimeoutError:
            log.warning("The API server does not answer about the Lease.")
        except ApiException as error:
            if error.status != CONFLICT:  # else somebody was faster
                log.warning("The Lease cannot be read or written: %s %s", error.status, error.reason)
        return False

    async def _renewed(self) -> bool:
        there = await self._api.get(API, KIND, self._namespace, self._name)
        now, time = self._clock(), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self.looked = now
        if there is None:
            first = lease.new(self._namespace, self._name, self._view.me, time, self._namespaces)
            return await self._api.create(first) and await self._renewed()
        self._view = self._view.seen(there, now)
        if not self._view.may_take(there, now):
            return False
        taken = lease.taken(there, self._view.me, time, self._namespaces)
        self._view = self._view.wrote(await self._api.replace(taken), now)
        return True


def _told(other: Manifest) -> str:
    metadata = other["metadata"]
    where = metadata.get("annotations", {}).get(lease.NAMESPACES) or "all namespaces"
    return (
        f"Another operator looks after the same services: {lease.holder(other)} holds the Lease "
        f"{metadata['namespace']}/{metadata['name']} and watches {where}. Two operators would undo each "
        "other's writes. Uninstall one of them, or give each namespaces of its own by --namespaces "
        "(watch.namespaces of the chart)."
    )
