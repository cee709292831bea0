"""
The Lease that makes one operator the leader: pure decisions about taking, renewing and expiry.

Times of different machines are never compared. A holder counts as gone if its Lease does not change for its
whole duration, by the clock of the observer. A holder that cannot renew stops before another operator may
start.

An annotation names the namespaces that the holder manages. Operators of different installations have
different Leases and would revert each other's writes if both managed a service, so each checks the Leases
of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton_api import labels
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
        for one in leases:
            name = one["metadata"]["namespace"], one["metadata"]["name"]
            if name == self._own or not holder(one):
                continue
            version = one["metadata"]["resourceVersion"]
            if self._versions.setdefault(name, version) != version:
                return one
            duration = one["spec"].get("leaseDurationSeconds") or DURATION_S
            waits = waits or now - self._began <= duration
        return not waits
