"""Proof that one pod computes a prompt and another one continues: the transferred KV blocks."""

from __future__ import annotations

import re

from e2e.kubernetes import Kubernetes

WORDS = "The baton goes from hand to hand, and nobody runs the whole way alone. "
QUESTION = WORDS * 60 + "\nWhat goes from hand to hand? Answer in one short sentence."
"""Longer than the prompts that a decode worker computes itself."""

PULLED = r'^baton_worker_transfer_bytes_total\{transport="[^"]+"\} (\S+)'


def pulled_bytes(cluster: Kubernetes, decode: str, port: int = 8000) -> float:
    """Return the bytes of KV blocks that the decode pod has pulled, by its metrics at `port`."""
    metrics = cluster.kubectl(
        "get", "--raw", f"/api/v1/namespaces/{cluster.namespace}/pods/{decode}:{port}/proxy/metrics"
    )
    pulled = sum(float(size) for size in re.findall(PULLED, metrics, re.MULTILINE))
    print(f"\nKV blocks pulled by the decode pod: {pulled:.0f} bytes")
    return pulled
