"""
Files of the Helm chart, and the permissions of the operator in it: `python -m baton_operator.chart
[--check]`.

They are copies of the CustomResourceDefinitions, and the rules of the Roles with their reasons. Helm can
read neither `crds/` nor Python.

The operator uses each permission: a test compares them with the audit log of a real API server. It cannot
read Secrets, run commands in pods, or grant a permission that it lacks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from baton_api import generated_files
from baton_operator.cluster.api_resources import WATCHED
from baton_operator.crd import GROUP, RESOURCES, files
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
    *(Rule(resource.group, (resource.plural,), resource.verbs, resource.why) for resource in WATCHED),
    Rule(
        GROUP,
        tuple(f"{resource.plural}/status" for resource in WATCHED if resource.custom),
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


HEAD = "{{/* Generated from baton_operator by `make fix`. Do not edit. */}}\n"
LEASE = '{{ include "baton.lease" . }}'

PLURALS = tuple(resource.plural for resource in RESOURCES)

VIEW = (Rule(GROUP, PLURALS, ("get", "list", "watch"), "Users who may view a namespace."),)

EDIT = (
    Rule(
        GROUP,
        PLURALS,
        ("create", "delete", "deletecollection", "patch", "update"),
        "Users who may edit a namespace.",
    ),
    Rule(
        GROUP,
        tuple(f"{resource.plural}/scale" for resource in RESOURCES if resource.scale),
        ("get", "patch", "update"),
        "Use kubectl scale.",
    ),
)
"""Added to VIEW."""


def generated() -> dict[str, str]:
    """Return the text of each generated file by its path within the chart."""
    rules = {
        "baton.serviceRules": SERVICES,
        "baton.clusterRules": CLUSTER,
        "baton.ownRules": own(LEASE),
        "baton.viewRules": VIEW,
        "baton.editRules": EDIT,
    }
    templates = "\n".join(_template(name, those) for name, those in rules.items())
    copies = {f"files/crds/{name}": text for name, text in files().items()}
    return {"templates/_rules.tpl": f"{HEAD}\n{templates}", **copies}


def _template(name: str, rules: Iterable[Rule]) -> str:
    """The `rules` of a Role, as a template."""
    lines = [f'{{{{- define "{name}" -}}}}']
    for rule in rules:
        entry = yaml.safe_dump([rule.manifest], default_flow_style=None, sort_keys=False, width=1000)
        lines += [f"# {rule.why}", entry.rstrip()]
    return "\n".join([*lines, "{{- end -}}", ""])


def main() -> int:
    """Write the files, or check with `--check` that they are current. Returns the exit status."""
    folder = Path("charts/baton")
    texts = {folder / name: text for name, text in generated().items()}
    return generated_files.settle(texts, (folder / "files/crds").glob("*.yaml"), check="--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
