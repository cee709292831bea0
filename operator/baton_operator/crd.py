"""
The CustomResourceDefinitions, generated from the types: `python -m baton_operator.crd [--check]`.

The files in `crds/` are for people and for the chart; nothing reads them back.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from baton_api import batch_jobs, generated_files
from baton_operator.kinds.batch_job import BatchJobSpec, BatchJobStatus
from baton_operator.kinds.inference_service import InferenceServiceSpec, InferenceServiceStatus
from baton_operator.kinds.lora_adapter import LoraAdapterSpec, LoraAdapterStatus
from baton_operator.kinds.part import Rule
from baton_operator.kinds.role_scaler import RoleScalerSpec, RoleScalerStatus

GROUP = "baton.dev"
VERSION = "v1alpha1"
NAME_LIMIT = 40
"""Characters of a service's name: what is made for it has up to 23 more, and 63 are all there are."""

HEAD = "# Generated from baton_operator by `make fix`. Do not edit.\n"


@dataclass(frozen=True, slots=True)
class Column:
    """What `kubectl get` shows."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False
    """Whether only `-o wide` shows it."""

    @property
    def schema(self) -> dict[str, Any]:
        priority = {"priority": 1} if self.wide else {}
        return {"name": self.name, "type": self.type, "jsonPath": self.path, **priority}


AGE = Column("Age", ".metadata.creationTimestamp", "date")


def _condition(type: str, field: str = "status") -> str:
    return f'.status.conditions[?(@.type=="{type}")].{field}'


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of custom resource."""

    kind: str
    plural: str
    short: str
    description: str
    spec: type[BaseModel]
    status: type[BaseModel]
    columns: tuple[Column, ...]
    rules: tuple[Rule, ...] = ()
    """Of the whole object."""
    scale: dict[str, str] | None = None
    """Paths of the scale subresource, if it has one."""

    @property
    def definition(self) -> dict[str, Any]:
        """The CustomResourceDefinition."""
        scale = {"scale": self.scale} if self.scale else {}
        return {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{self.plural}.{GROUP}"},
            "spec": {
                "group": GROUP,
                "scope": "Namespaced",
                "names": {
                    "kind": self.kind,
                    "listKind": f"{self.kind}List",
                    "plural": self.plural,
                    "singular": self.kind.lower(),
                    "shortNames": [self.short],
                    "categories": ["baton"],
                },
                "versions": [
                    {
                        "name": VERSION,
                        "served": True,
                        "storage": True,
                        "schema": {"openAPIV3Schema": self._schema},
                        "subresources": {"status": {}, **scale},
                        "additionalPrinterColumns": [column.schema for column in self.columns],
                    }
                ],
            },
        }

    @property
    def _schema(self) -> Schema:
        checked = [rule.schema for rule in self.rules]
        return {
            "description": self.description,
            "type": "object",
            "required": ["spec"],
            "properties": {
                "apiVersion": {"type": "string", "description": "Version of this kind of object."},
                "kind": {"type": "string", "description": "Kind of object."},
                "metadata": {"type": "object"},
                "spec": structural(self.spec),
                "status": structural(self.status),
            },
            **({"x-kubernetes-validations": checked} if checked else {}),
        }


RESOURCES = (
    Resource(
        kind="InferenceService",
        plural="inferenceservices",
        short="isvc",
        description="A model, served by prefill workers, decode workers and routers.",
        spec=InferenceServiceSpec,
        status=InferenceServiceStatus,
        columns=(
            Column("Model", ".status.modelName"),
            Column("Ready", _condition("Ready")),
            Column("Reason", _condition("Ready", "reason"), wide=True),
            Column("Prefill", ".status.prefillSummary"),
            Column("Decode", ".status.decodeSummary"),
            Column("Router", ".status.routerSummary", wide=True),
            Column("Revision", ".status.currentRevision", wide=True),
            Column("URL", ".status.url"),
            AGE,
        ),
        rules=(
            Rule(
                f"size(self.metadata.name) <= {NAME_LIMIT}",
                f"the name has at most {NAME_LIMIT} characters: names of what is made for it are longer",
            ),
        ),
    ),
    Resource(
        kind="RoleScaler",
        plural="rolescalers",
        short="rsc",
        description="How many workers one role of an InferenceService is to have, for whoever scales it.",
        spec=RoleScalerSpec,
        status=RoleScalerStatus,
        columns=(
            Column("Service", ".spec.serviceName"),
            Column("Role", ".spec.role"),
            Column("Desired", ".spec.replicas", "integer"),
            Column("Replicas", ".status.replicas", "integer"),
            AGE,
        ),
        scale={
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    ),
    Resource(
        kind="BatchJob",
        plural="batchjobs",
        short="bj",
        description="A file of requests, answered by an InferenceService with what others leave over.",
        spec=BatchJobSpec,
        status=BatchJobStatus,
        columns=(
            Column("Service", ".spec.serviceName"),
            Column("Phase", ".status.phase"),
            Column("Progress", ".status.progress"),
            Column("Reason", _condition("Complete", "reason"), wide=True),
            Column("Batch", ".status.batchId", wide=True),
            AGE,
        ),
        rules=(
            Rule(
                f"size(self.metadata.name) <= {batch_jobs.NAME_LIMIT} && !self.metadata.name.contains('.')",
                f"the name has at most {batch_jobs.NAME_LIMIT} characters and no dots: its pods' are longer",
            ),
        ),
    ),
    Resource(
        kind="LoraAdapter",
        plural="loraadapters",
        short="lora",
        description="An adapter of a model; not active in this release.",
        spec=LoraAdapterSpec,
        status=LoraAdapterStatus,
        columns=(
            Column("Service", ".spec.serviceName"),
            Column("Active", _condition("Active")),
            Column("Reason", _condition("Active", "reason")),
            AGE,
        ),
    ),
)


class _Plain(yaml.SafeDumper):
    """Writes what is there twice twice: the API server's tools know aliases, people read badly around
    them."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def files() -> dict[str, str]:
    """Names of the files in `crds/` and their content."""
    return {
        f"{GROUP}_{one.plural}.yaml": HEAD
        + yaml.dump(one.definition, Dumper=_Plain, sort_keys=False, width=110)
        for one in RESOURCES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--folder", type=Path, default=Path("crds"))
    given = parser.parse_args()
    texts = {given.folder / name: text for name, text in files().items()}
    if status := generated_files.settle(texts, given.folder.glob("*.yaml"), check=given.check):
        sys.exit(status)


Schema = dict[str, Any]

_KEPT = (
    "type", "description", "enum", "pattern", "format", "minimum", "maximum", "minLength", "maxLength",
    "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip


def structural(kind: type[BaseModel]) -> Schema:
    """The OpenAPI v3 schema of `kind`, as a CustomResourceDefinition holds it."""
    whole = kind.model_json_schema(by_alias=True, mode="validation")
    return _object(whole, whole.get("$defs", {}))


def _object(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    if "$ref" in schema:
        named = definitions[schema["$ref"].rpartition("/")[2]]
        schema = {**named, **{name: value for name, value in schema.items() if name != "$ref"}}
    if "anyOf" in schema:
        (some,) = (one for one in schema["anyOf"] if one.get("type") != "null")
        rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
        return _object({**some, **rest}, definitions)
    made = {name: schema[name] for name in _KEPT if name in schema}
    made |= {name: value for name, value in schema.items() if name.startswith("x-kubernetes-")}
    if "const" in schema:
        made["enum"] = [schema["const"]]
    if made.get("x-kubernetes-int-or-string"):
        del made["type"]  # it may be written as a number
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in schema:
        made["properties"] = {
            name: _object(field, definitions) for name, field in schema["properties"].items()
        }
        if schema.get("required"):
            made["required"] = schema["required"]
    elif made.get("type") == "object" and not made.get("x-kubernetes-preserve-unknown-fields"):
        (values,) = schema.get("patternProperties", {"": schema.get("additionalProperties")}).values()
        made["additionalProperties"] = _object(values, definitions)
    if "items" in schema:
        made["items"] = _object(schema["items"], definitions)
    if schema.get("default") is not None:
        made["default"] = _without_nulls(schema["default"])
    if "description" in made:
        made["description"] = " ".join(made["description"].split())
    return {name: made[name] for name in sorted(made, key=_order)}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return value


def _order(name: str) -> tuple[int, str]:
    """What is read first stands first."""
    first = ("description", "type")
    return (first.index(name) if name in first else len(first), name)


if __name__ == "__main__":
    main()
