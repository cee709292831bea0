"""
The CustomResourceDefinitions, generated from the types: `python -m baton_operator.crd [--check]`.

The files in `crds/` are for users and for the chart; the operator does not read them.
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
from baton_operator.kinds.part import Part, Rule
from baton_operator.kinds.role_scaler import RoleScalerSpec, RoleScalerStatus
from baton_operator.schema import Schema, structural

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
        f"{GROUP}_{one.plural}.yaml": HEAD
        + yaml.dump(one.definition, Dumper=_Plain, sort_keys=False, width=110)
        for one in RESOURCES
    }


def main() -> int:
    """Write the files in `crds`, or check with `--check` that they are current. Returns the exit status."""
    folder = Path("crds")
    texts = {folder / name: text for name, text in files().items()}
    return generated_files.settle(texts, folder.glob("*.yaml"), check="--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
