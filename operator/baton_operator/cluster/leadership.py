"""
Leader election: only the operator that holds and renews the Lease may write.

The decisions about taking, renewing and expiry are pure. A holder that cannot renew it for ten seconds
stops, five seconds before another operator may take it: its next write raises, and the process exits.

Times of different machines are never compared. A holder counts as gone if its Lease does not change for its
whole duration, by the clock of the observer. A holder that cannot renew stops before another operator may
start.

An annotation names the namespaces that the holder manages. Operators of different installations have
different Leases and would revert each other's writes if both managed a service, so each checks the Leases
of the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from kubernetes.aio.client.exceptions import ApiException

from baton_api import labels
from baton_api.errors import SetupError
from baton_operator.cluster.api_server import CONFLICT, FORBIDDEN, ApiServer
from baton_operator.manifests.objects import Manifest

DURATION_S = 15
RENEW_S = 2.0
"""Seconds between two reads of the Lease, for the holder and for waiting operators."""

NAMESPACES = "baton.dev/namespaces"
"""Annotation of a Lease: comma-separated namespaces that its holder manages; empty for all."""

GIVE_UP_S = 10.0
"""Seconds without a renewal after which the holder stops writing."""


@dataclass(frozen=True, slots=True)
class LeaseView:
    """The Lease as one operator knows it. Times are of its own monotonic clock."""

    me: str
    version: str = ""
    """resourceVersion at the last change."""
    changed: float = 0.0
    """When this operator read that version."""
    renewed: float | None = None
    """When this operator last renewed the Lease; None if it does not hold it."""

    def seen(self, lease: Manifest, now: float) -> LeaseView:
        """Return the view after a read."""
        version = str(lease["metadata"]["resourceVersion"])
        view = self if version == self.version else replace(self, version=version, changed=now)
        return view if holder(lease) == self.me else replace(view, renewed=None)

    def wrote(self, lease: Manifest, now: float) -> LeaseView:
        """Return the view after a renewal by this operator; `now` is the time before the request."""
        return replace(self, version=str(lease["metadata"]["resourceVersion"]), changed=now, renewed=now)

    def may_take(self, lease: Manifest, now: float) -> bool:
        """Return whether the Lease is free, expired, or already held by this operator."""
        if holder(lease) in ("", self.me):
            return True
        duration = lease["spec"].get("leaseDurationSeconds") or DURATION_S
        return now - self.changed > duration

    def holds(self, now: float) -> bool:
        """Return whether this operator may write."""
        return self.renewed is not None and now - self.renewed < GIVE_UP_S


def holder(lease: Manifest) -> str:
    return str(lease["spec"].get("holderIdentity") or "")


def taken(lease: Manifest, me: str, time: str, namespaces: Sequence[str] = ()) -> Manifest:
    """Return the Lease as `me` takes or renews it. `time` is informational; no `namespaces` means all."""
    spec: dict[str, Any] = dict(lease["spec"])
    if holder(lease) != me:
        spec |= {"acquireTime": time, "leaseTransitions": (spec.get("leaseTransitions") or 0) + 1}
    spec |= {"holderIdentity": me, "leaseDurationSeconds": DURATION_S, "renewTime": time}
    metadata = lease["metadata"]
    metadata = {
        **metadata,
        "labels": {**metadata.get("labels", {}), labels.MANAGED_BY: labels.OPERATOR},
        "annotations": {**metadata.get("annotations", {}), NAMESPACES: ",".join(namespaces)},
    }
    return {**lease, "metadata": metadata, "spec": spec}


def released(lease: Manifest) -> Manifest:
    """Return the Lease without a holder, so that the next operator can take it immediately."""
    return {**lease, "spec": {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}}


def new(namespace: str, name: str, me: str, time: str, namespaces: Sequence[str] = ()) -> Manifest:
    """Return a new Lease."""
    empty = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {},
    }
    return taken(empty, me, time, namespaces)


class OtherLeases:
    """
    The Leases of other operators over repeated reads.

    A crashed holder leaves its Lease held. So a holder counts as alive only after a renewal between two
    reads, and as dead if its Lease stays unchanged for its whole duration.
    """

    def __init__(self, namespace: str, name: str, now: float) -> None:
        self._own = namespace, name
        self._began = now
        self._versions: dict[tuple[str, str], str] = {}

    def look(self, leases: Sequence[Manifest], now: float) -> Manifest | bool:
        """Return the Lease of a live operator, True if there is certainly none, or False if it is not known
        yet.
        """
        waits = False
        for lease in leases:
            name = lease["metadata"]["namespace"], lease["metadata"]["name"]
            if name == self._own or not holder(lease):
                continue
            version = lease["metadata"]["resourceVersion"]
            if self._versions.setdefault(name, version) != version:
                return lease
            duration = lease["spec"].get("leaseDurationSeconds") or DURATION_S
            waits = waits or now - self._began <= duration
        return not waits


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
    renew_s: float = RENEW_S
    looked: float | None = None
    """Monotonic time at which the API server last answered; None if it never did."""
    _view: LeaseView = field(init=False)

    def __post_init__(self) -> None:
        self._view = LeaseView(self.me)

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
        rivals = OtherLeases(self.namespace, self.name, self.clock())
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
            if existing is not None and holder(existing) == self.me:
                self._view = LeaseView(self.me)
                await self.api.replace(released(existing))
        except ApiException as error:
            log.warning("Cannot release the Lease; it expires by itself: %s", error.reason)

    async def _look(self) -> bool:
        """Read the Lease, take or renew it if possible, and return whether this operator holds it."""
        try:
            async with asyncio.timeout(GIVE_UP_S):
                return await self._renewed()
        except TimeoutError:
            log.warning("No response about the Lease from the API server within %.0f s.", GIVE_UP_S)
        except ApiException as error:
            if error.status != CONFLICT:  # 409: another operator was faster
                log.warning("Cannot read or write the Lease: %s %s", error.status, error.reason)
        return False

    async def _renewed(self) -> bool:
        existing = await self.api.get(API, KIND, self.namespace, self.name)
        now, time = self.clock(), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self.looked = now
        if existing is None:
            first = new(self.namespace, self.name, self.me, time, self.namespaces)
            return await self.api.create(first) and await self._renewed()
        self._view = self._view.seen(existing, now)
        if not self._view.may_take(existing, now):
            return False
        lease = taken(existing, self.me, time, self.namespaces)
        self._view = self._view.wrote(await self.api.replace(lease), now)
        return True


def _conflict(other: Manifest) -> str:
    metadata = other["metadata"]
    where = metadata.get("annotations", {}).get(NAMESPACES) or "all namespaces"
    return (
        f"Another operator manages the same services: {holder(other)} holds the Lease "
        f"{metadata['namespace']}/{metadata['name']} and watches {where}. Two operators would revert each "
        "other's writes. Uninstall one of them, or set disjoint --namespaces (watch.namespaces of the chart)."
    )
