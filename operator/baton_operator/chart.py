"""
Generated files of the Helm chart: `python -m baton_operator.chart [--check]`.

They are copies of the CustomResourceDefinitions, and the rules of the Roles with their reasons. Helm can
read neither `crds/` nor Python.
"""

from __future__ import annotations

import argparse
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


def main(arguments: list[str] | None = None) -> None:
    """Write the files, or check that they are current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a file is not what would be written")
    parser.add_argument("--folder", type=Path, default=Path("charts/baton"))
    given = parser.parse_args(arguments)
    texts = {given.folder / name: text for name, text in generated().items()}
    existing = set((given.folder / "files/crds").glob("*.yaml"))
    if status := generated_files.settle(texts, existing, check=given.check):
        sys.exit(status)


if __name__ == "__main__":
    main()
