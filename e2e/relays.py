"""Proof that one pod computes a prompt and another one continues: the transferred KV blocks."""

from __future__ import annotations

import re

from e2e.kubernetes import Kubernetes

WORDS = "The baton goes from hand to hand, and nobody runs the whole way alone. "
QUESTION = WORDS * 60 + "\nWhat goes from hand to hand? Answer in one short sentence."
"""Longer than the prompts that a decode worker computes itself."""

PULLED = r'^baton_worker_transfer_bytes_total\{transport="[^"]+"\} (\S+)'
VLLM_TRANSFERS = r"^vllm:nixl_xfer_time_seconds_count\{[^}]*\} (\S+)"


def pulled_bytes(cluster: Kubernetes, decode: str, port: int = 8000) -> float:
    """Return the bytes of KV blocks that the decode pod has pulled, by its metrics at `port`."""
    pulled = _metric(cluster, decode, port, PULLED)
    print(f"\nKV blocks pulled by the decode pod: {pulled:.0f} bytes")
    return pulled


def vllm_transfers(cluster: Kubernetes, decode: str) -> float:
    """Return the transfers of KV blocks by NIXL that a decode pod of vLLM has completed, by its metrics."""
    transfers = _metric(cluster, decode, 8000, VLLM_TRANSFERS)
    print(f"\ntransfers to the decode pod: {transfers:.0f}")
    return transfers


def _metric(cluster: Kubernetes, pod: str, port: int, pattern: str) -> float:
    """Return the sum of a pod's samples that match `pattern`."""
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/{pod}:{port}/proxy/metrics"
    metrics = cluster.kubectl("get", "--raw", path)
    return sum(float(value) for value in re.findall(pattern, metrics, re.MULTILINE))
