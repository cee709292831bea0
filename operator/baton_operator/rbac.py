"""
What the operator may do, and why: the only source of its Roles.

Each right is one that it uses, and a test against a real API server's audit log holds it to that. It can
read no Secret, run nothing in a pod, and give nobody a right that it has not itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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


OWNED = ("list", "watch", "create", "patch", "delete")
"""What server-side apply, pruning and hearing of others' changes take."""

SERVICES = (
    Rule(GROUP, ("inferenceservices", "loraadapters"), ("get", "list", "watch"), "What users ask for."),
    Rule(
        GROUP,
        ("batchjobs",),
        ("get", "list", "watch", "create", "delete"),
        "To make them is given on to routers; what a router has made is deleted some time after its end.",
    ),
    Rule(
        GROUP,
        ("rolescalers",),
        ("get", "list", "watch", "create", "patch", "delete"),
        "Made once; their numbers are written by whoever scales, who may be the operator.",
    ),
    Rule(
        GROUP,
        ("inferenceservices/status", "batchjobs/status", "loraadapters/status", "rolescalers/status"),
        ("patch",),
        "What has become of it.",
    ),
    Rule(
        GROUP,
        ("inferenceservices/finalizers",),
        ("update",),
        "Children that block their owner's deletion, where OwnerReferencesPermissionEnforcement is on.",
    ),
    Rule("apps", ("deployments",), OWNED, "Workers and routers."),
    Rule("", ("configmaps", "services"), OWNED, "Generations, weights, addresses; the heartbeat."),
    Rule("networking.k8s.io", ("ingresses", "networkpolicies"), OWNED, "Who reaches whom."),
    Rule("policy", ("poddisruptionbudgets",), OWNED, "How many may be missing at once."),
    Rule("", ("serviceaccounts",), OWNED, "Accounts of workers, routers and runners of batches."),
    Rule(
        "rbac.authorization.k8s.io",
        ("roles", "rolebindings"),
        OWNED,
        "A router's right to see its workers, and to make BatchJobs.",
    ),
    Rule(
        "discovery.k8s.io",
        ("endpointslices",),
        ("list", "watch"),
        "Given on to routers: nobody can give what he has not.",
    ),
    Rule("gateway.networking.k8s.io", ("httproutes",), OWNED, "Exposure by the Gateway API."),
    Rule("cert-manager.io", ("certificates",), OWNED, "Certificates of an issuer."),
    Rule("batch", ("jobs",), ("list", "watch", "create"), "Fetching models, running batches."),
    Rule(
        "batch",
        ("jobs",),
        ("get", "patch", "delete"),
        "Batches that rest, go on, or have ended; models' Jobs end by themselves.",
    ),
    Rule("", ("persistentvolumeclaims",), ("list", "create"), "Models' files, which are never deleted."),
    Rule("", ("pods",), ("list", "watch"), "How workers and routers are."),
    Rule("", ("pods",), ("patch",), "Which of several workers is to go: their deletion cost."),
    Rule("", ("events",), ("create", "patch"), "What has happened to a service."),
)
"""Wherever there are services: in a ClusterRole, or in a Role of each namespace that is watched."""


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
