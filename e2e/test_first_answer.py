"""The first steps of a new user: from `kubectl apply` to an answer."""

from __future__ import annotations

import itertools
import re

import openai

from baton_api import labels
from e2e.installation import ROOT
from e2e.kubernetes import Kubernetes
from e2e.relays import QUESTION, converse, peer_tokens, pulled_bytes
from e2e.stopwatch import Stopwatch

MINIMAL = ROOT / "examples" / "minimal.yaml"
READY_S = 300


def test_minimal_service_answers_and_streams(cluster: Kubernetes) -> None:
    watch = Stopwatch("examples/minimal.yaml")
    cluster.apply(MINIMAL)
    cluster.wait("inferenceservice/smollm2", "condition=Ready", READY_S)
    watch.note("applied -> Ready")

    with cluster.reach("smollm2") as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": QUESTION}], max_tokens=32, temperature=0
        )
        watch.note("Ready -> first answer")
        stream = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=32,
            temperature=0,
            stream=True,
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        watch.note("the same, streamed")

    content = answer.choices[0].message.content
    print(f"\n{content!r}")
    assert content
    assert "".join(pieces) == content
    assert answer.usage is not None and answer.usage.prompt_tokens > 512


def test_minimal_service_transfers_kv_blocks_between_pods(cluster: Kubernetes) -> None:
    roles = {pod["metadata"]["labels"][labels.ROLE]: pod for pod in cluster.objects("pods")}
    assert {"prefill", "decode", "router"} <= roles.keys()

    assert pulled_bytes(cluster, roles["decode"]["metadata"]["name"]) > 0


def test_prefill_pod_reads_what_the_decode_pod_generated(cluster: Kubernetes) -> None:
    roles = {pod["metadata"]["labels"][labels.ROLE]: pod for pod in cluster.objects("pods")}
    with cluster.reach("smollm2") as url:
        converse(url, "smollm2")
    assert peer_tokens(cluster, roles["prefill"]["metadata"]["name"]) > 0


def test_kubectl_get_shows_model_and_ready_replicas(cluster: Kubernetes) -> None:
    header, row = cluster.kubectl("get", "bsvc", "smollm2").splitlines()
    starts = [*(column.start() for column in re.finditer(r"\S+", header)), len(row)]
    values = [row[start:end].strip() for start, end in itertools.pairwise(starts)]
    shown = dict(zip(header.split(), values, strict=True))
    assert shown["MODEL"] == "smollm2"
    assert shown["READY"] == "True"
    assert (shown["PREFILL"], shown["DECODE"]) == ("1/1 ready", "1/1 ready")
