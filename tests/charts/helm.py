"""The chart, rendered by the real helm."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.router.real_kubernetes import program

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "baton"
NAMESPACE = "baton-system"

Manifest = dict[str, Any]

VALUES: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "two namespaces": {"watch": {"namespaces": ["models", "more-models"]}},
    "one operator that others look after": {
        "replicas": 1,
        "crds": {"enabled": False},
        "rbac": {"create": False, "aggregate": False},
        "serviceAccount": {"create": False, "name": "given"},
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
        "metrics": {"serviceMonitor": {"enabled": False}},
    },
    "everything": {
        "nameOverride": "relay",
        "fullnameOverride": "relay-one",
        "images": {
            "registry": "registry.example/team/",
            "pullPolicy": "Always",
            "pullSecrets": ["registry"],
            "operator": {"tag": "1.2.3"},
            "router": {"repository": "other-router"},
            "worker": {"digest": "sha256:" + "ab" * 32},
        },
        "replicas": 3,
        "concurrency": 16,
        "resyncSeconds": 60,
        "mutualTls": {"issuer": "ClusterIssuer/own"},
        "serviceAccount": {"name": "relay", "annotations": {"example/a": "b"}},
        "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}},
        "podLabels": {"example/team": "serving"},
        "podAnnotations": {"example/note": "one"},
        "env": [{"name": "PYTHONASYNCIODEBUG", "value": "1"}],
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "control-plane", "operator": "Exists"}],
        "affinity": {
            "nodeAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 1,
                        "preference": {"matchExpressions": [{"key": "a", "operator": "Exists"}]},
                    }
                ]
            }
        },
        "topologySpreadConstraints": [
            {
                "topologyKey": "topology.kubernetes.io/zone",
                "maxSkew": 1,
                "whenUnsatisfiable": "DoNotSchedule",
            }
        ],
        "podDisruptionBudget": {"maxUnavailable": "50%"},
        "networkPolicy": {
            "prometheusNamespaceLabels": {"kubernetes.io/metadata.name": "monitoring"},
            "apiServerPorts": [8443],
        },
        "metrics": {"port": 9000, "serviceMonitor": {"labels": {"release": "prometheus"}, "interval": "10s"}},
        "observing": {
            "podMonitor": {"labels": {"release": "prometheus"}, "interval": "5s"},
            "rules": {"labels": {"release": "prometheus"}},
            "dashboards": {"enabled": True, "annotations": {"grafana_folder": "Serving"}},
            "runbooks": "https://wiki.example/baton",
        },
    },
}
"""Sets of values that are tried."""


def helm(*arguments: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm with the values on standard input, and return its result."""
    given = ["--values=-"] if values is not None else []
    return subprocess.run(
        [program("helm"), *arguments, *given],
        input=json.dumps(values or {}),
        capture_output=True,
        text=True,
        check=False,
    )


def render(values: Mapping[str, Any], *options: str) -> list[Manifest]:
    """All manifests, in helm's order."""
    manifests: list[Manifest] = json.loads(_rendered(json.dumps(values), *options))
    return manifests


@functools.cache
def _rendered(values: str, *options: str) -> str:
    """As JSON: helm and the YAML parser take a second, and each caller gets manifests of its own."""
    done = helm(
        "template", "baton", str(CHART), f"--namespace={NAMESPACE}", *options, values=json.loads(values)
    )
    assert done.returncode == 0, done.stderr
    return json.dumps([one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one])


def of_kind(manifests: Iterable[Manifest], kind: str, *, tests: bool = False) -> list[Manifest]:
    """Those of the release; with `tests`, those of `helm test`."""
    return [one for one in manifests if one["kind"] == kind and _is_test(one) == tests]


def _is_test(manifest: Manifest) -> bool:
    return "helm.sh/hook" in manifest["metadata"].get("annotations", {})
