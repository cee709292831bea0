"""`POST /v1/responses` as OpenAI's SDK uses it."""

from __future__ import annotations

import random
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseOutputMessage, ResponseOutputText

from baton_api.errors import CONTEXT_LENGTH_EXCEEDED, InternalError, ModelNotFound
from baton_engine.api.http import HttpServer
from baton_engine.api.responses.request import OWN
from tests.engine.api.api import CONTEXT, LETTERS, MODEL, Api
from tests.engine.api.responses.typed import kinds, typed_events, whole_response
from tests.plain_http import PLAIN

NAMES = (
    "id", "object", "created_at", "status", "error", "incomplete_details", "instructions", "model", "output",
    "parallel_tool_calls", "tools", "tool_choice", "temperature", "top_p", "metadata", "usage",
)  # fmt: skip
"""Fields of every response object."""

BROKEN = {"model": MODEL, "input": "Hi", "stream": True}


async def respond(api: Api, **body: Any) -> httpx.Response:
    return await api.http.post(
        "/v1/responses", json={"model": MODEL, "input": "Hi", "max_output_tokens": 8} | body
    )


async def test_response_has_every_field_of_openai(api: Api) -> None:
    api.model.script = "Hello"
    answer = await respond(api, max_output_tokens=16)
    assert answer.status_code == 200
    body = answer.json()
    assert not [name for name in NAMES if name not in body]
    response = whole_response(body)
    assert response.id.startswith("resp_")
    assert (response.object, response.status, response.model) == ("response", "completed", MODEL)
    assert response.output_text == "Hello"
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert message.id.startswith("msg_")
    assert (message.role, message.status) == ("assistant", "completed")
    assert response.usage is not None
    assert response.usage.output_tokens == 6  # the end is one
    assert response.usage.total_tokens == response.usage.input_tokens + 6
    assert response.usage.input_tokens_details.cached_tokens == 0
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert (response.error, response.incomplete_details, response.previous_response_id) == (None, None, None)


async def test_response_repeated_prompt_is_cached(api: Api) -> None:
    api.model.script = "Hello"
    first, second = [(await respond(api, input="x" * 40)).json()["usage"] for _ in range(2)]
    assert first["input_tokens_details"]["cached_tokens"] == 0
    assert second["input_tokens_details"]["cached_tokens"] >= 36
    assert first["input_tokens"] == second["input_tokens"]


async def test_response_prompt_equals_the_chat_prompt(api: Api) -> None:
    chat = await api.chat(
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        temperature=0,
    )
    response = await respond(api, instructions="Be brief.", temperature=0)
    assert response.json()["usage"]["input_tokens"] == chat.json()["usage"]["prompt_tokens"]
    assert whole_response(response.json()).output_text == chat.json()["choices"][0]["message"]["content"]


async def test_response_cut_by_limit_is_incomplete(api: Api) -> None:
    response = whole_response((await respond(api, max_output_tokens=3)).json())
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == len(response.output_text) == 3
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert message.status == "incomplete"


async def test_response_empty_answer_is_an_empty_message(api: Api) -> None:
    api.model.script = ""
    response = whole_response((await respond(api)).json())
    assert (response.status, response.output_text, len(response.output)) == ("completed", "", 1)


async def test_response_object_repeats_the_request(api: Api) -> None:
    given = {
        "instructions": "Be brief.",
        "max_output_tokens": 5,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "top_p": 0.25,
        "truncation": "auto",
        "user": "me",
        "prompt_cache_key": "key",
        "safety_identifier": "safe",
        "store": False,
    }
    body = (
        await respond(api, **given, reasoning={"effort": "low", "summary": "auto"}, text={"verbosity": "low"})
    ).json()
    assert {name: body[name] for name in given} == given
    assert body["reasoning"] == {"effort": "low", "summary": "auto"}
    assert body["text"] == {"format": {"type": "text"}, "verbosity": "low"}


async def test_null_is_the_same_as_absent(api: Api) -> None:
    names = (
        "background", "conversation", "include", "instructions", "max_output_tokens", "max_tool_calls",
        "metadata", "parallel_tool_calls", "previous_response_id", "prompt", "prompt_cache_key", "reasoning",
        "safety_identifier", "service_tier", "store", "stream", "stream_options", "temperature", "text",
        "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user",
    )  # fmt: skip
    api.model.script = "Hello"
    answer = await respond(api, **dict.fromkeys(names))
    assert answer.status_code == 200
    assert answer.json()["store"] is True


async def test_response_stream_equals_whole_in_openais_order(api: Api) -> None:
    body = {"temperature": 0, "store": False}
    whole = whole_response((await respond(api, **body)).json())
    answer = await respond(api, **body, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = typed_events(answer.text)
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    deltas = [event["delta"] for event in events if event["type"].endswith("delta")]
    assert "".join(deltas) == whole.output_text
    first, last = events[0]["response"], whole_response(events[-1]["response"])
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert first["id"] == last.id
    assert last.output_text == whole.output_text
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert "[DONE]" not in answer.text


async def test_response_sdk_creates_and_streams(api: Api, sdk: openai.AsyncOpenAI) -> None:
    api.model.script = "日本 🎉"
    whole = await sdk.responses.create(model=MODEL, input="Hi")
    assert whole.output_text == "日本 🎉"
    async with sdk.responses.stream(model=MODEL, input="Hi") as stream:
        snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert snapshots[-1] == final.output_text == "日本 🎉"
    assert not any("\ufffd" in text for text in snapshots)


async def test_logprobs_are_those_of_the_words(api: Api) -> None:
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0}
    whole = whole_response((await respond(api, **wanted)).json())
    (message,) = whole.output
    assert isinstance(message, ResponseOutputMessage)
    (text,) = message.content
    assert isinstance(text, ResponseOutputText)
    assert text.logprobs is not None
    assert "".join(bytes(entry.bytes).decode() for entry in text.logprobs) == text.text
    assert all(len(entry.top_logprobs) == 2 for entry in text.logprobs)
    events = typed_events((await respond(api, **wanted, stream=True)).text)
    joined = [entry for event in events if event["type"].endswith("delta") for entry in event["logprobs"]]
    assert joined == events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in joined] == [entry.token for entry in text.logprobs]


async def test_response_logprobs_omit_the_end_token(api: Api) -> None:
    api.model.script = "Hello"
    body = (await respond(api, include=["message.output_text.logprobs"])).json()
    (content,) = body["output"][0]["content"]
    assert "".join(entry["token"] for entry in content["logprobs"]) == "Hello"


async def test_extensions_of_chat_pass(api: Api) -> None:
    biased = {"logit_bias": {str(LETTERS[2]): 100}, "temperature": 0}
    assert whole_response((await respond(api, **biased)).json()).output_text == "c" * 8
    assert whole_response((await respond(api, **biased, stop=["cc"])).json()).output_text == ""
    api.model.script = "Hello"
    assert (await respond(api, ignore_eos=True)).json()["usage"]["output_tokens"] == 8


async def test_response_truncation_auto_cuts_a_long_conversation(api: Api) -> None:
    api.model.script = "Hello"
    talk = [{"role": "user" if turn % 2 == 0 else "assistant", "content": "x" * 50} for turn in range(21)]
    refused = await respond(api, input=talk)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == CONTEXT_LENGTH_EXCEEDED
    assert refused.json()["error"]["param"] == "input"
    response = whole_response(
        (await respond(api, input=talk, instructions="y" * 20, truncation="auto")).json()
    )
    assert response.output_text == "Hello"
    assert response.usage is not None
    turn = 2 * 50 + 4
    assert CONTEXT - turn < response.usage.input_tokens <= CONTEXT - 8
    assert (response.usage.input_tokens - 1 - 22 - 52) % turn == 0  # whole turns, and the instructions
    last = "z" * (CONTEXT + 1)
    hopeless = await respond(api, input=[*talk, {"role": "user", "content": last}], truncation="auto")
    assert hopeless.json()["error"]["code"] == CONTEXT_LENGTH_EXCEEDED


REFUSED: dict[str, tuple[dict[str, Any], str | None]] = {
    "no input": ({"input": None}, "input"),
    "an input of nothing": ({"input": []}, "input"),
    "a number as input": ({"input": 7}, "input"),
    "too hot": ({"temperature": 3}, "temperature"),
    "no tokens": ({"max_output_tokens": 0}, "max_output_tokens"),
    "tokens as text": ({"max_output_tokens": "7"}, "max_output_tokens"),
    "too many tokens": ({"max_output_tokens": CONTEXT + 1}, "max_output_tokens"),
    "in the background": ({"background": True}, "background"),
    "a conversation": ({"conversation": "conv_1"}, "conversation"),
    "a prompt template": ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    "a tool that OpenAI defines": ({"tools": [{"type": "computer_use_preview"}]}, "tools"),
    "a tool that is no object": ({"tools": ["f"]}, "tools[0]"),
    "a tool without a name": ({"tools": [{"type": "function"}]}, "tools[0].name"),
    "a strange choice": ({"tool_choice": "maybe"}, "tool_choice"),
    "the choice of a built-in tool": ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    "a strange format": ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    "a schema without a name": (
        {"text": {"format": {"type": "json_schema", "schema": {}}}},
        "text.format.name",
    ),
    "a schema without itself": (
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        "text.format.schema",
    ),
    "a strange verbosity": ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    "a strange effort": ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    "a strange inclusion": ({"include": ["everything"]}, "include[0]"),
    "too many logprobs": ({"top_logprobs": 21}, "top_logprobs"),
    "a strange truncation": ({"truncation": "maybe"}, "truncation"),
    "chat's messages": ({"messages": []}, "messages"),
    "chat's limit": ({"max_tokens": 5}, "max_tokens"),
    "chat's format": ({"response_format": {"type": "text"}}, "response_format"),
    "two answers": ({"n": 2}, "n"),
    "too much metadata": ({"metadata": {str(key): "" for key in range(17)}}, "metadata"),
    "a previous response of no type": ({"previous_response_id": 7}, "previous_response_id"),
    "a wrong item": ({"input": [{"role": "wizard", "content": ""}]}, "input[0].role"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("body", "param"), REFUSED.values(), ids=REFUSED.keys())
async def test_response_invalid_field_is_named(
    api: Api, body: dict[str, Any], param: str | None, stream: bool
) -> None:
    answer = await respond(api, **body, stream=stream)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}
    assert "max_completion_tokens" not in error["message"]


async def test_stream_options_want_a_stream(api: Api) -> None:
    options = {"include_obfuscation": False}
    assert (await respond(api, stream_options=options)).json()["error"]["param"] == "stream_options"
    assert (await respond(api, stream_options=options, stream=True)).status_code == 200


VALUES: tuple[Any, ...] = (
    0, -1, 1.5, True, "", "x", [], ["x"], [[]], [{}], {}, {"x": "y"}, {"type": "x"}, {"type": 7},
    {"type": "function"}, {"type": "function", "name": "f"}, {"role": "assistant", "content": ""},
    {"type": "json_schema", "name": "x", "schema": 7},
    {"type": "custom", "name": "f", "format": {"type": "grammar"}},
    {"type": "allowed_tools", "tools": [{"type": []}]}, {"type": "message", "role": "user", "content": [{}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}, {"format": {"type": []}},
    {"type": "function_call_output", "call_id": "c", "output": ""}, {"type": "reasoning", "content": 7},
    {"effort": [], "summary": {}}, {"verbosity": 7}, "auto", "required",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_a_body_says_the_answer_is_one_or_a_refusal(api: Api, seed: int) -> None:
    rng = random.Random(seed)
    names = [*sorted(OWN), "stream", "parallel_tool_calls", "metadata", "temperature", "top_p", "user"]
    for _ in range(60):
        body = {name: rng.choice(VALUES) for name in rng.sample(names, rng.randrange(1, 4))}
        if rng.random() < 0.5:
            body["input"] = [rng.choice(VALUES) for _ in range(rng.randrange(1, 4))]
        answer = await respond(api, **body)
        assert answer.status_code in (200, 400), body
        if answer.status_code == 200 and not body.get("stream"):
            id = whole_response(answer.json()).id
            assert (await api.http.get(f"/v1/responses/{id}/input_items")).status_code in (200, 404)


async def test_response_unknown_model_is_a_404(api: Api) -> None:
    answer = await respond(api, model="nope")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, ModelNotFound.code)


async def test_response_stream_failure_sends_failed_and_cuts(api: Api, server: HttpServer) -> None:
    api.model.script = "abc"
    api.model.fail_on = LETTERS[1]
    received = b""
    async with httpx.AsyncClient(base_url=f"http://{server.address}", verify=PLAIN) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            async with client.stream("POST", "/v1/responses", json=BROKEN) as answer:
                async for part in answer.aiter_raw():
                    received += part
    last = typed_events(received)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": InternalError().message}


async def test_response_stream_failure_raises_in_the_sdk(api: Api, sdk: openai.AsyncOpenAI) -> None:
    api.model.script = "abc"
    api.model.fail_on = LETTERS[1]
    seen = []
    with pytest.raises(openai.APIError):
        async for event in await sdk.responses.create(model=MODEL, input="Hi", stream=True):
            seen.append(event.type)
    assert seen[-1] == "response.failed"


async def test_response_stream_abort_sends_failed_and_ends_cleanly(api: Api, server: HttpServer) -> None:
    body = BROKEN | {"ignore_eos": True, "rid": "mine"}
    async with (
        httpx.AsyncClient(base_url=f"http://{server.address}", verify=PLAIN) as client,
        client.stream("POST", "/v1/responses", json=body) as answer,
    ):
        parts = answer.aiter_text()
        text = await anext(parts)
        assert (await client.post("/abort_request", json={"rid": "mine"})).json()["aborted"] == 1
        text += "".join([part async for part in parts])
    last = typed_events(text)[-1]
    assert last["type"] == "response.failed"
    assert "[DONE]" not in text
    assert (await api.http.get(f"/v1/responses/{last['response']['id']}")).status_code == 404
