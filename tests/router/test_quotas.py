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
from baton_api.stream_comments import AnswerUsage
from baton_router.cache.prompt_chunks import chunk_text
from baton_router.requests.picker import PickRequest, RequestCost
from baton_router.scheduling.quotas import Quotas
from baton_router.tenants.tenants import TenantLimits
from tests.router import fake_worker
from tests.router.fake_worker import FakeWorker
from tests.router.running import CHAT, QUESTION, STREAM, RunningRouter, anew, running_router, until

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
    assert first.tokens == 100 + 50
    short = quotas.reserve(
        PickRequest("m", ask.prompt, tenant="t", limits=limits, cost=RequestCost(answer_limit=5)), 0.0
    )
    assert short.tokens == 100 + 5
    first.settle(845, 0.0)
    with pytest.raises(RateLimited):
        quotas.reserve(ask, 0.0)
    again = quotas.reserve(PickRequest("m", ask.prompt, tenant="t", limits=limits, retried=True), 0.0)
    assert quotas.open("t") == 2 and rejects == {"tokens": 1}
    again.cancel(0.0)
    short.cancel(0.0)
    assert quotas.open("t") == 0


# --- What is counted ---

COUNTED = 20


def usage(tokens: int) -> bytes:
    return AnswerUsage(5, tokens).comment()


def generated(router: RunningRouter) -> float:
    name = metrics.ROUTER_TENANT_TOKENS.name
    return router.metric(name, tenant="small", kind="generated")


STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "one choice": (CHAT, STREAM),
    "several choices": (CHAT, {**STREAM, "n": 4}),
    "several prompts": ("/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "stream": True}),
    "generate": ("/generate", {"model": "tiny", "text": "a", "stream": True}),
    "response": ("/v1/responses", {"model": "tiny", "input": "a", "stream": True, "store": False}),
}


@pytest.mark.parametrize(("path", "body"), STREAMS.values(), ids=STREAMS.keys())
@pytest.mark.parametrize("left", [False, True], ids=["to the end", "left"])
async def test_tokens_of_every_stream_are_counted(
    path: str, body: dict[str, Any], left: bool, tmp_path: Path
) -> None:
    """The worker says in comments what it has generated; the client gets none of them."""
    settings = tenants(tmp_path, small={"tokens_per_minute": 100_000})
    end = b"data: [DONE]\n\n"
    if path == "/v1/responses":
        end = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'
    parts = [fake_worker.event("The") + usage(7), fake_worker.event(" capital") + usage(COUNTED)]
    behaviour = fake_worker.streaming(*parts, b"" if left else end, end=not left)
    key = {"authorization": "Bearer small"}
    async with FakeWorker(behaviour) as worker, running_router([worker], **settings) as router:
        seen = b""
        async with router.client.stream("POST", path, json=body, headers=key) as answer:
            async for piece in answer.aiter_raw():
                seen += piece
                if left and b" capital" in seen:
                    break
        await until(lambda: generated(router))
        assert worker.requests[0].header(header_names.RESUMABLE)
        assert b"capital" in seen and b"baton-usage" not in seen
        assert generated(router) == COUNTED


UNCOUNTED: dict[str, tuple[dict[str, Any], int]] = {
    "whole": ({**QUESTION, "max_tokens": 300}, 300),
    "whole choices": ({**QUESTION, "max_tokens": 30, "n": 4}, 120),
    "a stream without counts": ({**STREAM, "max_tokens": 30, "n": 4}, 120),
}


@pytest.mark.parametrize(("body", "most"), UNCOUNTED.values(), ids=UNCOUNTED.keys())
async def test_left_answer_without_a_count_costs_its_maximum(
    body: dict[str, Any], most: int, tmp_path: Path
) -> None:
    settings = tenants(tmp_path, small={"tokens_per_minute": most + 100})
    behaviour = fake_worker.gated if body.get("stream") else fake_worker.hang
    async with FakeWorker(behaviour) as worker, running_router([worker], **settings) as router:
        asking = asyncio.create_task(ask(router, "small", body))
        await worker.arrived.wait()
        if body.get("stream"):
            await until(lambda: router.metric(metrics.ROUTER_FIRST_BYTE.name + "_count"))
        asking.cancel()
        await until(lambda: generated(router))
        assert generated(router) == most
        # What is left of the bucket is not enough for a second one.
        assert (await ask(router, "small", {**body, "max_tokens": 1000})).status_code == 429


async def test_worker_that_is_lost_costs_its_client_nothing(tmp_path: Path) -> None:
    settings = tenants(tmp_path, small={"tokens_per_minute": 1000})
    async with FakeWorker(fake_worker.die_at_once) as worker, running_router([worker], **settings) as router:
        for _ in range(5):
            answer = await ask(router, "small", {**QUESTION, "max_tokens": 900})
            assert answer.status_code == 503
        assert not generated(router)


async def test_whole_answer_is_counted_by_the_header_of_its_worker(tmp_path: Path) -> None:
    """An answer that is too large to be held back has its usage far from its beginning."""
    settings = tenants(tmp_path, small={"tokens_per_minute": 100_000})
    body = b'{"choices": "' + b"x" * 600_000 + b'"}'
    said = (header_names.USAGE, AnswerUsage(5, COUNTED).encode().decode())
    behaviour = fake_worker.saying(200, body, said)
    async with FakeWorker(behaviour) as worker, running_router([worker], **settings) as router:
        answer = await ask(router, "small", {**QUESTION, "n": 4})
        assert answer.content == body and header_names.USAGE not in answer.headers
        await until(lambda: generated(router))
        assert generated(router) == COUNTED


async def test_large_answer_of_another_engine_is_counted_by_its_usage(tmp_path: Path) -> None:
    settings = tenants(tmp_path, small={"tokens_per_minute": 100_000})
    body = b'{"choices": "' + b"x" * 600_000 + b'", "usage": {"completion_tokens": 20}}'
    async with (
        FakeWorker(fake_worker.saying(200, body)) as worker,
        running_router([worker], **settings) as router,
    ):
        assert (await ask(router, "small")).content == body
        await until(lambda: generated(router))
        assert generated(router) == COUNTED


def test_open_choices_are_limited_and_more_go_alone() -> None:
    quotas = Quotas(Counter(), lambda: 50.0)
    limits = TenantLimits(streams=4)
    many, one = (
        PickRequest("m", chunk_text(b"x", 1), tenant="t", limits=limits, cost=RequestCost(choices=number))
        for number in (5, 1)
    )
    first = quotas.reserve(many, 0.0)
    for refused in (many, one):
        with pytest.raises(RateLimited):
            quotas.reserve(refused, 0.0)
    first.settle(0, 0.0)
    held = [quotas.reserve(one, 0.0) for _ in range(4)]
    assert quotas.open("t") == 4
    with pytest.raises(RateLimited):
        quotas.reserve(one, 0.0)
    held[0].settle(0, 0.0)
    with pytest.raises(RateLimited):
        quotas.reserve(many, 0.0)
    quotas.reserve(one, 0.0)


async def test_tokens_are_reserved_for_each_choice(tmp_path: Path) -> None:
    settings = tenants(tmp_path, small={"tokens_per_minute": 500})
    async with FakeWorker(fake_worker.gated) as worker, running_router([worker], **settings) as router:
        first = asyncio.create_task(ask(router, "small", {**STREAM, "max_tokens": 50, "n": 8}))
        await worker.arrived.wait()
        assert (await ask(router, "small", {**STREAM, "max_tokens": 50, "n": 3})).status_code == 429
        worker.release.set()
        assert (await first).status_code == 200
