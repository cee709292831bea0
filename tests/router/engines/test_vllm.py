"""The router in front of vLLM workers: pairs, failures, resumed streams, and what clients see."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import httpx
import pytest

from baton_api import metrics
from baton_api.errors import ModelNotFound
from baton_api.headers import CACHED, REQUEST_ID
from baton_api.prompt_report import Fallback
from baton_router.engines.engine_request import BUFFER_LIMIT
from tests.plain_http import PLAIN
from tests.router.engines.fake_engine import generate, render, text_of
from tests.router.engines.fake_vllm import FakeVllm
from tests.router.running import RunningRouter, running_router, until

MESSAGES = [{"role": "user", "content": "one two three four five six seven eight nine ten"}]
CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6}
COMPLETION = {"model": "tiny", "prompt": "one two three four five six seven", "max_tokens": 6}
PAIRS_ALWAYS: dict[str, Any] = {"local_prefill_max_tokens": 0}
"""Prompts of tests are short: without this the decode worker would compute them."""


def expected_text(body: dict[str, Any] = CHAT) -> str:
    return "".join(map(text_of, generate(render(body["messages"]), body["max_tokens"])))


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", text
    return [json.loads(line) for line in lines[:-1]]


def text_in(events: list[dict[str, Any]]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices
    )


async def streamed(router: RunningRouter, body: dict[str, Any], path: str = "/v1/chat/completions") -> str:
    response = await router.post({**body, "stream": True}, path)
    assert response.status_code == 200, response.text
    return response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_pair_generates_what_one_worker_would(path: str, stream: bool) -> None:
    blocks: dict[str, list[int]] = {}
    body = CHAT if path.endswith("chat/completions") else COMPLETION
    async with (
        FakeVllm(blocks) as prefill,
        FakeVllm(blocks) as decode,
        FakeVllm() as single,
        running_router([decode], [prefill], **PAIRS_ALWAYS) as router,
        httpx.AsyncClient(base_url=single.url, headers={REQUEST_ID: "same"}, verify=PLAIN) as direct,
    ):
        router.client.headers[REQUEST_ID] = "same"
        given = await router.post({**body, "stream": stream}, path)
        wanted = await direct.post(path, json={**body, "stream": stream})
        assert given.text == wanted.text
        assert (prefill.computed, decode.computed, decode.pulled) == (1, 0, 1)
        assert not prefill.violations and not decode.violations and not blocks
        assert given.headers[CACHED] == "3"


async def test_stream_usage_is_passed_only_if_requested() -> None:
    async with FakeVllm() as worker, running_router([worker]) as router:
        assert all("usage" not in event for event in events_of(await streamed(router, CHAT)))
        wanted = {**CHAT, "stream_options": {"include_usage": True}}
        last = events_of(await streamed(router, wanted))[-1]
        assert last["usage"]["completion_tokens"] == 6


async def test_token_ids_are_passed_only_if_requested() -> None:
    async with FakeVllm() as worker, running_router([worker]) as router:
        for requested in (False, True):
            events = events_of(await streamed(router, {**CHAT, "return_token_ids": requested}))
            ids = [choice.get("token_ids") for event in events for choice in event["choices"]]
            assert any(ids) is requested
            assert (events[0]["prompt_token_ids"] is not None) is requested


async def test_streamed_echo_begins_with_the_prompt() -> None:
    async with FakeVllm() as worker, running_router([worker]) as router:
        events = events_of(await streamed(router, {**COMPLETION, "echo": True}, "/v1/completions"))
        assert events[0]["choices"][0]["text"].startswith(str(COMPLETION["prompt"]))


@pytest.mark.parametrize("status", [500, 503, 429, 400])
async def test_failed_prefill_leaves_the_prompt_to_the_decode_worker(status: int) -> None:
    async with (
        FakeVllm() as prefill,
        FakeVllm() as decode,
        running_router([decode], [prefill], **PAIRS_ALWAYS) as router,
    ):
        prefill.prefill_status = status
        assert text_in(events_of(await streamed(router, CHAT))) == expected_text()
        assert (decode.computed, decode.pulled) == (1, 0)


async def test_failed_prefill_of_a_long_answer_counts() -> None:
    """An answer above `BUFFER_LIMIT` is forwarded before its usage has come."""
    async with (
        FakeVllm() as prefill,
        FakeVllm() as decode,
        running_router([decode], [prefill], **PAIRS_ALWAYS) as router,
    ):
        prefill.prefill_status = 500
        decode.fingerprint = "x" * (4 * BUFFER_LIMIT)
        answer = await router.post(CHAT)
        assert answer.status_code == 200 and len(answer.content) > BUFFER_LIMIT
        assert router.metric(metrics.ROUTER_DECISIONS.name, path="fallback", reason=Fallback.FAILED) == 1


async def test_failed_transfer_sends_the_request_to_another_worker() -> None:
    blocks: dict[str, list[int]] = {}
    async with (
        FakeVllm(blocks) as prefill,
        FakeVllm(blocks) as one,
        FakeVllm(blocks) as other,
        running_router([one, other], [prefill], **PAIRS_ALWAYS) as router,
    ):
        failing: list[FakeVllm] = []  # the worker that reads first, whichever the router chooses

        def fails(worker: FakeVllm) -> bool:
            failing.append(worker)
            return failing[0] is worker

        one.transfer_fails, other.transfer_fails = partial(fails, one), partial(fails, other)
        for number in range(4):
            body = {**CHAT, "messages": [{"role": "user", "content": f"question {number}"}]}
            assert text_in(events_of(await streamed(router, body))) == expected_text(body)
        assert failing[0] is not failing[1]


async def test_dead_prefill_worker_costs_no_request() -> None:
    async with (
        FakeVllm() as prefill,
        FakeVllm() as decode,
        running_router([decode], [prefill], **PAIRS_ALWAYS) as router,
    ):
        await prefill.die()
        for _ in range(3):
            assert text_in(events_of(await streamed(router, CHAT))) == expected_text()


async def test_prefill_without_connector_is_not_ready_and_says_why() -> None:
    async with (
        FakeVllm(connector=False) as prefill,
        FakeVllm() as decode,
        running_router([decode], [prefill], **PAIRS_ALWAYS) as router,
    ):
        (worker,) = router.router.workers.prefill
        assert "--kv-transfer-config" in worker.reason
        assert (await router.post(CHAT)).status_code == 200
        assert decode.computed == 1


async def test_workers_of_different_block_sizes_are_no_pair() -> None:
    async with (
        FakeVllm(block_size=4) as prefill,
        FakeVllm(block_size=8) as decode,
        running_router([decode], [prefill], **PAIRS_ALWAYS) as router,
    ):
        assert (await router.post(CHAT)).status_code == 200
        assert not prefill.bodies and decode.computed == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("way", ["killed", "engine error", "aborted"])
async def test_broken_stream_continues_at_another_worker(path: str, way: str) -> None:
    body = {**(CHAT if path.endswith("chat/completions") else COMPLETION), "max_tokens": 12}
    body["stream_options"] = {"include_usage": True}
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeVllm()) for _ in range(2)]
        single = await stack.enter_async_context(FakeVllm())
        errors = [] if way == "killed" else [5]
        for worker in workers:
            worker.aborts = way == "aborted"
            worker.gate_after = 5 if way == "killed" else None
            worker.errors = errors
        router = await stack.enter_async_context(running_router(workers))
        direct = await stack.enter_async_context(httpx.AsyncClient(base_url=single.url, verify=PLAIN))
        answering = asyncio.create_task(streamed(router, body, path))
        await until(lambda: any(worker.bodies for worker in workers))
        first = next(worker for worker in workers if worker.bodies)
        second = next(worker for worker in workers if worker is not first)
        second.gate_after = None
        if way == "killed":
            await first.at_gate.wait()
            await first.die()
        text = await answering
        events = events_of(text)
        wanted = events_of((await direct.post(path, json={**body, "stream": True})).text)
        assert text_in(events) == text_in(wanted)
        assert len({event["id"] for event in events}) == 1
        assert events[-1]["usage"] == wanted[-1]["usage"]
        assert ": resumed" in text
        assert second.computed == 1


@pytest.mark.parametrize(
    "constraint",
    [{"stop": ["x"]}, {"response_format": {"type": "json_object"}}, {"tool_choice": "required"}],
    ids=lambda one: next(iter(one)),
)
async def test_broken_stream_that_cannot_continue_ends_with_an_error(constraint: dict[str, Any]) -> None:
    async with FakeVllm() as one, FakeVllm() as other, running_router([one, other]) as router:
        for worker in (one, other):
            worker.errors = [3]
        text = await router_text(router, {**CHAT, **constraint})
        assert '"error"' in text and "[DONE]" not in text
        assert len(one.bodies) + len(other.bodies) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_answer_aborted_before_its_first_token_is_retried(path: str, stream: bool) -> None:
    body = CHAT if path.endswith("chat/completions") else COMPLETION
    async with FakeVllm() as one, FakeVllm() as other, running_router([one, other]) as router:
        one.errors = other.errors = [0]
        one.aborts = other.aborts = True
        if stream:
            events = events_of(await streamed(router, body, path))
            assert len(text_in(events).split()) == body["max_tokens"]
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        else:
            answer = (await router.client.post(path, json=body)).json()
            assert answer["choices"][0]["finish_reason"] == "length"
        assert len(one.bodies) == len(other.bodies) == 1


async def router_text(router: RunningRouter, body: dict[str, Any]) -> str:
    """A stream that is cut, as far as it came."""
    pieces: list[str] = []
    async with router.client.stream(
        "POST", "/v1/chat/completions", json={**body, "stream": True}
    ) as response:
        with pytest.raises(httpx.RemoteProtocolError):
            async for piece in response.aiter_text():
                pieces.append(piece)
    return "".join(pieces)


async def test_stream_finished_without_its_end_is_completed() -> None:
    async with FakeVllm() as worker, running_router([worker]) as router:
        worker.gate_after = 6
        answering = asyncio.create_task(streamed(router, {**CHAT, "stream_options": {"include_usage": True}}))
        await worker.at_gate.wait()
        await worker.die()
        events = events_of(await answering)
        assert text_in(events) == expected_text()
        assert events[-1]["usage"]["completion_tokens"] == 6


async def test_client_that_leaves_ends_the_worker_s_request() -> None:
    async with FakeVllm() as worker, running_router([worker]) as router:
        worker.gate_after = 2
        async with router.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}):
            await worker.at_gate.wait()
        await asyncio.wait_for(worker.left.wait(), 30)


async def test_errors_of_vllm_have_openai_s_shape() -> None:
    async with FakeVllm() as worker, running_router([worker]) as router:
        response = await router.post({**CHAT, "max_tokens": -3})
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert response.json()["error"]["code"] is None


async def test_client_cannot_set_transfer_parameters() -> None:
    async with FakeVllm() as worker, running_router([worker]) as router:
        response = await router.post({**CHAT, "kv_transfer_params": {"do_remote_prefill": True}})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "kv_transfer_params"
        assert not worker.bodies


async def test_adapter_is_served_by_the_worker_that_has_it() -> None:
    async with FakeVllm() as one, FakeVllm() as other:
        other.adapters = ["pirate"]
        async with running_router([one, other]) as router:
            for _ in range(3):
                assert (await router.post({**CHAT, "model": "pirate"})).status_code == 200
            assert len(other.bodies) == 3 and not one.bodies


async def test_adapter_is_served_by_the_pair_that_has_it() -> None:
    """Prefill and decode worker both compute with the adapter."""
    blocks: dict[str, list[int]] = {}
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeVllm(blocks)) for _ in range(4)]
        plain_prefill, plain_decode, prefill, decode = workers
        prefill.adapters = decode.adapters = ["pirate"]
        router = await stack.enter_async_context(
            running_router([plain_decode, decode], [plain_prefill, prefill], **PAIRS_ALWAYS)
        )
        for _ in range(3):
            assert (await router.post({**CHAT, "model": "pirate"})).status_code == 200
        assert len(prefill.bodies) == len(decode.bodies) == decode.pulled == 3
        assert not plain_prefill.bodies and not plain_decode.bodies
        assert not [one.violations for one in workers if one.violations]
        listed = (await router.client.get("/v1/models")).json()["data"]
        assert "pirate" in [one["id"] for one in listed]


async def test_adapter_of_the_decode_worker_only_is_computed_there() -> None:
    async with FakeVllm() as prefill, FakeVllm() as decode:
        decode.adapters = ["pirate"]
        async with running_router([decode], [prefill], **PAIRS_ALWAYS) as router:
            assert (await router.post({**CHAT, "model": "pirate"})).status_code == 200
            assert decode.computed == 1 and not prefill.violations


async def test_adapter_that_no_worker_has_is_not_found() -> None:
    """As an unknown model, in OpenAI's shape; once a worker has loaded it, it answers."""
    async with FakeVllm() as worker, running_router([worker]) as router:
        refused = await router.post({**CHAT, "model": "pirate"})
        assert refused.status_code == 404
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == (ModelNotFound.code, "invalid_request_error")
        assert "pirate" in error["message"] and not worker.bodies
        worker.adapters = ["pirate"]
        await until(lambda: router.router.workers.all[0].is_adapter("pirate"))
        assert (await router.post({**CHAT, "model": "pirate"})).status_code == 200


async def test_request_to_vllm_has_no_headers_of_baton() -> None:
    async with FakeVllm() as worker, running_router([worker]) as router:
        await streamed(router, CHAT)
        assert not [name for name in worker.headers[0] if name.startswith("x-baton")]
