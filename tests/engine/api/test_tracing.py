"""A worker's spans: made of the passes that the engine noted, of traces that are recorded and no others."""

from __future__ import annotations

import asyncio

from baton_engine.model.embedder import Embedder
from baton_engine.requests import Pooling
from baton_engine.tracing import tracing_of
from tests.engine.api.api import TOKENIZER, Api, open_api
from tests.router.collector import Collector, Span

TRACE, ROUTER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "heron"


async def traced(collector: Collector, sampled: bool, **body: object) -> list[Span]:
    """The spans of one completion of six tokens whose prompt takes several chunks."""
    tracing = tracing_of(collector.url, "decode-0")
    async with open_api(tracing=tracing, chunk_tokens=16) as api:
        given = {"traceparent": f"00-{TRACE}-{ROUTER}-{int(sampled):02d}"}
        answer = await ask(api, given, **body)
        assert answer == 200
    assert tracing is not None
    await tracing.close()
    return collector.spans


async def ask(api: Api, given: dict[str, str], **body: object) -> int:
    asking = {"model": api.served.name, "prompt": SECRET * 10, "max_tokens": 6, **body}
    response = await api.http.post("/v1/completions", json=asking, headers=given)
    return response.status_code


async def test_tracing_request_has_prefill_and_decode_spans() -> None:
    async with Collector() as collector:
        spans = {span.name: span for span in await traced(collector, True)}
        assert SECRET.encode() not in collector.heard
    worker = spans["worker"]
    assert (worker.trace, worker.parent) == (TRACE, ROUTER)
    assert worker.attributes["baton.worker"] == "decode-0"
    assert worker.attributes["baton.tokens.answer"] == 6 and not worker.failed
    parents = {name: span.parent for name, span in spans.items() if name != "worker"}
    prefill = spans["engine.prefill"]
    assert parents == {
        "engine.queue": worker.span,
        "engine.prefill": worker.span,
        "engine.first_chunk": prefill.span,
        "engine.decode": worker.span,
    }
    first, decode = spans["engine.first_chunk"], spans["engine.decode"]
    assert first.attributes["baton.passes"] == 1 < prefill.attributes["baton.passes"]  # type: ignore[operator]
    assert prefill.attributes["baton.tokens"] == worker.attributes["baton.tokens.prompt"]
    assert decode.attributes["baton.passes"] == 5, "the prompt's last pass draws the first token"
    assert (
        worker.start_s <= first.start_s == prefill.start_s <= decode.start_s <= decode.end_s <= worker.end_s
    )


async def test_tracing_each_choice_has_its_own_spans() -> None:
    async with Collector() as collector:
        spans = await traced(collector, True, n=3, temperature=1.0)
    assert [span.name for span in spans].count("engine.decode") == 3
    assert [span.name for span in spans].count("worker") == 1


async def test_vectors_have_a_span_for_each_text() -> None:
    async with Collector() as collector:
        tracing = tracing_of(collector.url, "worker-0")
        embedder = Embedder(pooling=Pooling.MEAN)
        async with open_api(tracing=tracing, embedder=embedder, hidden=TOKENIZER.vocab_size) as api:
            given = {"traceparent": f"00-{TRACE}-{ROUTER}-01"}
            asking = {"model": api.served.name, "input": [SECRET, SECRET * 2]}
            assert (await api.http.post("/v1/embeddings", json=asking, headers=given)).status_code == 200
        assert tracing is not None
        await tracing.close()
        assert SECRET.encode() not in collector.heard
    (worker,) = collector.named("worker")
    assert (worker.trace, worker.parent) == (TRACE, ROUTER)
    assert worker.attributes["url.path"] == "/v1/embeddings"
    assert worker.attributes["baton.tokens.answer"] == 0 < worker.attributes["baton.tokens.prompt"]  # type: ignore[operator]
    prefills = collector.named("engine.prefill")
    assert len(prefills) == 2 and {span.parent for span in prefills} == {worker.span}
    assert not collector.named("engine.decode")


async def test_tracing_unsampled_request_sends_nothing() -> None:
    async with Collector() as collector:
        assert not await traced(collector, False)
        tracing = tracing_of(collector.url, "decode-0")
        assert tracing is not None
        async with open_api(tracing=tracing) as api:
            assert await ask(api, {}) == 200
        await tracing.close()
        await asyncio.sleep(0)
        assert not collector.heard
    assert tracing_of("", "decode-0") is None
