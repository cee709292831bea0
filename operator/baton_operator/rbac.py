"""
What the operator may do, and why: the only source of its Roles.

Each right is one that it uses, and a test against a real API server's audit log holds it to that. It can
read no Secret, run nothing in a pod, and give nobody a right that it has not itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton_operator.cluster.api_resources import WATCHED
from baton_operator.crd import GROUP
from baton_operator.manifests.objects import Manifest


@dataclass(frozen=True, slots=True)
class Rule:
    """Verbs on resources of one API group."""

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    why: str
    names: tuple[str, ...] = ()
    """With them, only objects of these names."""

    @property
    def manifest(self) -> Manifest:
        """As it stands in a Role."""
        made: Manifest = {
            "apiGroups": [self.group],
            "resources": list(self.resources),
            "verbs": list(self.verbs),
        }
        return {**made, "resourceNames": list(self.names)} if self.names else made


SERVICES = (
    *(Rule(one.group, (one.plural,), one.verbs, one.why) for one in WATCHED),
    Rule(
        GROUP,
        tuple(f"{one.plural}/status" for one in WATCHED if one.custom),
        ("patch",),
        "What has become of it.",
    ),
    Rule(
        GROUP,
        ("inferenceservices/finalizers",),
        ("update",),
        "Children that block their owner's deletion, where OwnerReferencesPermissionEnforcement is on.",
    ),
    Rule(
        "discovery.k8s.io",
        ("endpointslices",),
        ("list", "watch"),
        "Granted to routers: Kubernetes lets nobody grant a right that they lack.",
    ),
    Rule(
        "",
        ("secrets",),
        ("create",),
        "One Secret for each service, by which routers sign tickets. The operator can read none.",
    ),
    Rule("", ("events",), ("create", "patch"), "What has happened to a service."),
)
"""Wherever there are services: in a ClusterRole, or in a Role of each namespace that is watched."""


CLUSTER = (
    Rule(
        "coordination.k8s.io",
        ("leases",),
        ("list",),
        "Whether another operator looks after the same services.",
    ),
)
"""Besides SERVICES in the ClusterRole of an operator that watches all namespaces."""


def own(lease: str) -> tuple[Rule, ...]:
    """In the operator's own namespace: the Lease of that name. What is to be created has no name yet."""
    group, why = "coordination.k8s.io", "One operator at a time."
    return (
        Rule(group, ("leases",), ("create",), why),
        Rule(group, ("leases",), ("get", "update"), why, (lease,)),
    )


def rules(wanted: Iterable[Rule]) -> list[Manifest]:
    """The `rules` of a Role or ClusterRole."""
    return [one.manifest for one in wanted]
