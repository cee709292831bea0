"""A frontend beside the process that computes: the same answers, and what each sees of the other's end."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from baton_api import headers
from baton_api.errors import InvalidRequest, NotReady
from baton_api.messages import TokenChoice
from baton_api.sampling import SamplingParams
from baton_engine.adapters import AdapterRegistry
from baton_engine.frontends.engine_service import EngineService, RemoteSink, outcome
from baton_engine.frontends.messages import Outcome, Serving, Tokens
from baton_engine.frontends.remote_engine import GONE, EngineLink, RemoteEngine
from baton_engine.metrics.exposition import ApiMetrics
from baton_engine.requests import (
    FinishReason,
    LoadedAdapter,
    Output,
    PromptLogprobs,
    PromptTiming,
    RelayRecord,
    Request,
)
from baton_engine.tracing import StepSummary
from tests.engine.api.api import MODEL, Api, Event, events, eventually, joined, open_api

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": 8}),
    "stream": (CHAT, {"messages": MESSAGES, "max_tokens": 12, "stream": True}),
    "usage": (
        CHAT,
        {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3},
    ),
    "choices": (CHAT, {"messages": MESSAGES, "n": 3, "max_tokens": 5, "seed": 4}),
    "logprobs": (CHAT, {"messages": MESSAGES, "max_tokens": 4, "logprobs": True, "top_logprobs": 3}),
    "streamed choices": (CHAT, {"messages": MESSAGES, "n": 3, "max_tokens": 12, "seed": 4, "stream": True}),
    "streamed logprobs": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 24, "logprobs": True, "top_logprobs": 2, "stream": True},
    ),
    "streamed completions": (
        COMPLETION,
        {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 12, "seed": 1, "logprobs": 2, "stream": True},
    ),
    "prompts": (COMPLETION, {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 4, "seed": 1}),
    "echo": (COMPLETION, {"prompt": "abc", "echo": True, "logprobs": 2, "max_tokens": 3}),
    "no tokens": (COMPLETION, {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}),
    "stop": (COMPLETION, {"prompt": "ab", "stop": ["e", "t"], "max_tokens": 60}),
    "streamed stop": (
        COMPLETION,
        {"prompt": "ab", "stop": ["e", "tu"], "max_tokens": 60, "logprobs": 1, "stream": True},
    ),
    "constraint": (
        COMPLETION,
        {"prompt": "ab", "structured_outputs": {"regex": "(abc){3}"}, "max_tokens": 20},
    ),
    "bad constraint": (COMPLETION, {"prompt": "ab", "structured_outputs": {"regex": "(("}}),
    "too long": (COMPLETION, {"prompt": "ab" * 400}),
    "model": (COMPLETION, {"prompt": "ab", "model": "other"}),
    "field": (CHAT, {"messages": []}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5, "stream": True}),
    "sglang": ("/generate", {"text": "ab", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}),
    "streamed sglang": (
        "/generate",
        {
            "text": "ab",
            "sampling_params": {"max_new_tokens": 24, "temperature": 0, "n": 2},
            "return_logprob": True,
            "stream": True,
        },
    ),
    "another path": ("/tokenize", {"prompt": "ab"}),
    "responses": ("/v1/responses", {"input": "ab", "max_output_tokens": 16}),
}

CHANGING = re.compile(
    r'"(id|request_id|created|created_at|completed_at|item_id|e2e_latency)":("[^"]*"|[\d.e-]+)|(msg|resp|cmpl|chatcmpl)[-_][0-9a-f]+'
)
"""Parts of answers that are never the same twice."""


async def answers(api: Api) -> dict[str, tuple[int, list[Event]]]:
    got = {}
    for name, (path, body) in CASES.items():
        answer = await api.http.post(path, json={"model": MODEL, "temperature": 0} | body)
        text = CHANGING.sub(lambda part: f'"{part[1]}":0' if part[1] else "", answer.text)
        got[name] = answer.status_code, joined(text)
    return got


async def counts(api: Api) -> dict[str, str]:
    """The counters and numbers of observations of the API."""
    families = tuple(family.name for family in ApiMetrics().registry.collect())
    rows = [row.rpartition(" ") for row in (await api.http.get("/metrics")).text.splitlines()]
    counted = re.compile(r"_(total|count)(\{|$)")
    return {name: value for name, _, value in rows if name.startswith(families) and counted.search(name)}


async def test_frontend_answers_and_counts_as_one_process_does() -> None:
    async with open_api(split=False) as api:
        one, counted = await answers(api), await counts(api)
    async with open_api(split=True, joins=True) as api:
        two = await answers(api)
        await eventually(api.at_rest)
        api.assert_all_blocks_back()
        assert await counts(api) == counted
    assert two == one
    assert len(counted) > 4
    assert {status for status, _ in one.values()} == {200, 400, 404}


async def test_every_field_of_an_output_reaches_the_frontend() -> None:
    output = Output(
        "one",
        tokens=(TokenChoice(token=4, logprob=-0.5, top=[(4, -0.5), (7, -1.5)]),),
        finish=FinishReason.STOP,
        stop_id=4,
        cached_tokens=48,
        peer_tokens=16,
        tier_tokens=(("memory", 16), ("disk", 8)),
        tail=b"tail",
        fallback="unreachable",
        error=NotReady("The queue is full."),
        relay=RelayRecord(
            prefill_worker="prefill-0",
            prompt_tokens=64,
            computed_tokens=16,
            local_tokens=8,
            blocks=3,
            bytes=4096,
            transport="loopback",
            transfer_s=0.25,
            queue_s=0.5,
            compute_s=0.75,
        ),
        timing=PromptTiming(0.5, 0.25),
        prompt_output=PromptLogprobs(
            np.array([-0.5, -1.5], np.float32),
            np.array([1, 2], np.int64),
            np.array([[1], [2]], np.int64),
            np.array([[-0.5], [-1.5]], np.float32),
        ),
    )
    empty = Output("")
    names = Output.__struct_fields__
    same = [name for name in names if getattr(output, name) == getattr(empty, name)]
    assert not same, "give these fields a value"
    link = EngineLink()
    link.transport = Mock(asyncio.Transport)
    engine = RemoteEngine(link, 16)
    request = Request(id="one", prompt=(1, 2), sampling=SamplingParams(), step_summary=StepSummary())
    generation = engine.generate(request)
    encoded = msgspec.msgpack.encode(outcome(1, output))
    engine.receive(msgspec.msgpack.decode(encoded, type=Outcome))
    got = await anext(generation)
    assert str(got.error) == str(output.error) and type(got.error) is NotReady
    assert isinstance(got.prompt_output, PromptLogprobs) and isinstance(output.prompt_output, PromptLogprobs)
    for one in fields(PromptLogprobs):
        assert np.array_equal(getattr(got.prompt_output, one.name), getattr(output.prompt_output, one.name))
    replace = msgspec.structs.replace
    assert replace(got, error=None, prompt_output=None) == replace(output, error=None, prompt_output=None)


async def test_frontend_reads_tokens_that_have_come_meanwhile_as_one_output_before_an_error() -> None:
    link = EngineLink()
    link.transport = Mock(asyncio.Transport)
    engine = RemoteEngine(link, 16)
    generation = engine.generate(Request(id="one", prompt=(1, 2), sampling=SamplingParams()))
    engine.receive(Outcome(1, tokens=(TokenChoice(token=4),)))
    for token in (5, 6, 7):
        engine.receive(Tokens([1, 9], [token, 0]))  # 9 has ended
    engine.receive(outcome(1, Output("", finish=FinishReason.ERROR, error=NotReady("gone"))))
    read = [([choice.token for choice in output.tokens], output.error) async for output in generation]
    assert [tokens for tokens, _ in read] == [[4], [5, 6, 7], []]
    assert [str(error) for _, error in read] == ["None", "None", "gone"]


async def test_outputs_of_a_step_are_written_in_the_same_turn_of_the_event_loop() -> None:
    """In the next one, the engine's thread may hold the interpreter until it has launched a pass."""
    async with open_api(split=True) as api:
        service, engine = api.served.others, api.served.computing
        assert isinstance(service, EngineService)
        (connection,) = service.connections
        names = ("one", "two")
        requests = [Request(id=name, prompt=(1, 2), sampling=SamplingParams()) for name in names]
        sinks = [RemoteSink(connection, number, request) for number, request in enumerate(requests)]
        written = Mock(asyncio.Transport)
        written.is_closing.return_value = False
        transport, connection.transport = connection.transport, written
        for token in (4, 5):
            for sink in sinks:
                sink.append(Output(sink.request.id, (TokenChoice(token=token),)))
        for deliver in engine.delivered:
            deliver()
        connection.transport = transport
        (call,) = written.write.call_args_list
        assert bytes(call.args[0]).endswith(msgspec.msgpack.encode(Tokens([0, 1], [5, 5])))


async def test_frontend_serves_responses_whose_conversations_a_router_keeps() -> None:
    async with open_api(split=True) as api:
        body = {"model": MODEL, "input": "ab", "max_output_tokens": 16}
        routed = await api.http.post("/v1/responses", json=body, headers={headers.STATE: "0"})
        assert routed.status_code == 200 and not api.served.history
        stored = await api.http.post("/v1/responses", json=body)
        assert [exchange.path for exchange in api.served.history] == ["/v1/responses"]
        found = [(await api.http.get(f"/v1/responses/{answer.json()['id']}")) for answer in (routed, stored)]
        assert [answer.status_code for answer in found] == [404, 200]


async def test_frontend_rejects_choices_beyond_the_queue_before_the_answer_begins() -> None:
    async with open_api(split=True, max_queued=2, max_running=1) as api:
        body = {"prompt": "ab", "n": 9, "max_tokens": 9, "stream": True}
        answer = await api.complete(**body)
        assert answer.status_code == 503, answer.text
        await eventually(api.at_rest)


async def test_frontend_requests_are_aborted_by_name_and_listed() -> None:
    async with open_api(split=True) as api:
        api.model.stops_at = 9
        running = asyncio.create_task(api.complete(max_tokens=400, request_id="mine"))
        await eventually(lambda: not api.model.go.is_set())
        aborted = await api.http.post("/abort_request", json={"rid": "mine"})
        api.model.resume()
        assert aborted.json() == {"aborted": 1}
        assert (await running).status_code == 499
        await api.complete(max_tokens=2)
        await eventually(api.at_rest)
        listed = (await api.http.get("/debug/requests")).json()["data"]
        assert listed[0]["completion_tokens"] == 2
        assert await api.metric('baton_worker_requests_total{finish_reason="length"}') == 1


async def test_frontend_knows_adapters_once_they_are_loaded() -> None:
    registry = AdapterRegistry(lambda name, path: LoadedAdapter(name, path, "ab" * 32, 4, 7), 2)
    async with open_api(split=True, adapters=registry) as api:
        assert (await api.complete(model="pirate")).status_code == 404
        await api.http.post("/v1/load_lora_adapter", json={"lora_name": "pirate", "lora_path": "/x"})
        base, adapted = await api.complete(temperature=0), await api.complete(model="pirate", temperature=0)
        assert adapted.json()["model"] == "pirate"
        assert adapted.json()["choices"] != base.json()["choices"]
        await api.http.post("/v1/unload_lora_adapter", json={"lora_name": "pirate"})
        assert (await api.complete(model="pirate")).status_code == 404


async def test_frontend_that_begins_to_serve_learns_what_was_loaded_meanwhile() -> None:
    registry = AdapterRegistry(lambda name, path: LoadedAdapter(name, path, "ab" * 32, 4, 7), 2)
    async with open_api(split=True, adapters=registry) as api:
        await registry.load("pirate", "/x")
        assert (await api.complete(model="pirate")).status_code == 404
        service = api.served.others
        assert isinstance(service, EngineService)
        (connection,) = service.connections
        connection.on_frame(memoryview(msgspec.msgpack.encode(Serving())))
        await service.samples()  # frames keep their order, so the frontend has read the adapters
        assert (await api.complete(model="pirate")).status_code == 200


async def test_frontend_refuses_a_second_request_with_the_same_id() -> None:
    """And the first one keeps its outputs."""
    link = EngineLink()
    link.transport = Mock(asyncio.Transport)
    engine = RemoteEngine(link, 16)
    request = Request(id="one", prompt=(1, 2), sampling=SamplingParams())
    first = engine.generate(request)
    with pytest.raises(InvalidRequest, match="'one' is already being served"):
        engine.generate(Request(id="one", prompt=(3,), sampling=SamplingParams()))
    output = Output("one", tokens=(TokenChoice(token=4),), finish=FinishReason.LENGTH)
    engine.receive(outcome(1, output))
    assert [token.token for token in (await anext(first)).tokens] == [4]


async def test_frontend_that_ends_leaves_no_request_behind() -> None:
    async with open_api(split=True) as api:
        api.model.stops_at = 9
        running = asyncio.create_task(api.complete(max_tokens=400))
        await eventually(lambda: not api.model.go.is_set())
        service = api.served.others
        assert isinstance(service, EngineService)
        for connection in list(service.connections):
            connection.transport.abort()
        api.model.resume()
        await eventually(api.at_rest)
        api.assert_all_blocks_back()
        answer = await running
        assert (answer.status_code, GONE in answer.text) == (503, True)
        again = await api.complete(max_tokens=4)
        assert (again.status_code, GONE in again.text) == (503, True)


async def test_frontend_drains() -> None:
    async with open_api(split=True) as api:
        api.model.stops_at = 9
        running = asyncio.create_task(api.complete(max_tokens=40, stream=True))
        await eventually(lambda: not api.model.go.is_set())
        draining = asyncio.create_task(api.served.others.drain(60))
        await asyncio.sleep(0)
        api.model.resume()
        await draining
        assert running.done() or events((await running).text)
        assert (await api.complete()).status_code == 503
