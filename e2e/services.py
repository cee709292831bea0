"""An InferenceService for stories in which something happens to it: small, and quick to come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from e2e.kubernetes import Kubernetes
from tests.engine.models import make_model

READY_S = 300
NAME = "relay"
"""Of the service, and so of its model."""

TINY = "tiny-model"
DRAIN = {"timeout": "1m", "preStopDelay": "5s"}
RESOURCES = {"cpu": "150m"}
"""What a worker has of a machine on which others are busy; those that ask for nothing get what is left."""

LESS = {"kvCacheMemory": "256Mi", "env": [{"name": "OMP_NUM_THREADS", "value": "1"}]}
"""What a story's workers take of a machine that all of them share."""


def node_address(cluster: Kubernetes) -> str:
    """Of the node, at which pods reach what listens beside it."""
    (node, *_) = cluster.objects("nodes")
    found: str = next(one["address"] for one in node["status"]["addresses"] if one["type"] == "InternalIP")
    return found


def addresses(cluster: Kubernetes, revision: str) -> set[str]:
    """Of a generation's pods."""
    pods = cluster.objects("pods", f"baton.dev/revision={revision}")
    return {pod["status"].get("podIP", "") for pod in pods}


def service(prefill: int = 1, decode: int = 1, routers: int = 1) -> dict[str, Any]:
    """Of the built-in model, with so many pods of each kind."""
    return {
        "apiVersion": "baton.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"uri": "builtin://smollm2"},
            "engine": LESS,
            "prefill": {"replicas": prefill, "drain": DRAIN, "resources": RESOURCES},
            "decode": {"replicas": decode, "drain": DRAIN, "resources": RESOURCES},
            "router": {"replicas": routers, "resources": {"cpu": "100m"}},
        },
    }


def tiny_service(
    cluster: Kubernetes, folder: Path, prefill: int = 1, decode: int = 1, routers: int = 1
) -> dict[str, Any]:
    """
    The same with a model of random weights, made in `folder`, that answers many requests a second.

    It comes into the pods by a ConfigMap, which no real model would fit into.
    """
    make_model(folder)
    cluster.kubectl("create", "configmap", TINY, f"--from-file={folder}")
    made = service(prefill, decode, routers)
    made["spec"]["model"] = {"uri": f"file:///{TINY}"}
    main = {"name": "main", "volumeMounts": [{"name": TINY, "mountPath": f"/{TINY}", "readOnly": True}]}
    volume = {"name": TINY, "configMap": {"name": TINY}}
    for role in ("prefill", "decode"):
        made["spec"][role]["podTemplate"] = {"spec": {"containers": [main], "volumes": [volume]}}
    return made
