"""An InferenceService for stories in which something happens to it: small, and quick to come and go."""

from __future__ import annotations

from typing import Any

READY_S = 300
NAME = "smollm2"
"""Of the service, and so of the model."""


def service(prefill: int = 1, decode: int = 1, routers: int = 1) -> dict[str, Any]:
    """A `kubectl apply` of it, with so many pods of each kind."""
    return {
        "apiVersion": "baton.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"uri": "builtin://smollm2"},
            "engine": {"kvCacheMemory": "256Mi", "env": [{"name": "OMP_NUM_THREADS", "value": "1"}]},
            "prefill": {"replicas": prefill, "drain": DRAIN},
            "decode": {"replicas": decode, "drain": DRAIN},
            "router": {"replicas": routers},
        },
    }


DRAIN = {"timeoutSeconds": 60, "preStopSeconds": 5}
