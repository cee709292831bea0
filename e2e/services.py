"""A small InferenceService that starts and ends quickly, for tests of failures and changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from e2e.kubernetes import Kubernetes
from tests.engine.models import make_model

READY_S = 300
NAME = "relay"
"""Name of the service and of its model."""

TINY = "tiny-model"
DRAIN = {"timeout": "1m", "preStopDelay": "5s"}
RESOURCES = {"requests": {"cpu": "150m"}}
"""CPU request of a worker. Pods without a request get only the rest of a busy machine."""

LESS = {"kvCacheMemory": "256Mi", "env": [{"name": "OMP_NUM_THREADS", "value": "1"}]}
"""Engine settings for workers that share one machine."""


def node_address(cluster: Kubernetes) -> str:
    """Return the address at which pods reach servers on the node."""
    (node, *_) = cluster.objects("nodes")
    address: str = next(one["address"] for one in node["status"]["addresses"] if one["type"] == "InternalIP")
    return address


def addresses(cluster: Kubernetes, revision: str) -> set[str]:
    """Return the addresses of a revision's pods."""
    pods = cluster.objects("pods", f"baton.dev/revision={revision}")
    return {pod["status"].get("podIP", "") for pod in pods}


def service(prefill: int = 1, decode: int = 1, routers: int = 1) -> dict[str, Any]:
    """Return a service of the built-in model with these numbers of pods."""
    return {
        "apiVersion": "baton.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"uri": "builtin://smollm2"},
            "engine": LESS,
            "prefill": {"replicas": prefill, "drain": DRAIN, "resources": RESOURCES},
            "decode": {"replicas": decode, "drain": DRAIN, "resources": RESOURCES},
            "router": {"replicas": routers, "resources": {"requests": {"cpu": "100m"}}},
        },
    }


def tiny_service(
    cluster: Kubernetes, folder: Path, prefill: int = 1, decode: int = 1, routers: int = 1, **sizes: int
) -> dict[str, Any]:
    """
    Return the same service with a model of random weights, which answers many requests per second.

    The model is created in `folder` and mounted from a ConfigMap, which is too small for real models. `sizes`
    are members of its configuration.
    """
    make_model(folder, "llama", **sizes)
    cluster.kubectl("create", "configmap", TINY, f"--from-file={folder}")
    manifest = service(prefill, decode, routers)
    manifest["spec"]["model"] = {"uri": f"file:///{TINY}"}
    main = {"name": "main", "volumeMounts": [{"name": TINY, "mountPath": f"/{TINY}", "readOnly": True}]}
    volume = {"name": TINY, "configMap": {"name": TINY}}
    for role in ("prefill", "decode"):
        manifest["spec"][role]["podTemplate"] = {"spec": {"containers": [main], "volumes": [volume]}}
    return manifest
