"""Limits, classes and objectives as clients meet them: a real router, fake workers."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from baton_api import headers as header_names
from baton_api import metrics
from baton_api.errors import Overloaded, RateLimited
from baton_router.cache.prompt_chunks import chunk_text
from baton_router.scheduling.picker import PickRequest
from baton_router.scheduling.quotas import Quotas
from baton_router.tenants.tenants import TenantLimits
from tests.router import fake_worker
from tests.router.fake_worker import FakeWorker
from tests.router.running import CHAT, STREAM, RunningRouter, anew, running_router, until

WORDS = len(fake_worker.WORDS)


def tenants(path: Path, **limits: dict[str, Any]) -> dict[str, Any]:
    """Settings for tenants whose key is their name."""
    listed = [
        {"name": name, "keys": [f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"], **own}
        for name, own in limits.items()
    ]
    file = path / "tenants.yaml"
    file.write_text(json.dumps({"tenants": listed}))
    return {"tenants_file": str(file), "ticket_secret": "secret"}


async def ask(router: RunningRouter, tenant: str, body: object = STREAM, **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await router.client.post(CHAT, json=body, headers={"authorization": f"Bearer {tenant}", **named})


async def test_used_request_quota_is_rejected_with_retry_after(tmp_path: Path) -> None:
    settings = tenants(tmp_path, small={"requests_per_minute": 2}, other={})
    async with FakeWorker() as worker, running_router([worker], **settings) as router:
        assert [(await ask(router, "small")).status_code for _ in range(3)] == [200, 200, 429]
        refused = await ask(router, "small")
        assert refused.json()["error"]["code"] == RateLimited.code
        assert 1 <= int(refused.headers["retry-after"]) <= 36
        assert (await ask(router, "other")).status_code == 200
        assert router.metric(metrics.ROUTER_REJECTS.name, reason="requests") == 2
        assert len(worker.requests) == 3


async def test_tokens_are_reserved_for_the_answer_too(tmp_path: Path) -> None:
    settings = tenants(tmp_path, small={"tokens_per_minute": 300})
    async with FakeWorker(fake_worker.gated) as worker, running_router([worker], **settings) as router:
        first = asyncio.create_task(ask(router, "small", {**STREAM, "max_tokens": 150}))
        await worker.arrived.wait()
        assert (await ask(router, "small", {**STREAM, "max_tokens": 150})).status_code == 429
        worker.release.set()
        assert (await first).status_code == 200


async def test_open_requests_are_limited_until_their_end(tmp_path: Path) -> None:
    settings = tenants(tmp_path, small={"streams": 1})
    async with FakeWorker(fake_worker.gated) as worker, running_router([worker], **settings) as router:
        first = asyncio.create_task(ask(router, "small"))
        await worker.arrived.wait()
        assert (await ask(router, "small")).status_code == 429
        worker.release.set()
        assert (await first).status_code == 200
        assert (await ask(router, "small")).status_code == 200


@pytest.mark.parametrize("failure", [fake_worker.die_at_once, fake_worker.saying(503, b"{}")])
async def test_resumed_request_counts_once(failure: fake_worker.Behaviour, tmp_path: Path) -> None:
    settings = tenants(tmp_path, small={"requests_per_minute": 20, "streams": 1})
    async with (
        FakeWorker(failure) as bad,
        FakeWorker() as good,
        running_router([bad, good], **settings) as router,
    ):
        statuses = [(await ask(router, "small", anew(STREAM))).status_code for _ in range(20)]
        assert statuses == [200] * 20 and bad.requests
        assert (await ask(router, "small")).status_code == 429


async def test_class_must_exist_and_be_allowed_for_the_tenant(tmp_path: Path) -> None:
    settings = tenants(tmp_path, some={"classes": ["default", "batch"]})
    async with FakeWorker() as worker, running_router([worker], **settings) as router:
        for kind, status in {"batch": 200, "Default": 200, "interactive": 403, "urgent": 400}.items():
            assert (await ask(router, "some", x_baton_class=kind)).status_code == status
        for wrong in ("soon", "-1", "nan", "inf", ""):
            answer = await ask(router, "some", x_slo_ttft_ms=wrong)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, header_names.OBJECTIVE)
        assert (await ask(router, "some", x_slo_ttft_ms="2500")).status_code == 200


async def test_waiting_request_counts_until_its_client_disconnects(tmp_path: Path) -> None:
    async with (
        FakeWorker(fake_worker.hang) as worker,
        running_router([worker], prefill_tokens=1, **tenants(tmp_path, one={}, two={"streams": 1})) as router,
    ):
        tasks = [asyncio.create_task(ask(router, "one", anew(STREAM)))]
        await worker.arrived.wait()
        tasks += [asyncio.create_task(ask(router, "two", anew(STREAM), x_baton_class="interactive"))]
        await until(lambda: router.metric(metrics.ROUTER_QUEUE_DEPTH.name, **{"class": "interactive"}) == 1)
        await until(lambda: router.metric(metrics.ROUTER_QUEUE_AGE.name, **{"class": "interactive"}) > 0)
        tasks[1].cancel()
        await until(lambda: router.metric(metrics.ROUTER_QUEUE_DEPTH.name, **{"class": "interactive"}) == 0)
        assert len(worker.requests) == 1
        # Its reservation is released: the next one waits, and is not rejected.
        tasks += [asyncio.create_task(ask(router, "two", anew(STREAM), x_slo_ttft_ms="50"))]
        answer = await tasks[2]
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, Overloaded.code)
        assert header_names.PREDICTED in answer.headers and "retry-after" in answer.headers
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_tokens_are_reserved_by_estimate_and_settled() -> None:
    rejects: Counter[str] = Counter()
    quotas = Quotas(rejects, lambda: 50.0)
    limits = TenantLimits(tokens_per_minute=1000)
    ask = PickRequest("m", chunk_text(b"x" * 400, 1), tenant="t", limits=limits)
    first = quotas.reserve(ask, 0.0)
    assert (first.prompt, first.answer) == (100, 50)
    short = quotas.reserve(PickRequest("m", ask.prompt, tenant="t", limits=limits, answer_tokens=5), 0.0)
    assert short.answer == 5
    first.settle(100, 745, 0.0)
    with pytest.raises(RateLimited):
        quotas.reserve(ask, 0.0)
    again = quotas.reserve(PickRequest("m", ask.prompt, tenant="t", limits=limits, retried=True), 0.0)
    assert quotas.open("t") == 2 and rejects == {"tokens": 1}
    again.cancel(0.0)
    short.cancel(0.0)
    assert quotas.open("t") == 0
