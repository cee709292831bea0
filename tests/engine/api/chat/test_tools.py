"""Calls over HTTP: whole and streamed, free and forced, after thoughts, and sent back with their results."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from baton_engine.settings import WorkerSettings
from tests.engine.api.api import MODEL, TOKENIZER, USER, Api, events, make_tokenizer, open_api
from tests.engine.api.test_validation import assert_error

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "time"}}
SHELL = {"type": "custom", "custom": {"name": "shell"}}
ARGUMENTS = '{"city": "Oslo"}'


def written(name: str = "weather", arguments: str = ARGUMENTS) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with open_api(settings=WorkerSettings(reasoning_parser="qwen3")) as api:
        api.model.script = written()
        yield api


async def chat(api: Api, tools: list[Any] | None = None, **body: Any) -> httpx.Response:
    return await api.chat(max_tokens=250, tools=[WEATHER, TIME] if tools is None else tools, **body)


async def streamed(api: Api, **body: Any) -> list[dict[str, Any]]:
    return [chunk["choices"][0] for chunk in events((await chat(api, stream=True, **body)).text)]


def put_together(choices: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the calls of a stream, added up as the SDK does: repeated text is kept twice."""
    calls: dict[int, dict[str, Any]] = {}
    for choice in choices:
        for delta in choice["delta"].get("tool_calls", ()):
            call = calls.setdefault(delta["index"], {"id": "", "type": "", "name": "", "arguments": ""})
            call["id"] += delta.get("id") or ""
            call["type"] += delta.get("type") or ""
            for name, text in delta["function"].items():
                call[name] += text
    return calls


async def test_tools_call_replaces_the_content(api: Api) -> None:
    body = (await chat(api)).json()
    (choice,) = body["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert call == {
        "id": call["id"],
        "type": "function",
        "function": {"name": "weather", "arguments": ARGUMENTS},
    }
    assert call["id"].startswith("call_")
    assert body["usage"]["completion_tokens"] == len(TOKENIZER.encode(written())) + 1


async def test_tools_streamed_call_has_id_and_name_once(api: Api) -> None:
    opening, *rest, end = await streamed(api)
    assert opening["delta"] == {"role": "assistant", "content": None}
    assert (end["delta"], end["finish_reason"]) == ({}, "tool_calls")
    first = rest[0]["delta"]["tool_calls"][0]
    assert first == {
        "index": 0,
        "id": first["id"],
        "type": "function",
        "function": {"name": "weather", "arguments": ""},
    }
    assert len(rest) > 5
    assert all(set(choice["delta"]) == {"tool_calls"} for choice in rest)
    (call,) = put_together([opening, *rest, end]).values()
    assert (call["type"], call["name"], call["arguments"]) == ("function", "weather", ARGUMENTS)
    assert call["id"] == first["id"]


async def test_words_thoughts_and_several_calls_keep_their_order(api: Api) -> None:
    api.model.script = f"<think>Two?</think>\n\nI look.\n{written()}\n{written('time', '{}')}"
    message = (await chat(api)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Two?", "I look.")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "time"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    choices = await streamed(api)
    kinds = [next(iter(choice["delta"]), "") for choice in choices[1:-1]]
    assert sorted(set(kinds), key=kinds.index) == ["reasoning_content", "content", "tool_calls"]
    assert kinds == sorted(kinds, key=["reasoning_content", "content", "tool_calls"].index)
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "I look."
    assert [call["name"] for call in put_together(choices).values()] == ["weather", "time"]


async def test_words_alone_are_an_ordinary_answer(api: Api) -> None:
    api.model.script = "It is cold."
    body = (await chat(api)).json()["choices"][0]
    assert body["finish_reason"] == "stop" and "tool_calls" not in body["message"]
    choices = await streamed(api)
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "It is cold."
    assert choices[-1]["finish_reason"] == "stop"


async def test_without_parallel_calls_there_is_one_at_most(api: Api) -> None:
    api.model.script = f"{written()}\n{written('time', '{}')}"
    body = (await chat(api, parallel_tool_calls=False)).json()
    assert [call["function"]["name"] for call in body["choices"][0]["message"]["tool_calls"]] == ["weather"]


async def test_tools_choice_none_gives_text(api: Api) -> None:
    body = (await chat(api, tool_choice="none")).json()["choices"][0]
    assert (body["message"]["content"], body["finish_reason"]) == (written(), "stop")


async def test_tools_call_cut_by_limit_leaves_no_markup_in_the_content(api: Api) -> None:
    api.model.script = written()
    for limit in range(1, len(written())):
        answer = await api.chat(tools=[WEATHER], max_tokens=limit)
        choice = answer.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")


async def test_tools_call_cut_by_limit_keeps_its_arguments(api: Api) -> None:
    body = (await api.chat(max_tokens=58, tools=[WEATHER])).json()["choices"][0]
    assert body["finish_reason"] == "length"
    arguments = body["message"]["tool_calls"][0]["function"]["arguments"]
    assert arguments and ARGUMENTS.startswith(arguments) and arguments != ARGUMENTS


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "time"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ],
    ids=["required", "named"],
)
@pytest.mark.parametrize("seed", range(3))
async def test_tools_required_choice_forces_a_call(choice: Any, names: set[str], seed: int) -> None:
    async with open_api() as api:  # its model writes random letters
        response = await chat(api, tool_choice=choice, seed=seed, parallel_tool_calls=False)
    body = response.json()["choices"][0]
    assert body["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    assert body["message"]["content"] is None
    for call in body["message"]["tool_calls"]:
        assert call["function"]["name"] in names
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "weather":
            assert arguments["city"] in ("Oslo", "Rome")


async def test_tools_call_by_name_ends_with_stop_as_openais(api: Api) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in await streamed(api, tool_choice=named):
        assert choice["finish_reason"] in (None, "stop")
    functions = {"functions": [WEATHER["function"]], "function_call": {"name": "weather"}}
    body = (await api.chat(max_tokens=250, **functions)).json()["choices"][0]
    assert body["finish_reason"] == "stop" and body["message"]["function_call"]["name"] == "weather"
    allowed = {"mode": "required", "tools": [named]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = (await chat(api, tool_choice=choice)).json()["choices"][0]
    assert body["finish_reason"] == "tool_calls"


async def test_tools_forced_call_may_follow_a_thought(api: Api) -> None:
    api.model.script = f"<think>Where?</think>{written()}"
    body = (await chat(api, tool_choice="required", temperature=0)).json()["choices"][0]
    assert body["finish_reason"] == "tool_calls"
    assert body["message"]["reasoning_content"] == "Where?"
    assert body["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


async def test_tools_answer_is_a_call_or_fits_the_schema(api: Api) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    called = (await chat(api, response_format=form)).json()["choices"][0]
    assert called["finish_reason"] == "tool_calls"
    api.model.script = ARGUMENTS
    answered = (await chat(api, response_format=form)).json()["choices"][0]
    assert json.loads(answered["message"]["content"]) == {"city": "Oslo"}
    assert_error(await chat(api, response_format=form, tool_choice="required"), 400, None, "tool_choice")


async def test_tools_call_and_result_reach_the_next_prompt(api: Api) -> None:
    first = (await chat(api)).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "-7"}
    api.model.script = "It is cold."
    body = (await chat(api, messages=[*USER, first, result], return_token_ids=True)).json()
    assert body["choices"][0]["message"]["content"] == "It is cold."
    assert "-7" in TOKENIZER.decode(body["prompt_token_ids"])


async def test_tools_sdk_stream_helper_repeats_nothing(api: Api, sdk: openai.AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        tools=[WEATHER],  # type: ignore[list-item]
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls] == [("weather", ARGUMENTS)]
    assert calls[0].id.count("call_") == 1


async def test_custom_tools_are_called_with_text(api: Api) -> None:
    api.model.script = written("shell", '{"input": "ls\\n-l"}')
    body = (await chat(api, tools=[SHELL])).json()["choices"][0]
    (call,) = body["message"]["tool_calls"]
    assert call["type"] == "custom"
    assert call["custom"] == {"name": "shell", "input": "ls\n-l"}
    deltas = [
        delta
        for choice in await streamed(api, tools=[SHELL])
        for delta in choice["delta"].get("tool_calls", ())
    ]
    assert "".join(delta["custom"].get("input", "") for delta in deltas) == "ls\n-l"


async def test_tools_legacy_functions_get_a_function_call(api: Api) -> None:
    functions = [{"name": "weather", "parameters": CITY}]
    body = (await api.chat(functions=functions, max_tokens=200)).json()["choices"][0]
    assert body["finish_reason"] == "function_call"
    assert body["message"]["function_call"] == {"name": "weather", "arguments": ARGUMENTS}
    assert body["message"]["content"] is None and "tool_calls" not in body["message"]
    chunks = events((await api.chat(functions=functions, max_tokens=200, stream=True)).text)
    deltas = [chunk["choices"][0]["delta"].get("function_call", {}) for chunk in chunks]
    assert "".join(delta.get("name", "") for delta in deltas) == "weather"
    assert "".join(delta.get("arguments", "") for delta in deltas) == ARGUMENTS
    talk = [
        *USER,
        {"role": "assistant", "content": None, "function_call": body["message"]["function_call"]},
        {"role": "function", "name": "weather", "content": "-7"},
    ]
    assert (await api.chat(functions=functions, messages=talk)).status_code == 200


async def test_tools_logprobs_cover_every_token_of_a_call(api: Api) -> None:
    fields: dict[str, Any] = {"logprobs": True, "temperature": 0}
    whole = (await chat(api, **fields)).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in whole for byte in entry["bytes"]).decode() == f"{written()}<|end|>"
    logprobs_of_chunks = [choice["logprobs"] for choice in await streamed(api, **fields)]
    assert [entry for part in logprobs_of_chunks if part for entry in part["content"]] == whole


async def test_tools_template_without_tools_gets_them_as_text() -> None:
    tokenizer = make_tokenizer()
    tokenizer._tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    )
    async with open_api(tokenizer=tokenizer) as api:
        talk = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        ]  # fmt: skip
        body = {"model": MODEL, "messages": talk, "tools": [TIME]}
        tokens = (await api.http.post("/tokenize", json=body)).json()["tokens"]
        prompt = TOKENIZER.decode(tokens, skip_special_tokens=False)
        assert prompt.startswith("<|system|>") and '"name": "time"' in prompt
        assert written("time", "{}") in prompt and "noon" in prompt


async def test_tools_parser_is_chosen_by_name() -> None:
    async with open_api(settings=WorkerSettings(tool_call_parser="pythonic")) as api:
        api.model.script = '[weather(city="Oslo")]'
        (call,) = (await chat(api)).json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
