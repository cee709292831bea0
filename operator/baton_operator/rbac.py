"""
The permissions of the operator with their reasons: the only source of its Roles.

The operator uses each of them: a test compares them with the audit log of a real API server. It cannot read
Secrets, run commands in pods, or grant a permission that it lacks.
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
    """Names of the objects that the rule is limited to; empty: all."""

    @property
    def manifest(self) -> Manifest:
        """The rule as an entry of a Role."""
        rule: Manifest = {
            "apiGroups": [self.group],
            "resources": list(self.resources),
            "verbs": list(self.verbs),
        }
        return {**rule, "resourceNames": list(self.names)} if self.names else rule


SERVICES = (
    *(Rule(one.group, (one.plural,), one.verbs, one.why) for one in WATCHED),
    Rule(
        GROUP,
        tuple(f"{one.plural}/status" for one in WATCHED if one.custom),
        ("patch",),
        "Status of the custom resources.",
    ),
    Rule(
        GROUP,
        ("inferenceservices/finalizers",),
        ("update",),
        "Set blockOwnerDeletion in owner references where OwnerReferencesPermissionEnforcement is enabled.",
    ),
    Rule(
        "discovery.k8s.io",
        ("endpointslices",),
        ("list", "watch"),
        "Granted to routers: Kubernetes requires that the operator has what it grants.",
    ),
    Rule(
        "",
        ("secrets",),
        ("create",),
        "One Secret per service, which signs tickets. The operator cannot read Secrets.",
    ),
    Rule("", ("events",), ("create", "patch"), "Report transitions of services."),
)
"""Permissions in the watched namespaces: in a ClusterRole, or in a Role of each namespace."""


CLUSTER = (
    Rule(
        "coordination.k8s.io",
        ("leases",),
        ("list",),
        "Detect another operator that manages the same services.",
    ),
)
"""Added to SERVICES in the ClusterRole of an operator that watches all namespaces."""


def own(lease: str) -> tuple[Rule, ...]:
    """Permissions in the operator's namespace for the Lease `lease`. Rules for `create` cannot name
    objects.
    """
    group, why = "coordination.k8s.io", "Elect the active operator."
    return (
        Rule(group, ("leases",), ("create",), why),
        Rule(group, ("leases",), ("get", "update"), why, (lease,)),
    )


def rules(wanted: Iterable[Rule]) -> list[Manifest]:
    """Return the `rules` of a Role or ClusterRole."""
    return [one.manifest for one in wanted]
