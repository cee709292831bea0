"""
One operator at a time: a Lease that its holder renews, and that another may take when it has run out.

Times of different machines are never compared. A holder counts as gone when its Lease has not changed for
its whole duration, by the clock of whoever watches it. A holder that cannot renew stops before anybody else
may begin; every write is the same twice anyway.

A Lease also says which namespaces its holder looks after. Operators of different installations have
different Leases, and undo each other's writes where both look after a service; so they must be able to
tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton_api import labels
from baton_operator.manifests.objects import Manifest

DURATION_S = 15
RENEW_S = 2.0
"""Seconds between two looks, of whoever holds it and whoever waits."""

NAMESPACES = "baton.dev/namespaces"
"""Annotation of a Lease: the namespaces that its holder looks after, with commas between; empty for all."""

GIVE_UP_S = 10.0
"""Seconds without a renewal after which its holder stops."""


@dataclass(frozen=True, slots=True)
class LeaseView:
    """What one operator has seen of the Lease. Times are of its own monotonic clock."""

    me: str
    version: str = ""
    """Of the Lease when it last changed."""
    changed: float = 0.0
    """When that was seen."""
    renewed: float | None = None
    """When this operator last wrote it; None if it does not hold it."""

    def seen(self, lease: Manifest, now: float) -> LeaseView:
        """The Lease was read."""
        version = str(lease["metadata"]["resourceVersion"])
        view = self if version == self.version else replace(self, version=version, changed=now)
        return view if holder(lease) == self.me else replace(view, renewed=None)

    def wrote(self, lease: Manifest, now: float) -> LeaseView:
        """It was written, by us; `now` is from before it was sent."""
        return replace(self, version=str(lease["metadata"]["resourceVersion"]), changed=now, renewed=now)

    def may_take(self, lease: Manifest, now: float) -> bool:
        """Whether it is ours, nobody's, or of one who has not renewed it."""
        if holder(lease) in ("", self.me):
            return True
        duration = lease["spec"].get("leaseDurationSeconds") or DURATION_S
        return now - self.changed > duration

    def holds(self, now: float) -> bool:
        """Whether this operator may write."""
        return self.renewed is not None and now - self.renewed < GIVE_UP_S


def holder(lease: Manifest) -> str:
    return str(lease["spec"].get("holderIdentity") or "")


def taken(lease: Manifest, me: str, time: str, namespaces: Sequence[str] = ()) -> Manifest:
    """The Lease as its new or old holder writes it. `time` is for people; no `namespaces` are all."""
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
    """The Lease as a holder leaves it who stops: the next one need not wait."""
    return {**lease, "spec": {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}}


def new(namespace: str, name: str, me: str, time: str, namespaces: Sequence[str] = ()) -> Manifest:
    """The first one."""
    empty = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {},
    }
    return taken(empty, me, time, namespaces)


class OtherLeases:
    """
    Leases of other operators, as they are looked at again and again.

    A holder that crashed leaves its Lease held. So one counts as alive once it was renewed before our eyes,
    and as dead when it was not for its whole duration.
    """

    def __init__(self, namespace: str, name: str, now: float) -> None:
        self._own = namespace, name
        self._began = now
        self._versions: dict[tuple[str, str], str] = {}

    def look(self, leases: Sequence[Manifest], now: float) -> Manifest | bool:
        """The Lease of one that is alive; otherwise whether it is certain that there is none."""
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
