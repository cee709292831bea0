"""
The CustomResourceDefinitions, generated from the types: `python -m baton_operator.crd [--check]`.

The files in `crds/` are for users and for the chart; the operator does not read them.

Four things differ from pydantic's own schema. References are resolved: the API server does not support them.
Optional fields are absent instead of null. The default of an object includes the defaults inside of it,
because the API server evaluates rules on it before it fills those in. And items of lists in a spec have no
defaults: clients that compare whole lists, such as `kubectl apply` and Argo CD, would find a difference after
each write. The types fill these defaults in when the operator reads an object.

Descriptions get the default and the range of their field, which `kubectl explain` does not show otherwise.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from baton_api import batch_jobs, generated_files
from baton_operator.kinds.batch_job import BatchJobSpec, BatchJobStatus
from baton_operator.kinds.inference_service import InferenceServiceSpec, InferenceServiceStatus
from baton_operator.kinds.lora_adapter import LoraAdapterSpec, LoraAdapterStatus
from baton_operator.kinds.part import Duration, Part, Rule
from baton_operator.kinds.role_scaler import RoleScalerSpec, RoleScalerStatus

Schema = dict[str, Any]

_KEPT = (
    "type", "description", "enum", "pattern", "format", "minimum", "maximum", "minLength", "maxLength",
    "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip

LIST_TYPE = "x-kubernetes-list-type"
RULES = "x-kubernetes-validations"


def structural(kind: type[Part], *, of_spec: bool = True) -> Schema:
    """
    Return the OpenAPI v3 schema of `kind`, as a CustomResourceDefinition holds it.

    `of_spec`: users write it, so descriptions end with default and range, and items have no defaults.
    """
    whole = kind.model_json_schema(by_alias=True, mode="validation")
    return _object(whole, whole.get("$defs", {}), of_spec=of_spec)


def _object(
    schema: Schema, definitions: dict[str, Schema], *, of_spec: bool, in_list: bool = False
) -> Schema:
    if "$ref" in schema:
        named = definitions[schema["$ref"].rpartition("/")[2]]
        schema = {**named, **{name: value for name, value in schema.items() if name != "$ref"}}
    if "anyOf" in schema:
        (some,) = (one for one in schema["anyOf"] if one.get("type") != "null")
        rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
        return _object({**some, **rest}, definitions, of_spec=of_spec, in_list=in_list)
    result = {name: schema[name] for name in _KEPT if name in schema}
    result |= {name: value for name, value in schema.items() if name.startswith("x-kubernetes-")}
    if "const" in schema:
        result["enum"] = [schema["const"]]
    if result.get("x-kubernetes-int-or-string"):
        del result["type"]  # users may write a number
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in schema:
        result["properties"] = {
            name: _object(field, definitions, of_spec=of_spec, in_list=in_list)
            for name, field in schema["properties"].items()
        }
        if schema.get("required"):
            result["required"] = schema["required"]
    elif result.get("type") == "object" and not result.get("x-kubernetes-preserve-unknown-fields"):
        (values,) = schema.get("patternProperties", {"": schema.get("additionalProperties")}).values()
        result["additionalProperties"] = _object(values, definitions, of_spec=False, in_list=in_list)
    if "items" in schema:
        result["items"] = _object(schema["items"], definitions, of_spec=of_spec, in_list=True)
        result.setdefault(LIST_TYPE, "atomic")
    default = schema.get("default")
    if default is not None and not (of_spec and in_list):
        result["default"] = _without_nulls(default)
    if "description" in result:
        words = [*result["description"].split(), *(_facts({**result, "default": default}) if of_spec else ())]
        result["description"] = " ".join(words)
    return {name: result[name] for name in sorted(result, key=_order)}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return value


def _order(name: str) -> tuple[int, str]:
    """Description and type first."""
    first = ("description", "type")
    return (first.index(name) if name in first else len(first), name)


def _facts(field: Schema) -> list[str]:
    """Return sentences with default and range."""
    facts = []
    default = field.get("default")
    if isinstance(default, bool):
        facts.append(f"Default: {str(default).lower()}.")
    elif isinstance(default, int) or (isinstance(default, str) and default):
        facts.append(f"Default: {default}.")
    if {"minimum", "maximum"} <= field.keys():
        facts.append(f"Range: {field['minimum']} to {field['maximum']}.")
    elif field.get("pattern") == Duration.PATTERN and RULES in field:
        facts.append(
            f"Range: {field[RULES][0]['message'].removeprefix('must be between ').replace('and', 'to')}."
        )
    if field.get("type") == "array" and "maxItems" in field:
        facts.append(f"At most {field['maxItems']} items.")
    return facts


GROUP = "baton.dev"
VERSION = "v1alpha1"
NAME_LIMIT = 40
"""Maximum characters of a service's name: generated names add up to 23, and 63 is the limit."""

SERVICE_NAME = "^[a-z][-a-z0-9]*$"
"""Names that are valid for a Service, among those that are valid for other objects."""

HEAD = "# Generated from baton_operator by `make fix`. Do not edit.\n"


def _column(name: str, path: str, type: str = "string", *, wide: bool = False) -> Schema:
    """Return a column of `kubectl get`, or of `-o wide` only."""
    return {"name": name, "type": type, "jsonPath": path, **({"priority": 1} if wide else {})}


AGE = _column("Age", ".metadata.creationTimestamp", "date")


def _condition(type: str, field: str = "status") -> str:
    return f'.status.conditions[?(@.type=="{type}")].{field}'


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of custom resource."""

    kind: str
    plural: str
    short: str
    description: str
    spec: type[Part]
    status: type[Part]
    columns: tuple[Schema, ...]
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
                        "additionalPrinterColumns": list(self.columns),
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
                "apiVersion": {"type": "string", "description": "API version of the object."},
                "kind": {"type": "string", "description": "Kind of the object."},
                "metadata": {"type": "object"},
                "spec": structural(self.spec),
                "status": structural(self.status, of_spec=False),
            },
            **({"x-kubernetes-validations": checked} if checked else {}),
        }


RESOURCES = (
    Resource(
        kind="InferenceService",
        plural="inferenceservices",
        short="bsvc",
        description="A model, served by prefill workers, decode workers and routers.",
        spec=InferenceServiceSpec,
        status=InferenceServiceStatus,
        columns=(
            _column("Model", ".status.modelName"),
            _column("Ready", _condition("Ready")),
            _column("Available", _condition("Available"), wide=True),
            _column("Reason", _condition("Ready", "reason"), wide=True),
            _column("Prefill", _condition("PrefillReady", "message")),
            _column("Decode", _condition("DecodeReady", "message")),
            _column("Router", _condition("RouterReady", "message"), wide=True),
            _column("Revision", ".status.currentRevision", wide=True),
            _column("URL", ".status.url"),
            AGE,
        ),
        rules=(
            Rule(
                f"size(self.metadata.name) <= {NAME_LIMIT}",
                f"the name must have at most {NAME_LIMIT} characters: names of generated objects are longer",
            ),
            Rule(
                f"self.metadata.name.matches('{SERVICE_NAME}')",
                "the name must start with a letter and have no dots: the Service has this name",
            ),
        ),
    ),
    Resource(
        kind="RoleScaler",
        plural="rolescalers",
        short="rsc",
        description="Number of workers of one role of an InferenceService, and target of autoscalers.",
        spec=RoleScalerSpec,
        status=RoleScalerStatus,
        columns=(
            _column("Service", ".spec.serviceName"),
            _column("Role", ".spec.role"),
            _column("Desired", ".spec.replicas", "integer"),
            _column("Replicas", ".status.replicas", "integer"),
            _column("Reason", _condition("ScalingActive", "reason"), wide=True),
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
        description="A file of requests that an InferenceService processes with spare capacity.",
        spec=BatchJobSpec,
        status=BatchJobStatus,
        columns=(
            _column("Service", ".spec.serviceName"),
            _column("Phase", ".status.phase"),
            _column("Completed", ".status.completed", "integer"),
            _column("Failed", ".status.failed", "integer"),
            _column("Total", ".status.total", "integer"),
            _column("Reason", _condition("Complete", "reason"), wide=True),
            _column("Batch", ".status.batchId", wide=True),
            AGE,
        ),
        rules=(
            Rule(
                f"size(self.metadata.name) <= {batch_jobs.NAME_LIMIT} && !self.metadata.name.contains('.')",
                f"the name must have at most {batch_jobs.NAME_LIMIT} characters and no dots",
            ),
        ),
    ),
    Resource(
        kind="LoraAdapter",
        plural="loraadapters",
        short="lora",
        description="An adapter of a model, loaded in the vLLM workers of an InferenceService.",
        spec=LoraAdapterSpec,
        status=LoraAdapterStatus,
        columns=(
            _column("Service", ".spec.serviceName"),
            _column("Model", ".status.name"),
            _column("Loaded", ".status.loadedPods", "integer"),
            _column("Pods", ".status.readyPods", "integer"),
            _column("Active", _condition("Active")),
            _column("Reason", _condition("Active", "reason")),
            AGE,
        ),
    ),
)


class _Plain(yaml.SafeDumper):
    """Writes equal objects in full instead of as YAML aliases, which are hard to read."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def files() -> dict[str, str]:
    """Names of the files in `crds/` and their content."""
    return {
        f"{GROUP}_{resource.plural}.yaml": HEAD
        + yaml.dump(resource.definition, Dumper=_Plain, sort_keys=False, width=110)
        for resource in RESOURCES
    }


def main() -> int:
    """Write the files in `crds`, or check with `--check` that they are current. Returns the exit status."""
    folder = Path("crds")
    texts = {folder / name: text for name, text in files().items()}
    return generated_files.settle(texts, folder.glob("*.yaml"), check="--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
