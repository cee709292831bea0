"""The exact sequence of a stream, and what becomes of errors before and in it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Message

from baton_api.errors import InternalError, Overloaded
from baton_engine.api.chat.endpoint import prepare
from baton_engine.api.exchange import open_exchange
from baton_engine.api.generate import Generate
from baton_engine.api.http import HttpServer
from baton_engine.api.messages.output import _usage as messages_usage
from baton_engine.api.responses.output import _usage as responses_usage
from baton_engine.api.streaming import HOLE, TextEvents, Usage, data_event
from tests.engine.api.api import LETTERS, MODEL, USER, Api, events, eventually, open_api
from tests.plain_http import PLAIN


async def test_stream_has_role_content_finish_and_done(api: Api) -> None:
    api.model.script = "abc"
    response = await api.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {"content": "c"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert not any("usage" in chunk for chunk in chunks)


SEPARATORS = "1\u20282\u20293\x854"
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": f"{SEPARATORS}<|assistant|>", "echo": True},
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 99},
    "/generate": {"text": "<|assistant|>", "sampling_params": {"max_new_tokens": 99}},
}


@pytest.mark.parametrize("path", STREAMS)
async def test_stream_events_are_lines_for_readers_that_split_at_unicode_separators(
    api: Api, path: str
) -> None:
    api.model.script = SEPARATORS
    body = {"model": MODEL, "stream": True} | STREAMS[path]
    async with api.http.stream("POST", path, json=body) as answer:
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
        assert answer.status_code == 200
    texts = json.dumps([json.loads(line.removeprefix("data: ")) for line in lines], ensure_ascii=False)
    assert all(separator in texts for separator in "\u2028\u2029\x85")


def test_text_events_are_those_that_are_encoded_whole() -> None:
    frame = TextEvents(data_event({"id": "a\0b", "choices": [{"content": HOLE, "n": 1}]}))
    for text in ("", "a", '"\\', "\0\n", SEPARATORS, "\U0001f600"):
        assert frame.event(text) == data_event({"id": "a\0b", "choices": [{"content": text, "n": 1}]})


USAGES: dict[str, Callable[[Usage], dict[str, Any]]] = {
    "chat and completions": lambda usage: Usage.body(usage)["prompt_tokens_details"],
    "responses": lambda usage: responses_usage(usage)["input_tokens_details"],
    "messages": messages_usage,
}


@pytest.mark.parametrize("api_name", USAGES)
def test_usage_splits_cached_tokens_by_source_in_all_apis(api_name: str) -> None:
    read = USAGES[api_name](Usage(100, 5, cached_tokens=48, peer_tokens=20, tier_tokens=[("memory", 8)]))
    assert read["cached_tokens_by_source"] == {"local": 20, "peer": 20, "memory": 8}
    assert "cached_tokens_by_source" not in USAGES[api_name](Usage(100, 5, cached_tokens=48))


async def test_usage_is_the_last_event_and_null_in_the_others(api: Api) -> None:
    whole = (await api.chat(temperature=0)).json()
    *chunks, last = events(
        (await api.chat(temperature=0, stream=True, stream_options={"include_usage": True})).text
    )
    assert last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    assert all(chunk["usage"] is None for chunk in chunks)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]


async def test_usage_can_run_along(api: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events((await api.chat(stream=True, stream_options=options, max_tokens=3)).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 1, 2, 3, 3, 3]


async def test_characters_arrive_whole(api: Api) -> None:
    api.model.script = "日本 🎉 ok"
    chunks = events((await api.chat(stream=True, max_tokens=50)).text)
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == "日本 🎉 ok"
    assert not any("\ufffd" in text for text in texts)


async def test_stream_character_cut_by_the_limit_is_kept(api: Api) -> None:
    api.model.script = "a🎉"
    whole = (await api.chat(max_tokens=3)).json()["choices"][0]["message"]["content"]
    chunks = events((await api.chat(max_tokens=3, stream=True)).text)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole
    assert whole.startswith("a")


async def test_logprobs_of_a_stream_are_those_of_the_answer(api: Api) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "temperature": 0}
    whole = (await api.chat(**fields)).json()["choices"][0]["logprobs"]["content"]
    chunks = events((await api.chat(**fields, stream=True)).text)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for part in parts if part for entry in part["content"]] == whole


async def test_choices_interleave_and_each_has_one_role_and_one_finish(api: Api) -> None:
    whole = (await api.chat(n=3, seed=9)).json()
    chunks = events((await api.chat(n=3, seed=9, stream=True)).text)
    for index in range(3):
        of_choice = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert ["role" in choice["delta"] for choice in of_choice].count(True) == 1
        assert of_choice[-1]["finish_reason"] == "length"
        text = "".join(choice["delta"].get("content", "") for choice in of_choice)
        assert text == whole["choices"][index]["message"]["content"]


async def test_stream_sdk_helper_assembles_the_answer(api: Api, sdk: openai.AsyncOpenAI) -> None:
    api.model.script = "Hello there."
    async with sdk.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}]
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].message.content == "Hello there."


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"temperature": 9}, 400),
        ({"model": "nope"}, 404),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400),
    ],
    ids=["range", "model", "context"],
)
async def test_stream_rejected_request_has_an_error_status(
    api: Api, body: dict[str, object], status: int
) -> None:
    response = await api.chat(stream=True, **body)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_stream_full_queue_is_a_503_with_retry_after(stream: bool, n: int) -> None:
    async with open_api(max_running=1, max_queued=1) as api:
        api.model.go.clear()
        running = [asyncio.create_task(api.chat())]
        await asyncio.to_thread(api.model.inside.wait)
        running.append(asyncio.create_task(api.chat()))
        await eventually(lambda: api.served.computing.snapshot().queued == 1)
        refused = await api.chat(stream=stream, n=n)
        api.model.go.set()
        assert [response.status_code for response in await asyncio.gather(*running)] == [200, 200]
        assert refused.status_code == 503
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        assert refused.json()["error"]["code"] == Overloaded.code


async def test_choices_that_find_no_room_refuse_the_whole_stream() -> None:
    async with open_api(max_running=1, max_queued=1) as api:
        refused = await api.chat(stream=True, n=4, max_tokens=64)
        assert refused.status_code == 503
        async with asyncio.timeout(60):
            await api.served.engine.idle()


async def test_stream_starts_only_after_all_choices_are_admitted() -> None:
    async with open_api(max_running=1, max_queued=3) as api:
        # The second prompt's last choice is the one too many, long after the first prompt's first token.
        api.model.stops_at = 202  # the first prompt's answer has ended, the second one's has begun
        refused = await api.complete(stream=True, n=3, prompt=["a", "b"], max_tokens=200)
        assert refused.status_code == 503


async def test_prompt_list_partly_admitted_is_aborted_with_a_503() -> None:
    async with open_api(max_running=1, max_queued=2) as api:
        api.model.go.clear()
        running = asyncio.create_task(api.chat())
        await asyncio.to_thread(api.model.inside.wait)
        refused = await api.complete(prompt=["a", "b", "c", "d"], max_tokens=400)
        assert refused.status_code == 503
        api.model.go.set()
        assert (await running).status_code == 200
        await eventually(lambda: api.served.computing.snapshot().totals.finished == {"abort": 2, "length": 1})
        api.assert_all_blocks_back()


async def test_stream_error_is_an_event_then_a_cut(api: Api, server: HttpServer) -> None:
    api.model.script = "abc"
    api.model.fail_on = LETTERS[1]
    body = {"model": MODEL, "messages": USER, "stream": True}
    received = b""
    async with httpx.AsyncClient(base_url=f"http://{server.address}", verify=PLAIN) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                assert response.status_code == 200
                async for part in response.aiter_raw():
                    received += part
    last = received.strip().split(b"\n\n")[-1]
    assert last.startswith(b'data: {"error":{"message":"Internal server error')
    assert b"[DONE]" not in received


async def test_stream_error_raises_in_the_sdk(api: Api, sdk: openai.AsyncOpenAI) -> None:
    api.model.script = "abc"
    api.model.fail_on = LETTERS[1]
    stream = await sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True
    )
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass


async def test_stream_error_before_first_token_is_a_plain_500(api: Api) -> None:
    api.model.script = "xyz"
    api.model.fail_on = LETTERS[0]
    messages = [{"role": "user", "content": "a"}]
    for stream in (False, True):
        response = await api.chat(stream=stream, messages=messages)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == InternalError.code
        assert "kernel" not in response.text
    assert (await api.chat()).status_code == 200, "others go on"


async def test_stream_silence_is_bridged_by_comments(api: Api) -> None:
    sent: list[Message] = []
    commented = asyncio.Event()

    api.model.stops_at = 2  # the model hangs after the first token

    async def send(message: Message) -> None:
        sent.append(message)
        if message.get("body", b"").startswith(b":"):
            commented.set()

    body = (
        b'{"model": "%s", "messages": [{"role": "user", "content": "Hi"}], "stream": true, "max_tokens": 50}'
    )
    incoming = [{"type": "http.request", "body": body % MODEL.encode(), "more_body": False}]

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()
        raise AssertionError

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "headers": [(b"content-type", b"application/json")],
    }
    open_exchange(scope, "r")
    endpoint = Generate(api.served, prepare, keep_alive_s=0.01)
    task = asyncio.create_task(endpoint(scope, receive, send))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60):
            await commented.wait()
    api.model.resume()
    await task
    assert commented.is_set()
    text = b"".join(message.get("body", b"") for message in sent).decode()
    assert len(events(text)) == 52
