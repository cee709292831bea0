"""Spans of real requests at a collector, and the trace headers for workers."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import tracemalloc
from typing import Any

import pytest

from baton_api import headers as header_names
from baton_api.headers import PROMPT
from baton_api.prompt_report import PromptReport
from baton_api.stream_comments import Beginning, begin_line, tokens_line
from baton_api.workers import Role
from baton_router.proxy.tracing import open_tracing
from baton_router.settings import RouterSettings
from tests.router.collector import Collector
from tests.router.fake_worker import (
    STREAM_END,
    FakeWorker,
    WorkerRequest,
    chunk,
    die_at_once,
    event,
    saying,
    whole_answer,
)
from tests.router.running import CHAT, QUESTION, STREAM, running_router, until

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
REPORT = PromptReport(
    tokens=270, cached=240, held=16, queue_s=0.002, compute_s=0.02, transfer_s=0.005, remote=True
)
CANARY = "the secret of the canary"


async def reported(worker: FakeWorker, request: WorkerRequest, writer: asyncio.StreamWriter) -> None:
    """A stream of three tokens with a report, whose first token comes after what that says it took."""
    await asyncio.sleep(0.04)
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{PROMPT}: {REPORT.encode()}\r\n"
    writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
    writer.write(chunk(begin_line(Beginning("chatcmpl-1", 1, 7, 0))))
    for token, word in enumerate(("The", " end", ".")):
        writer.write(chunk(event(word) + tokens_line([token], ended=False)))
        await asyncio.sleep(0.005)
    writer.write(chunk(event(None, "stop") + b"data: [DONE]\n\n") + STREAM_END)


async def dying(worker: FakeWorker, request: WorkerRequest, writer: asyncio.StreamWriter) -> None:
    """The same, but it dies after the second token."""
    if b"baton_resume" in request.body:
        await reported(worker, request, writer)
        return
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head + chunk(begin_line(Beginning("chatcmpl-1", 1, 7, 0))))
    writer.write(chunk(event("The") + tokens_line([0], ended=False)))
    await writer.drain()
    writer.transport.abort()


async def test_trace_shows_the_phases_of_a_request() -> None:
    asking = {**STREAM, "messages": [{"role": "user", "content": CANARY}]}
    async with (
        Collector() as collector,
        FakeWorker(reported) as worker,
        FakeWorker(role=Role.PREFILL, control="127.0.0.1:1") as prefill,
    ):
        settings: dict[str, Any] = {"tracing_endpoint": collector.url, "local_prefill_max_tokens": 0}
        async with running_router([worker], [prefill], **settings) as router:
            headers = {
                "traceparent": f"00-{TRACE}-{SPAN}-01",
                "tracestate": "a=1",
                header_names.REQUEST_ID: "r-1",
            }
            answer = await router.client.post(CHAT, json=asking, headers=headers)
            assert answer.status_code == 200
            assert answer.headers[header_names.CACHED] == "240"
            queue, prefilling, moving = answer.headers[header_names.TIMING].split(", ")
            assert moving.startswith("transfer;dur=")
            assert prefilling == "prefill;dur=20.0" and 2.0 <= float(queue.removeprefix("queue;dur=")) < 1000
    (route,) = collector.named("route")
    assert (route.trace, route.parent) == (TRACE, SPAN) and not route.failed
    first_request = worker.requests[0]
    assert first_request.header("traceparent") == f"00-{TRACE}-{route.span}-01"
    assert first_request.header("tracestate") == "a=1"
    assert [value for name, value in first_request.headers if name.startswith("trace")] == [
        first_request.header("traceparent"),
        first_request.header("tracestate"),
    ]
    children = [span for span in collector.spans if span is not route]
    assert sorted(span.name for span in children) == ["decode", "kv_transfer", "prefill", "queue"]
    assert {(span.trace, span.parent) for span in children} == {(TRACE, route.span)}
    assert all(route.start_s <= span.start_s <= span.end_s <= route.end_s for span in children)
    by_name = {span.name: span for span in children}
    assert by_name["prefill"].seconds == pytest.approx(0.02, abs=1e-5)
    assert by_name["kv_transfer"].seconds == pytest.approx(0.005, abs=1e-5)
    assert by_name["kv_transfer"].end_s == pytest.approx(by_name["decode"].start_s, abs=1e-5)
    assert by_name["decode"].end_s == pytest.approx(route.end_s, abs=0.01)
    assert by_name["decode"].attributes == {"baton.tokens.answer": 3}
    assert by_name["prefill"].attributes == {
        "baton.tokens.prompt": 270,
        "baton.tokens.cached": 240,
        "baton.worker": prefill.name,
        "baton.queue_s": 0.002,
    }
    about = dict(route.attributes)
    decision, costs = str(about.pop("baton.decision")), str(about.pop("baton.costs"))
    assert about == {
        "url.path": CHAT,
        "baton.request_id": "r-1",
        "http.response.status_code": 200,
        "baton.resumes": 0,
        "gen_ai.request.model": "tiny",
        "baton.tenant": "",
        "baton.class": "default",
        "baton.worker.decode": worker.name,
        "baton.worker.prefill": prefill.name,
    }
    assert f"computed_by={prefill.name};tokens=" in decision
    assert re.fullmatch(rf"{prefill.name}>{worker.name}=\d+\.\d{{6}} s", costs.partition(";")[0])
    assert CANARY.encode() not in collector.heard
    assert collector.paths == {"/v1/traces"}


async def test_retry_and_resume_are_events_of_the_trace() -> None:
    async with (
        Collector() as collector,
        FakeWorker(dying) as first,
        FakeWorker(dying) as second,
        running_router([first, second], tracing_endpoint=collector.url) as router,
    ):
        answer = await router.post(STREAM)
        assert ": resumed" in answer.text
        first.behaviour = second.behaviour = die_at_once
        assert (await router.post()).status_code == 500, "it has lost two workers"
        tracing = router.router.tracing
        assert tracing is not None
        await tracing.close()
    streamed, failed = collector.named("route")
    assert (streamed.attributes["baton.resumes"], streamed.failed) == (1, False)
    (continuation,) = collector.named("continuation")
    assert continuation.attributes["baton.tokens.before"] == 1
    assert {continuation.attributes["baton.worker.decode"], streamed.attributes["baton.worker.decode"]} == {
        continuation.attributes["baton.worker.decode"]
    }
    (decode,) = [span for span in collector.named("decode") if span.trace == streamed.trace]
    assert decode.end_s <= continuation.start_s + 1e-5 < continuation.end_s
    assert set(failed.events) == {"retry"} and failed.failed
    assert failed.attributes["http.response.status_code"] == 500


async def test_answer_without_tokens_has_no_decode_span() -> None:
    vectors = saying(200, b'{"object": "list"}', (PROMPT, REPORT.encode()))
    async with (
        Collector() as collector,
        FakeWorker(vectors) as worker,
        running_router([worker], tracing_endpoint=collector.url) as router,
    ):
        answer = await router.client.post("/v1/embeddings", json={"model": "tiny", "input": "Hi"})
        assert answer.status_code == 200
        tracing = router.router.tracing
        assert tracing is not None
        await tracing.close()
    assert sorted(span.name for span in collector.spans) == ["kv_transfer", "prefill", "queue", "route"]


@pytest.mark.parametrize(
    ("headers", "ratio", "traced"),
    [
        ({}, 1.0, True),
        ({}, 0.0, False),
        ({"traceparent": f"00-{TRACE}-{SPAN}-01"}, 0.0, True),
        ({"traceparent": f"00-{TRACE}-{SPAN}-00"}, 1.0, False),
        ({"traceparent": f"ff-{TRACE}-{SPAN}-01", "tracestate": "a=1"}, 0.0, False),
    ],
    ids=["all", "none", "the client wants it", "the client does not", "what is no parent says nothing"],
)
async def test_sampling_follows_the_client_then_the_ratio(
    headers: dict[str, str], ratio: float, traced: bool
) -> None:
    async with Collector() as collector, FakeWorker() as worker:
        settings: dict[str, Any] = {"tracing_endpoint": collector.url, "tracing_ratio": ratio}
        async with running_router([worker], **settings) as router:
            await router.client.post(CHAT, json=QUESTION, headers=headers)
    assert bool(collector.spans) is traced
    parent = worker.requests[0].header("traceparent") or ""
    assert parent.endswith("-01" if traced else "-00")
    assert (TRACE in parent) is headers.get("traceparent", "").startswith("00")
    assert worker.requests[0].header("tracestate") is None


async def test_tracing_off_creates_no_spans_and_passes_headers() -> None:
    assert open_tracing(RouterSettings()) is None
    sent = {"traceparent": "whatever it is", "tracestate": "a=1"}
    async with FakeWorker() as worker, running_router([worker]) as router:
        await router.client.post(CHAT, json=QUESTION, headers=sent)
        await router.client.post(CHAT, json=QUESTION)
    assert [worker.requests[0].header(name) for name in sent] == list(sent.values())
    assert worker.requests[1].header("traceparent") is None


async def test_unreachable_collector_costs_no_request() -> None:
    settings: dict[str, Any] = {"tracing_endpoint": "http://127.0.0.1:9"}
    async with FakeWorker() as worker, running_router([worker], **settings) as router:
        assert (await router.post()).status_code == 200


async def test_answer_without_a_report_has_no_prompt_spans() -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        answer = await router.post()
        assert header_names.CACHED not in answer.headers and header_names.TIMING not in answer.headers
        worker.behaviour = saying(200, whole_answer(), (PROMPT, REPORT.encode()))
        assert (await router.post()).headers[header_names.CACHED] == "240"
        worker.behaviour = saying(400, json.dumps({"error": {}}).encode())
        assert header_names.CACHED not in (await router.post()).headers


async def test_model_names_of_clients_are_not_stored() -> None:
    """A client may call a model anything: 20 names of a megabyte leave nothing, with or without tracing."""
    name = "m" * 1_000_000
    async with (
        Collector() as collector,
        FakeWorker() as worker,
        running_router([worker], tracing_endpoint=collector.url) as router,
    ):
        tracemalloc.start()
        try:
            for number in range(20):
                answer = await router.post({**QUESTION, "model": f"{name}{number}"})
                assert answer.status_code == 404
            await until(lambda: len(collector.named("route")) == 20)
            del answer
            gc.collect()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert kept < 4_000_000, f"{kept} bytes stay"
