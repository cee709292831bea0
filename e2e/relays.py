"""What shows that one pod computes a prompt and another goes on with it."""

from __future__ import annotations

import re

from e2e.kubernetes import Kubernetes

WORDS = "The baton goes from hand to hand, and nobody runs the whole way alone. "
QUESTION = WORDS * 60 + "\nWhat goes from hand to hand? Answer in one short sentence."
"""Longer than what a decode worker computes by itself."""

PULLED = r'^baton_worker_transfer_bytes_total\{transport="[^"]+"\} (\S+)'


def pulled_bytes(cluster: Kubernetes, decode: str, port: int = 8000) -> float:
    """KV blocks that the decode pod has pulled so far, by its metrics at `port`."""
    metrics = cluster.kubectl(
        "get", "--raw", f"/api/v1/namespaces/{cluster.namespace}/pods/{decode}:{port}/proxy/metrics"
    )
    found = sum(float(size) for size in re.findall(PULLED, metrics, re.MULTILINE))
    print(f"\nKV blocks pulled by the decode pod: {found:.0f} bytes")
    return found
