"""The endpoint picker protocol, spoken to a real router as Envoy speaks it, with fake workers behind."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_api import headers, metrics, tickets
from baton_api.errors import Overloaded, Unauthorized
from baton_api.keys import API_KEY
from baton_api.prompt_report import PromptReport
from baton_api.workers import Role
from tests.router.engines.fake_sglang import FakeSglang, Sessions
from tests.router.engines.fake_vllm import FakeVllm
from tests.router.fake_worker import FakeWorker, event, whole_answer, whole_stream
from tests.router.running import QUESTION, STREAM, RunningRouter, anew, running_router, until

grpc = pytest.importorskip("grpc")
pytest.importorskip("envoy.service.ext_proc.v3.external_processor_pb2")

from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402

from tests.plain_http import PLAIN  # noqa: E402
from tests.router.fake_envoy import (  # noqa: E402
    MODES,
    FakeEnvoy,
    Rejected,
    RoutedHead,
    envoy,
)

BOTH = pytest.mark.parametrize(
    "mode", [MODES.FULL_DUPLEX_STREAMED, MODES.BUFFERED], ids=["full duplex", "buffered"]
)

REPORT = PromptReport(
    tokens=40, cached=32, held=0, queue_s=0.001, compute_s=0.02, transfer_s=0.003, remote=True
).encode()


@asynccontextmanager
async def picker(
    decode: list[FakeWorker],
    prefill: list[FakeWorker] | None = None,
    *,
    wait: bool = True,
    **settings: object,
) -> AsyncIterator[tuple[RunningRouter, FakeEnvoy]]:
    async with running_router(
        decode, prefill or [], wait=wait, gateway_port=0, gateway_certificate="none", **settings
    ) as running:
        assert running.router.endpoint_picker is not None
        async with envoy(running.router.endpoint_picker.port) as gateway:
            yield running, gateway


@asynccontextmanager
async def workers(count: int, **options: object) -> AsyncIterator[list[FakeWorker]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeWorker(**options)) for _ in range(count)]  # type: ignore[arg-type]


def routed(reply: RoutedHead | Rejected) -> RoutedHead:
    assert isinstance(reply, RoutedHead), reply
    return reply


def rejected(reply: RoutedHead | Rejected) -> Rejected:
    assert isinstance(reply, Rejected), reply
    return reply


def booked(running: RunningRouter) -> int:
    """Streams that are booked at workers."""
    states = running.router.scheduler.planner.worker_states
    return sum(states.of(worker).streams.count for worker in running.router.workers.decode)


@BOTH
async def test_request_gets_destination_and_serves(mode: int) -> None:
    async with (
        workers(2) as decode,
        picker(decode) as (running, gateway),
        httpx.AsyncClient(trust_env=False, verify=PLAIN) as client,
    ):
        stream = gateway.stream(mode)
        head = routed(await stream.request(STREAM))
        assert head.destination == head.metadata and head.clears_route
        assert head.destination in {worker.name for worker in decode}
        assert json.loads(head.body) == STREAM
        assert booked(running) == 1 and running.router.scheduler._granted
        assert await stream.forward(head, client) == whole_stream()
        await until(lambda: not booked(running))
        await stream.done()
        (latest,) = running.router.scheduler.planner.placements
        assert latest.complete and latest.answered == 8
        assert running.metric(metrics.ROUTER_REQUESTS.name, code="200", path="/v1/chat/completions") == 1


async def test_pair_is_named_in_headers_with_ticket() -> None:
    """The decode worker fetches the prompt from the prefill worker that the headers name."""
    async with (
        FakeWorker() as decode,
        FakeWorker(role=Role.PREFILL, control="10.0.0.9:7001") as prefill,
        picker([decode], [prefill], local_prefill_max_tokens=0, ticket_secret="s", worker_api_key="k") as (
            _,
            gateway,
        ),
    ):
        stream = gateway.stream()
        given = {headers.PREFILL: "evil:1", headers.SALT: "evil", "authorization": "Bearer client"}
        head = routed(
            await stream.request(
                QUESTION, headers={**given, headers.REQUEST_ID: "r-1", "accept-encoding": "br"}
            )
        )
        assert head.destination == decode.name
        assert head.headers[headers.PREFILL] == "10.0.0.9:7001"
        ticket = head.headers[headers.TICKET]
        assert ticket.startswith(tickets.issue(b"s", "r-1", "10.0.0.9:7001", 0)[:2])
        assert head.headers["authorization"] == "Bearer k" and head.headers[headers.REQUEST_ID] == "r-1"
        assert head.removed == ["accept-encoding", API_KEY.decode(), headers.SALT]


@BOTH
async def test_vllm_decode_worker_serves_alone_with_salt(mode: int, tmp_path: Path) -> None:
    """A vLLM pair needs the router, so its prefill worker is left out; the tenant's cache stays separate."""
    file = tmp_path / "tenants.yaml"
    digest = hashlib.sha256(b"sk-1").hexdigest()
    file.write_text(f"tenants: [{{name: acme, keys: ['sha256:{digest}']}}]")
    async with (
        FakeVllm() as prefill,
        FakeVllm() as decode,
        running_router(
            [decode],
            [prefill],
            gateway_port=0,
            gateway_certificate="none",
            local_prefill_max_tokens=0,
            tenants_file=str(file),
            ticket_secret="s",
        ) as running,
    ):
        assert running.router.endpoint_picker is not None
        async with envoy(running.router.endpoint_picker.port) as gateway:
            key = {"authorization": "Bearer sk-1"}
            stream = gateway.stream(mode)
            long = {**STREAM, "messages": [{"role": "user", "content": "word " * 30_000}]}
            head = routed(await stream.request(long, headers=key))
            assert head.destination == decode.name
            sent = json.loads(head.body)
            assert sent.pop("cache_salt") and sent == long
            assert headers.PREFILL not in head.headers and headers.SALT not in head.headers
            (placement,) = running.router.scheduler.planner.placements
            assert placement.pair.prefill is None
            await stream.done()
            theirs = {**STREAM, "kv_transfer_params": {"remote_engine_id": "other"}}
            refused = rejected(await gateway.stream(mode).request(theirs, headers=key))
            assert refused.status == 400 and refused.error["param"] == "kv_transfer_params"
        assert not booked(running)


async def test_client_key_stays_without_worker_key() -> None:
    async with FakeWorker() as decode, picker([decode], api_key="sk-1") as (_, gateway):
        head = routed(await gateway.stream().request(QUESTION, headers={"authorization": "Bearer sk-1"}))
        assert "authorization" in head.removed
        refused = rejected(await gateway.stream().request(QUESTION, headers={"authorization": "Bearer no"}))
        assert refused.status == 401 and refused.error["code"] == Unauthorized.code


async def test_prompt_is_learned_and_reported() -> None:
    """The second request with the same prompt goes to the worker that has it, though it is busier."""
    async with workers(3) as decode, picker(decode) as (running, gateway):
        long = {**QUESTION, "messages": [{"role": "user", "content": "word " * 4000}]}
        stream = gateway.stream()
        head = routed(await stream.request(long))
        seen = await stream.response_headers(
            200, {"content-type": "text/event-stream", headers.PROMPT: REPORT}
        )
        assert seen[headers.CACHED] == "32" and "prefill;dur=20.0" in seen[headers.TIMING]
        for _ in range(4):
            again = gateway.stream()
            assert routed(await again.request(long)).destination == head.destination
            again.cut()
        (first, *_) = running.router.scheduler.planner.placements
        assert first.report is not None and first.report.cached == 32


@pytest.mark.parametrize("form", ["list", "text", "address"])
async def test_subset_restricts_choice(form: str) -> None:
    async with workers(4) as decode, picker(decode) as (_, gateway):
        allowed = [decode[1].name, decode[3].name]
        subset = {"list": allowed, "text": ", ".join(allowed), "address": ["127.0.0.1"]}[form]
        chosen = set()
        for _ in range(24):
            stream = gateway.stream()
            chosen.add(routed(await stream.request(anew(QUESTION), subset=subset)).destination)
            stream.cut()
        assert chosen == (set(allowed) if form != "address" else {worker.name for worker in decode})


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:8000"], ""], ids=["empty", "foreign", "empty text"])
async def test_subset_without_ready_worker_gets_503(subset: object) -> None:
    async with FakeWorker() as decode, picker([decode]) as (running, gateway):
        refused = rejected(await gateway.stream().request(QUESTION, subset=subset))
        assert refused.status == 503 and "endpoints that the gateway allows" in refused.error["message"]
        assert not booked(running)


@BOTH
@pytest.mark.parametrize(
    ("body", "options", "status"),
    [
        (b'{"model": "tiny", "messages": [', {}, 400),
        ({**QUESTION, "model": "other"}, {}, 404),
        (QUESTION, {"path": "/flush_cache"}, 404),
        (QUESTION, {"path": "/v1/models"}, 404),
        (QUESTION, {"method": "PUT"}, 405),
        ({**QUESTION, "pad": "x" * 9000}, {}, 413),
        (b"", {}, 400),
        ({"model": "tiny", "input": "hi", "previous_response_id": "resp_1"}, {"path": "/v1/responses"}, 400),
    ],
    ids=["broken", "unknown model", "admin", "post", "put", "large", "empty", "stored"],
)
async def test_bad_request_is_rejected(mode: int, body: object, options: dict[str, str], status: int) -> None:
    async with FakeWorker() as decode, picker([decode], max_body=8192) as (running, gateway):
        stream = gateway.stream(mode)
        refused = rejected(await stream.request(body, **options))  # type: ignore[arg-type]
        assert refused.status == status
        assert refused.headers["content-type"] == "application/json" and refused.headers[headers.REQUEST_ID]
        await stream.done()
        assert not booked(running)


async def test_request_without_ready_worker_gets_503() -> None:
    async with picker([], wait=False) as (_, gateway):
        refused = rejected(await gateway.stream().request(QUESTION))
        assert refused.status == 503 and refused.headers["retry-after"]


async def test_sglang_pair_needs_the_router_on_the_way() -> None:
    """The gateway sends one request to one worker; both workers of a pair need the same one at once."""
    sessions = Sessions()
    settings: dict[str, Any] = {"gateway_port": 0, "gateway_certificate": "none"}
    async with (
        FakeSglang(sessions, mode="prefill") as prefill,
        FakeSglang(sessions, mode="decode") as decode,
        running_router([decode], [prefill], **settings) as running,
    ):
        assert running.router.endpoint_picker is not None
        async with envoy(running.router.endpoint_picker.port) as gateway:
            refused = rejected(await gateway.stream().request(QUESTION))
            assert refused.status == 503
            assert "only the router drives pairs of its engine" in refused.error["message"]
        assert (await running.post(QUESTION)).status_code == 200, "the router itself serves the pair"
        assert not prefill.violations and not decode.violations


async def test_sglang_worker_without_pair_gets_the_body_unchanged() -> None:
    settings: dict[str, Any] = {"gateway_port": 0, "gateway_certificate": "none"}
    async with FakeSglang() as worker, running_router([worker], **settings) as running:
        assert running.router.endpoint_picker is not None
        async with envoy(running.router.endpoint_picker.port) as gateway:
            stream = gateway.stream()
            head = routed(await stream.request(QUESTION))
            assert head.destination == worker.name and json.loads(head.body) == QUESTION
            await stream.done()
            refused = rejected(await gateway.stream().request({**QUESTION, "bootstrap_room": 7}))
            assert refused.status == 400 and refused.error["param"] == "bootstrap_room"


async def test_full_queue_gets_429() -> None:
    """The protocol drops requests under load with 429, where the router's own status is 503."""
    async with (
        FakeWorker() as decode,
        picker([decode], queue_requests=2, prefill_tokens=1) as (running, gateway),
    ):
        first, waiting, third = gateway.stream(), gateway.stream(), gateway.stream()
        routed(await first.request(anew(STREAM)))
        queued = asyncio.create_task(waiting.request(anew(STREAM)))
        await until(lambda: len(running.router.scheduler.queue))
        refused = rejected(await third.request(anew(STREAM)))
        assert refused.status == 429 and refused.error["code"] == Overloaded.code
        await first.response_headers(200, {"content-type": "text/event-stream"})
        assert routed(await queued).destination == decode.name


async def test_unfinished_bodies_have_a_limit() -> None:
    """They share the memory of client connections."""
    part = b"x" * 90_000
    async with (
        FakeWorker() as decode,
        picker([decode], max_body=100_000, connection_memory=200_000) as (running, gateway),
    ):
        memory, unfinished = running.router.memory, gateway.stream()
        await unfinished.begin()
        await unfinished.body(part, end=False)
        await until(lambda: memory.used == len(part))
        refused = rejected(await gateway.stream().request(part, pieces=1))
        assert refused.status == 429 and refused.error["code"] == Overloaded.code
        unfinished.cut()
        await until(lambda: not memory.used)
        routed(await gateway.stream().request({**QUESTION, "pad": "x" * len(part)}))


async def test_cut_while_queued_leaves_nothing() -> None:
    async with FakeWorker() as decode, picker([decode], prefill_tokens=1) as (running, gateway):
        first, waiting = gateway.stream(), gateway.stream()
        routed(await first.request(anew(STREAM)))
        queued = asyncio.create_task(waiting.request(anew(STREAM)))
        await until(lambda: len(running.router.scheduler.queue))
        waiting.cut()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await queued
        await until(lambda: not len(running.router.scheduler.queue))
        first.cut()
        await until(lambda: not booked(running) and not running.router.scheduler._granted)
        assert decode.requests == []


@BOTH
@pytest.mark.parametrize("point", ["routed", "begun", "half", "half-closed"])
async def test_cut_stream_releases_grant_incomplete(mode: int, point: str) -> None:
    async with FakeWorker() as decode, picker([decode]) as (running, gateway):
        stream = gateway.stream(mode)
        routed(await stream.request(STREAM))
        if point != "routed":
            await stream.response_headers(200, {"content-type": "text/event-stream"})
        if point.startswith("half"):
            assert await stream.response_body(event("The")) == event("The")
        if point == "half-closed":
            await stream.done()
        else:
            stream.cut()
        await until(lambda: not booked(running) and not running.router.scheduler._granted)
        (latest,) = running.router.scheduler.planner.placements
        assert latest.ended is not None and not latest.complete
        worker = running.router.workers.decode[0]
        assert worker.in_flight == 0


async def test_stream_without_end_event_is_incomplete() -> None:
    async with FakeWorker() as decode, picker([decode]) as (running, gateway):
        stream = gateway.stream()
        routed(await stream.request(STREAM))
        await stream.response_headers(200, {"content-type": "text/event-stream"})
        await stream.response_body(event("The"), end=True)
        await until(lambda: not booked(running))
        (latest,) = running.router.scheduler.planner.placements
        assert not latest.complete
        await stream.done()


async def test_usage_of_whole_answer_is_counted() -> None:
    async with FakeWorker() as decode, picker([decode]) as (running, gateway):
        stream = gateway.stream()
        routed(await stream.request(QUESTION, trailers=True))
        await stream.response_headers(200, {"content-type": "application/json", headers.PROMPT: REPORT})
        await stream.response_body(whole_answer())
        await stream.response_trailers()
        await stream.done()
        await until(lambda: running.metric(metrics.ROUTER_TENANT_TOKENS.name, kind="generated") == 7)
        assert running.metric(metrics.ROUTER_TENANT_TOKENS.name, kind="cached") == 32
        (latest,) = running.router.scheduler.planner.placements
        assert latest.complete and latest.answered == 7


async def test_failing_worker_is_ejected() -> None:
    """Statuses that the gateway reports count for the worker's health as those that the router sees."""
    async with workers(3) as decode, picker(decode) as (running, gateway):
        bad = decode[0].name
        for _ in range(5):
            stream = gateway.stream()
            routed(await stream.request(anew(QUESTION), subset=[bad]))
            await stream.response_headers(500, end=True)
            await stream.done()
        assert [one["state"] for one in (await running.client.get("/workers")).json()["data"]].count(
            "ejected"
        ) == 1


async def test_other_endpoint_served_teaches_nothing() -> None:
    async with workers(2) as decode, picker(decode) as (running, gateway):
        stream = gateway.stream()
        head = routed(await stream.request(QUESTION))
        other = next(worker.name for worker in decode if worker.name != head.destination)
        await stream.response_headers(200, {headers.PROMPT: REPORT}, served=other)
        await stream.response_body(whole_answer(), end=True)
        await stream.done()
        (latest,) = running.router.scheduler.planner.placements
        assert latest.report is None and not latest.complete and not booked(running)


async def test_router_answers_models_itself() -> None:
    async with FakeWorker() as decode, picker([decode]) as (_, gateway):
        stream = gateway.stream()
        reply = rejected(await stream.request(b"", "/v1/models", method="GET"))
        assert reply.status == 200 and json.loads(reply.body)["data"][0]["id"] == "tiny"
        await stream.done()


async def test_responses_request_keeps_no_state() -> None:
    async with FakeWorker() as decode, picker([decode]) as (_, gateway):
        head = routed(await gateway.stream().request({"model": "tiny", "input": "hi"}, "/v1/responses"))
        assert head.headers[headers.STATE] == "0"


async def test_unsupported_mode_is_refused_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeWorker() as decode, picker([decode]) as (_, gateway):
        stream = gateway.stream(MODES.STREAMED)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.request(QUESTION, pieces=0)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "STREAMED" in caught.value.details() and "FULL_DUPLEX_STREAMED" in caplog.text


async def test_health_follows_router_readiness() -> None:
    async with FakeWorker() as decode, picker([decode], health_interval_s=0.05) as (running, _):
        assert running.router.endpoint_picker is not None
        port = running.router.endpoint_picker.port
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)

            async def status(service: str) -> int:
                reply = await health.Check(health_pb2.HealthCheckRequest(service=service))
                return int(reply.status)

            service = "envoy.service.ext_proc.v3.ExternalProcessor"
            assert [await status(one) for one in ("", "liveness", "readiness", service)] == [1, 1, 1, 1]
            running.router.draining = True
            assert [await status(one) for one in ("", "liveness", "readiness", service)] == [2, 1, 2, 2]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await status("other")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
