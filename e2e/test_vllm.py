"""Real vLLM workers: their pods exchange KV blocks by NIXL, and a rollout under load fails no request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai

from baton_api import labels
from e2e.installation import image
from e2e.kubernetes import Kubernetes
from e2e.polling import until
from e2e.relays import WORDS, vllm_transfers
from e2e.services import NAME, addresses, tiny_service
from e2e.stopwatch import Stopwatch
from e2e.traffic import Traffic

READY_S = 1800
"""Pods import vLLM at the same time, on a node that may have two cores."""

PER_SECOND = 1
"""Two workers compute each request. During the rollout, four share the node."""

TOKENS = 32
"""Streams of a second or more, so that some are open whenever a worker ends."""

SIZES = {"head_dim": 32, "max_position_embeddings": 4096}
"""Sizes of the model that vLLM's kernels for CPUs support."""

CPU = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

ENGINE = {
    "type": "vLLM",
    "image": image("vllm"),
    "args": ["--enforce-eager", "--max-num-seqs", "16"],
    "env": [{"name": name, "value": value} for name, value in CPU.items()],
    "maxModelLen": 2048,
    "kvCacheMemory": "128Mi",
}

CHANGED = ["--enforce-eager", "--max-num-seqs", "24"]


def test_vllm_service_answers_and_streams(cluster: Kubernetes, tmp_path: Path) -> None:
    manifest = tiny_service(cluster, tmp_path, **SIZES)
    manifest["spec"]["engine"] = ENGINE
    manifest["spec"]["router"]["localPrefillMaxTokens"] = 0
    watch = Stopwatch("vLLM workers")
    cluster.apply(manifest)
    cluster.wait(f"bsvc/{NAME}", "condition=Ready", READY_S)
    watch.note("applied -> Ready")

    with (
        cluster.reach(NAME) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        messages: Any = [{"role": "user", "content": WORDS * 8}]
        answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=32, temperature=0)
        watch.note("Ready -> first answer")
        stream = client.chat.completions.create(
            model=NAME, messages=messages, max_tokens=32, temperature=0, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        watch.note("the same, streamed")

    content = answer.choices[0].message.content
    print(f"\n{content!r}")
    assert content
    assert "".join(pieces) == content
    assert answer.usage is not None and answer.usage.prompt_tokens > 256


def test_vllm_pods_transfer_kv_blocks(cluster: Kubernetes) -> None:
    (decode,) = cluster.objects("pods", f"{labels.ROLE}=decode")

    assert vllm_transfers(cluster, decode["metadata"]["name"]) > 0


def test_rollout_of_vllm_workers_fails_no_request(cluster: Kubernetes) -> None:
    old = _status(cluster)["currentRevision"]
    with (
        cluster.reach(NAME) as url,
        Traffic(url, PER_SECOND, context=f" {WORDS * 4}", tokens=TOKENS) as traffic,
    ):
        until("ten answers before the change", lambda: traffic.outcome.answered >= 10, 120)
        watch = Stopwatch("a rollout of vLLM workers")
        cluster.patch(f"bsvc/{NAME}", {"spec": {"engine": {"args": CHANGED}}})
        until("a new revision serves", lambda: _status(cluster)["currentRevision"] != old, READY_S)
        watch.note("changed -> the new revision serves")
        until("the old revision is gone", lambda: not _pods(cluster, old), READY_S)
        watch.note("-> the old revision is gone")
        new = addresses(cluster, _status(cluster)["currentRevision"])
        until("ten answers after the change", lambda: traffic.outcome.of(new) >= 10, 120)

    assert not traffic.outcome.failures
    cluster.wait(f"bsvc/{NAME}", "condition=Ready", 30)
    (decode,) = cluster.objects("pods", f"{labels.ROLE}=decode")
    assert vllm_transfers(cluster, decode["metadata"]["name"]) > 0


def _status(cluster: Kubernetes) -> Any:
    return cluster.object("bsvc", NAME)["status"]


def _pods(cluster: Kubernetes, revision: str) -> list[Any]:
    return cluster.objects("pods", f"baton.dev/revision={revision}")
