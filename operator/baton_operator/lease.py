"""
One operator at a time: a Lease that its holder renews, and that another may take when it has run out.

Times of different machines are never compared. A holder counts as gone when its Lease has not changed for its
whole duration, by the clock of whoever watches it. A holder that cannot renew stops before anybody else may
begin; every write is the same twice anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from baton_operator.manifests.objects import Manifest

DURATION_S = 15
RENEW_S = 2.0
"""Seconds between two looks, of whoever holds it and whoever waits."""

GIVE_UP_S = 10.0
"""Seconds without a renewal after which its holder stops."""


@dataclass(frozen=True, slots=True)
class View:
    """What one operator has seen of the Lease. Times are of its own monotonic clock."""

    me: str
    version: str = ""
    """Of the Lease when it last changed."""
    changed: float = 0.0
    """When that was seen."""
    renewed: float | None = None
    """When this operator last wrote it; None if it does not hold it."""

    def seen(self, lease: Manifest, now: float) -> View:
        """The Lease was read."""
        version = str(lease["metadata"]["resourceVersion"])
        view = self if version == self.version else replace(self, version=version, changed=now)
        return view if holder(lease) == self.me else replace(view, renewed=None)

    def wrote(self, lease: Manifest, now: float) -> View:
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


def taken(lease: Manifest, me: str, time: str) -> Manifest:
    """The Lease as its new or old holder writes it. `time` is for people."""
    spec: dict[str, Any] = dict(lease["spec"])
    if holder(lease) != me:
        spec |= {"acquireTime": time, "leaseTransitions": (spec.get("leaseTransitions") or 0) + 1}
    spec |= {"holderIdentity": me, "leaseDurationSeconds": DURATION_S, "renewTime": time}
    return {**lease, "spec": spec}


def released(lease: Manifest) -> Manifest:
    """The Lease as a holder leaves it who stops: the next one need not wait."""
    return {**lease, "spec": {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}}


def new(namespace: str, name: str, me: str, time: str) -> Manifest:
    """The first one."""
    empty = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {},
    }
    return taken(empty, me, time)
