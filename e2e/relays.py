"""Proof that one pod computes a prompt and another one continues: the transferred KV blocks."""

from __future__ import annotations

import re

import openai

from e2e.kubernetes import Kubernetes

WORDS = "The baton goes from hand to hand, and nobody runs the whole way alone. "
QUESTION = WORDS * 60 + "\nWhat goes from hand to hand? Answer in one short sentence."
"""Longer than the prompts that a decode worker computes itself."""

PULLED = r'^baton_worker_transfer_bytes_total\{transport="[^"]+"\} (\S+)'
READ = r'^baton_worker_prompt_tokens_total\{source="peer"\} (\S+)'
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


def converse(url: str, model: str) -> None:
    """Send two turns. Only the decode worker has the KV blocks of the answer between them."""
    new, generated = 700, 512
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        prompt = list(range(1000, 1000 + new))
        answer = client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=generated,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        said = (answer.choices[0].model_extra or {})["token_ids"]
        again = [*prompt, *said, *range(2000, 2000 + new)]
        client.completions.create(model=model, prompt=again, max_tokens=1)


def peer_tokens(cluster: Kubernetes, prefill: str, port: int = 8000) -> float:
    """Return the prompt tokens that a prefill pod has read from a decode pod, by its metrics at `port`."""
    tokens = _metric(cluster, prefill, port, READ)
    print(f"\ntokens that the prefill pod read from the decode pod: {tokens:.0f}")
    return tokens


def _metric(cluster: Kubernetes, pod: str, port: int, pattern: str) -> float:
    """Return the sum of a pod's samples that match `pattern`."""
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/{pod}:{port}/proxy/metrics"
    metrics = cluster.kubectl("get", "--raw", path)
    return sum(float(value) for value in re.findall(pattern, metrics, re.MULTILINE))
