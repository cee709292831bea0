"""Metrics, load, readiness and the ring of finished requests."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton_api import metrics as contract
from baton_api.mutual_tls import CertificateValidity
from baton_api.workers import Load, Role
from baton_engine.metrics.exposition import CertificateCollector, WorkerMetrics
from baton_engine.requests import RelayRecord
from tests.engine.api.api import MODEL, USER, Api, eventually, open_api

RELAY = RelayRecord(
    prefill_worker="prefill-0",
    prompt_tokens=100,
    computed_tokens=60,
    local_tokens=16,
    blocks=6,
    bytes=6000,
    transport="loopback",
    transfer_s=0.004,
    queue_s=0.001,
    compute_s=0.1,
)


async def test_counters_grow_by_the_requests_and_their_usage(api: Api) -> None:
    usages = [(await api.chat(max_tokens=tokens)).json()["usage"] for tokens in range(1, 11)]
    assert await api.metric('baton_worker_requests_total{finish_reason="length"}') == 10
    generated = sum(usage["completion_tokens"] for usage in usages)
    assert await api.metric(contract.WORKER_GENERATION_TOKENS.name) == generated
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert await api.metric('baton_worker_prompt_tokens_total{source="cached"}') == cached
    computed = sum(usage["prompt_tokens"] for usage in usages) - cached
    assert await api.metric('baton_worker_prompt_tokens_total{source="computed"}') == computed
    assert await api.metric(contract.WORKER_FIRST_TOKEN.name + "_count") == 10
    assert await api.metric(contract.WORKER_TOKEN.name + "_count") == generated - 10
    assert await api.metric(contract.WORKER_REQUEST_TIME.name + "_count") == 10
    assert await api.metric(contract.WORKER_STEP.name + "_count") >= generated
    assert await api.metric(contract.WORKER_FORWARD.name + "_sum") > 0


async def test_metrics_gauges_show_running_and_waiting_requests() -> None:
    async with open_api(max_running=1) as api:
        api.model.go.clear()
        running = [asyncio.create_task(api.chat()) for _ in range(3)]
        await asyncio.to_thread(api.model.inside.wait)
        await eventually(lambda: api.served.computing.snapshot().queued == 2)
        assert await api.metric(contract.WORKER_RUNNING.name) == 1
        assert await api.metric(contract.WORKER_QUEUED.name) == 2
        assert await api.metric(contract.WORKER_QUEUED_TOKENS.name) > 0
        assert await api.metric('baton_worker_kv_blocks{state="owned"}') > 0
        api.model.go.set()
        await asyncio.gather(*running)
        assert await api.metric('baton_worker_kv_blocks{state="owned"}') == 0
        states = ("free", "cached", "owned", "pinned", "quarantined")
        blocks = [await api.metric(f'baton_worker_kv_blocks{{state="{state}"}}') for state in states]
        assert sum(blocks) == api.served.computing.snapshot().total_blocks


async def test_metrics_error_is_counted(api: Api) -> None:
    api.model.fail_on = 0
    await api.complete(prompt=[0])
    assert await api.metric('baton_worker_requests_total{finish_reason="error"}') == 1


async def test_metrics_exposed_names_match_the_contract(api: Api) -> None:
    await api.chat()
    defined = {
        metric.name.removesuffix("_total"): metric
        for metric in contract.CONTRACT
        if metric.name.startswith("baton_worker_") or metric is contract.BUILD_INFO
    }
    text = (await api.http.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    created = {name for name in families if name.endswith("_created")}
    assert families.keys() - created == defined.keys()
    for name, metric in defined.items():
        family = families[name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        for sample in family.samples:
            labels = set(sample.labels) - ({"le"} if metric.kind == "histogram" else set())
            assert labels == set(metric.labels)
            assert sample.name == metric.name or metric.kind == "histogram"


def test_metrics_relay_is_counted_by_transport(api: Api) -> None:
    metrics = WorkerMetrics(api.served.computing.snapshot)
    metrics.relayed(RELAY)
    text = metrics.text().decode()
    assert 'baton_worker_transfer_bytes_total{transport="loopback"} 6000.0' in text
    assert 'baton_worker_transfer_seconds_bucket{le="0.005",transport="loopback"} 1.0' in text


async def test_debug_requests_newest_first_without_text(api: Api) -> None:
    await api.complete(prompt="secret words", max_tokens=3)
    await api.chat(stream=True, max_tokens=5, n=2, seed=1)
    await api.chat(n=0)
    response = await api.http.get("/debug/requests")
    assert "secret" not in response.text
    chat, completion = response.json()["data"]
    assert (completion["path"], completion["status"], completion["stream"]) == ("/v1/completions", 200, False)
    assert (completion["prompt_tokens"], completion["completion_tokens"]) == (12, 3)
    assert completion["finish_reasons"] == ["length"]
    assert 0 < completion["ttft_s"] <= completion["total_s"]
    assert completion["tokens_per_s"] > 0
    assert chat["finish_reasons"] == ["length", "length"]
    assert chat["completion_tokens"] == 10


async def test_debug_requests_keeps_the_last_hundred(api: Api) -> None:
    for number in range(103):
        await api.complete(max_tokens=1, prompt="x" * (number + 1))
    data = (await api.http.get("/debug/requests")).json()["data"]
    assert [entry["prompt_tokens"] for entry in data] == list(range(103, 3, -1))


async def test_readiness_says_why_not() -> None:
    reason: list[str | None] = [None]
    async with open_api(ready=lambda: reason[0]) as api:
        assert (await api.http.get("/ready")).status_code == 200
        reason[0] = "loading weights"
        response = await api.http.get("/ready")
        assert response.status_code == 503
        assert "loading weights" in response.json()["error"]["message"]
        assert (await api.http.get("/health")).status_code == 200


@pytest.mark.one_process("drains the computing process only")
async def test_drain_finishes_running_requests_and_rejects_new_ones() -> None:
    load = Load(role=Role.DECODE, model=MODEL, running=1, free_blocks=7)
    async with open_api(load=lambda: load) as api:
        assert (await api.http.get("/load")).json() | {"draining": True} == {
            "role": "decode", "model": MODEL, "names": [], "max_model_len": 0, "running": 1, "queued": 0,
            "queued_tokens": 0, "step_s": 0.0, "free_blocks": 7, "total_blocks": 0, "block_size": 16,
            "draining": True, "control": "", "epoch": "", "compatibility": "",
            "kv_events": "", "kv_replay": "", "engine": "baton", "adapters": [], "local_prefill": True,
            "name": "", "version": "", "ticket_refusal": "", "peers": False,
        }  # fmt: skip
        api.model.go.clear()
        running = asyncio.create_task(api.chat())
        await asyncio.to_thread(api.model.inside.wait)
        draining = asyncio.create_task(api.served.drain.drain(5))
        await eventually(lambda: api.served.drain.draining)
        assert (await api.http.get("/ready")).status_code == 503
        assert (await api.http.get("/load")).json()["draining"] is True
        refused = await api.chat(messages=USER)
        assert refused.status_code == 503 and 1 <= int(refused.headers["retry-after"]) <= 120
        assert not draining.done()
        api.model.go.set()
        assert (await running).status_code == 200
        assert await draining is True


async def test_drain_that_times_out_returns_false(api: Api) -> None:
    with api.served.drain.request():
        assert await api.served.drain.drain(0.001) is False


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_may_ask_with_head(api: Api, path: str) -> None:
    assert (await api.http.head(path)).status_code == 200


@pytest.mark.parametrize(
    ("validity", "expected"), [(CertificateValidity(1_000.0, 5_000.0), [5_000.0, 4_000.0]), (None, [])]
)
def test_certificate_metrics_have_expiry_of_worker(
    validity: CertificateValidity | None, expected: list[float]
) -> None:
    families = CertificateCollector(lambda: validity).collect()
    assert [sample.value for family in families for sample in family.samples] == expected
