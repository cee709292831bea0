"""Prometheus' HTTP API: what an answer means, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from baton_operator.scaling import prometheus
from baton_operator.scaling.decision import decide
from baton_operator.scaling.prometheus import METRIC_LABEL, MetricsLost, MetricsQuery, PrometheusClient
from baton_operator.scaling.sample import RoleMemory
from baton_operator.scaling.signals import RolePods, ServiceMetrics, role_sample
from tests.operator.scaling.test_decision import PREFILL

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/api/v1/query", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def response(**values: str) -> bytes:
    result = [{"metric": {METRIC_LABEL: name}, "value": [1.0, value]} for name, value in values.items()]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()


async def queried(body: bytes, status: int = 200) -> dict[str, float]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, status=status)

    asking = PrometheusClient()
    try:
        async with server(answer) as url:
            return dict(await asking.query(url, "up", METRIC_LABEL))
    finally:
        await asking.close()


async def test_query_values_come_by_their_names() -> None:
    replies = await queried(response(demand="3.5", queued="0", latency="NaN"))
    assert (replies["demand"], replies["queued"]) == (3.5, 0.0)
    signals = ServiceMetrics({**replies, "age": 1.0, "routers": 1.0})
    assert signals.read("queued").zero
    assert not signals.read("latency").has_value
    assert not signals.read("nowhere").has_value


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b'{"status": "error", "error": "parse error"}', 400, "parse error"),
        (b"<html>", 200, "invalid response"),
        (b'{"status": "success", "data": {}}', 200, "invalid response"),
        (b'[{"status": "success"}]', 200, "invalid response"),
        (b"busy", 503, "invalid response"),
    ],
)
async def test_query_invalid_answer_raises_metrics_lost(body: bytes, status: int, words: str) -> None:
    with pytest.raises(MetricsLost, match=words):
        await queried(body, status)


async def test_query_unreachable_or_silent_server_raises_metrics_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forever = asyncio.Event()

    async def silent(request: web.Request) -> web.Response:
        await forever.wait()
        return web.Response()

    monkeypatch.setattr(prometheus, "TIMEOUT_S", 0.2)
    asking = PrometheusClient()
    try:
        with pytest.raises(MetricsLost, match="no Prometheus is set"):
            await asking.query("", "up", METRIC_LABEL)
        with pytest.raises(MetricsLost, match="cannot query"):
            await asking.query("http://127.0.0.1:9", "up", METRIC_LABEL)
        async with server(silent) as url:
            with pytest.raises(MetricsLost, match="no response from"):
                await asking.query(url, "up", METRIC_LABEL)
            forever.set()
    finally:
        await asking.close()


async def test_query_token_goes_only_to_operators_server(tmp_path: Path) -> None:
    shown: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        shown.append(request.headers.get("Authorization"))
        return web.Response(body=response())

    (tmp_path / "token").write_text("secret\n")
    async with server(answer) as own, server(answer) as other:
        asking = PrometheusClient(own, str(tmp_path / "token"))
        await asking.query(own, "up", METRIC_LABEL)
        await asking.query(other, "up", METRIC_LABEL)
        await asking.close()
    assert shown == ["Bearer secret", None]


# --- What the figures of an answer mean ---

SEEN = {
    "routers": 2.0, "age": 5.0, "demand_prompt": 3000.0, "demand_answer": 500.0, "queued_prompt": 100.0,
    "in_flight": 4.0, "waiting": 0.0, "held": 0.0, "first_token": 0.5, "prefill_workers": 3.0,
    "prefill_queued_tokens": 50.0, "prefill_speed": 1000.0, "decode_workers": 2.0, "decode_queued": 1.0,
    "decode_generated": 480.0, "decode_answer": 100.0, "decode_fullest": 0.7, "decode_usage": 0.6,
    "decode_mean_usage": 0.6, "decode_running": 20.0, "decode_mean_running": 20.0, "decode_slots": 128.0,
    "decode_fullest_slots": 0.2, "decode_token": 0.02, "demand_local": 0.0, "prefill_queued": 0.0,
}  # fmt: skip
PREFILLS = RolePods(replicas=3, ready=3, routers=2)


def test_role_sample_uses_metrics_of_its_role() -> None:
    prefill = role_sample("prefill", ServiceMetrics(SEEN), PREFILLS, 2.0)
    assert (prefill.demand.value, prefill.backlog.value, prefill.latency.value) == (3000.0, 150.0, 0.5)
    decode = role_sample("decode", ServiceMetrics(SEEN), RolePods(replicas=2, ready=2, routers=2), 0.05)
    assert (decode.demand.value, decode.backlog.value) == (500.0, 100.0)
    assert decode.utilisation.value == pytest.approx(0.7 * 21 / 20), "what is queued will want blocks too"
    assert decode.rate.value == pytest.approx(240 * 1.25), "what a worker would do if it were full enough"
    assert (prefill.silent, decode.silent) == (0, 0)


@pytest.mark.parametrize(
    ("lately", "demand"),
    [
        ({"demand_prompt_lately": 5000.0}, 5000.0),
        ({"demand_prompt_lately": 4000.0}, 3000.0),
        ({"demand_prompt_lately": 9.0}, 3000.0),
        ({}, 3000.0),
        ({"demand_prompt": math.nan, "demand_prompt_lately": 9.0}, None),
    ],
    ids=["a step", "chance", "less", "unknown", "only of lately"],
)
def test_role_sample_recent_demand_step_counts_at_once(
    lately: dict[str, float], demand: float | None
) -> None:
    seen = role_sample("prefill", ServiceMetrics({**SEEN, **lately}), PREFILLS, 2.0)
    assert seen.demand.value == demand


def test_prompts_that_decode_computes_are_no_prefill_demand() -> None:
    """Short chats never reach a prefill worker: the router reports them apart, an older router not at all."""
    queried = {**SEEN, "demand_prompt": 3000.0, "demand_prompt_lately": 8000.0}
    local = {"demand_local": 2900.0, "demand_local_lately": 7900.0}
    assert role_sample("prefill", ServiceMetrics({**queried, **local}), PREFILLS, 2.0).demand.value == 100.0
    unreported = {name: value for name, value in queried.items() if "local" not in name}
    assert role_sample("prefill", ServiceMetrics(unreported), PREFILLS, 2.0).demand.value == 8000.0


DECODES = RolePods(replicas=2, ready=2, routers=2)
SLOTS_FULL = {
    "decode_fullest": 0.3, "decode_usage": 0.3, "decode_token": 0.015, "decode_running": 128.0,
    "decode_fullest_slots": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "utilisation", "tightest"),
    [
        ({"decode_fullest": 0.6, "decode_queued": 0.0}, 0.6, "KVBlocks"),
        ({"decode_fullest": 0.6, "decode_queued": 10.0}, 0.9, "KVBlocks"),
        ({"decode_fullest_slots": 0.8, "decode_fullest": 0.3, "decode_queued": 0.0}, 0.8, "BatchSlots"),
        ({**SLOTS_FULL, "decode_fullest_slots": 1.9, "decode_queued": 120.0}, 1.9, "BatchSlots"),
        ({**SLOTS_FULL, "waiting": 64.0, "decode_queued": 0.0}, 1.5, "BatchSlots"),
        ({"decode_fullest_slots": None}, None, "KVBlocks"),
        ({"decode_fullest_slots": None, "decode_fullest": 0.95, "decode_queued": 0.0}, 0.95, "KVBlocks"),
    ],
    ids=["KV", "KV and its queue", "slots", "slots and their queue", "slots and the router's queue",
         "slots unknown", "slots unknown, KV full"],
)  # fmt: skip
def test_decode_fullness_is_the_larger_of_kv_and_slots(
    changed: dict[str, float | None], utilisation: float | None, tightest: str
) -> None:
    signals = {name: value for name, value in {**SEEN, **changed}.items() if value is not None}
    seen = role_sample("decode", ServiceMetrics(signals), DECODES, 0.05)
    assert seen.utilisation.value == (None if utilisation is None else pytest.approx(utilisation))
    assert seen.tightest == tightest


@pytest.mark.parametrize("seed", range(50))
def test_decode_fullness_any_figures_never_below_kv_or_slots(seed: int) -> None:
    rng = random.Random(seed)
    changed = {
        "decode_fullest": rng.random(), "decode_fullest_slots": rng.uniform(0, 3),
        "decode_usage": rng.random(), "decode_running": rng.uniform(0, 128),
        "decode_queued": rng.choice((0.0, 9.0)), "waiting": rng.choice((0.0, 50.0)),
    }  # fmt: skip
    seen = role_sample("decode", ServiceMetrics({**SEEN, **changed}), DECODES, 0.05)
    assert seen.utilisation.value is not None
    assert seen.utilisation.value >= max(changed["decode_fullest"], changed["decode_fullest_slots"])
    assert seen.queued.zero == (not changed["decode_queued"] and not changed["waiting"])


def test_role_sample_router_queue_for_decode_is_decode_backlog() -> None:
    queued = {**SEEN, "waiting": 120.0, "queued_prompt": 500_000.0}
    assert role_sample("prefill", ServiceMetrics(queued), PREFILLS, 2.0).backlog.value == 500_050.0
    assert (
        role_sample("prefill", ServiceMetrics({**queued, **SLOTS_FULL}), PREFILLS, 2.0).backlog.value == 50.0
    )
    waiting = role_sample("decode", ServiceMetrics({**queued, **SLOTS_FULL}), DECODES, 0.05)
    assert waiting.backlog.value == 121 * 100.0, "but decode's: requests by tokens of an answer"


@pytest.mark.parametrize(
    ("changed", "sample"),
    [
        ({"decode_mean_running": 128.0}, 240 * 0.8),
        ({"decode_mean_running": 128.0, "decode_slots": None}, None),
        ({"decode_mean_usage": 0.2}, None),
    ],
    ids=["slots are full", "slots are unknown", "half empty"],
)
def test_decode_capacity_is_sampled_by_what_binds(
    changed: dict[str, float | None], sample: float | None
) -> None:
    signals = {name: value for name, value in {**SEEN, **changed}.items() if value is not None}
    rate = role_sample("decode", ServiceMetrics(signals), DECODES, 0.05).rate.value
    assert rate == (None if sample is None else pytest.approx(sample))


@pytest.mark.parametrize(
    ("changed", "pods", "silent"),
    [
        ({"prefill_workers": 2.0}, PREFILLS, 1),
        ({"routers": 1.0}, PREFILLS, 1),
        ({}, RolePods(replicas=3, ready=4, routers=2), 1),
    ],
)
def test_role_sample_counts_silent_pods(changed: dict[str, float], pods: RolePods, silent: int) -> None:
    assert role_sample("prefill", ServiceMetrics({**SEEN, **changed}), pods, 2.0).silent == silent


@pytest.mark.parametrize(
    "changed",
    [{"age": 600.0}, {"routers": 0.0}, {"age": None}, {"routers": None}],
    ids=["stale", "no router", "no age", "no routers"],
)
def test_role_sample_stale_or_missing_metrics_are_unknown(changed: dict[str, Any]) -> None:
    signals = {name: value for name, value in {**SEEN, **changed}.items() if value is not None}
    seen = role_sample("prefill", ServiceMetrics(signals), PREFILLS, 2.0)
    decision, _ = decide(PREFILL, RoleMemory.new(0.0), seen, 0.0)
    assert decision.reason == "MetricsHeld"


def test_role_sample_any_missing_metric_never_shrinks() -> None:
    quiet = {
        **SEEN, "demand_prompt": 100.0, "queued_prompt": 0.0, "prefill_queued_tokens": 0.0,
        "decode_queued": 0.0,
    }  # fmt: skip
    needed = {
        "demand_prompt", "queued_prompt", "prefill_queued_tokens", "first_token", "prefill_workers",
        "waiting", "prefill_queued", "decode_queued",
    }  # fmt: skip
    for missing in [None, *needed]:
        signals = {name: value for name, value in quiet.items() if name != missing}
        memory, replicas = RoleMemory.new(0.0, 1000.0), 3
        for tick in range(40):
            seen = role_sample("prefill", ServiceMetrics(signals), PREFILLS, 2.0)
            decision, memory = decide(PREFILL, memory, seen, 15.0 * tick)
            replicas = min(replicas, decision.replicas)
        assert replicas == (3 if missing else 2), missing


def test_query_one_question_has_every_metric_by_name() -> None:
    question = MetricsQuery("models", "chat", 95)
    assert len(question.expressions) == len(set(question.expressions.values())), (
        "no figure is asked for twice"
    )
    for name in question.expressions:
        assert f'"{METRIC_LABEL}", "{name}"' in question.text
    assert 'namespace="models", service="chat"' in question.expressions["demand_prompt"]
