"""
Generated files of the Helm chart: `python -m baton_operator.chart [--check]`.

They are copies of the CustomResourceDefinitions, and the rules of the Roles with their reasons. Helm can
read neither `crds/` nor Python.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import yaml

from baton_api import generated_files
from baton_operator.crd import GROUP, RESOURCES, files
from baton_operator.rbac import CLUSTER, SERVICES, Rule, own

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
