"""`/v1/messages` as Anthropic's SDK sees it: answers, streams, tools, thinking and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from baton_api import headers
from baton_api.errors import ModelNotFound
from baton_api.keys import KeyDigest, Keys
from baton_engine.api.http import HttpServer
from baton_engine.settings import WorkerSettings
from tests.engine.api.api import CONTEXT, MODEL, Api, open_api
from tests.plain_http import PLAIN

HI: Any = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
KEY = "secret"


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    settings = WorkerSettings(reasoning_parser="qwen3", tool_call_parser="hermes")
    async with open_api(settings=settings, keys=Keys((KeyDigest.of(KEY),))) as api:
        yield api


@pytest.fixture
async def claude(server: HttpServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=f"http://{server.address}",
        api_key=KEY,
        max_retries=0,
        http_client=anthropic.DefaultAsyncHttpxClient(verify=PLAIN),
    ) as client:
        yield client


async def create(claude: anthropic.AsyncAnthropic, **body: Any) -> Message:
    message = await claude.messages.create(**{"model": MODEL, "messages": HI, "max_tokens": 200} | body)
    assert isinstance(message, Message)
    return message


def texts(message: Message) -> list[Any]:
    return [block.model_dump(exclude_none=True) for block in message.content]


async def test_message_has_text_and_usage(api: Api, claude: anthropic.AsyncAnthropic) -> None:
    api.model.script = "Good day."
    message = await create(claude, system="Be kind.")
    assert texts(message) == [{"type": "text", "text": "Good day."}]
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_") and message._request_id
    assert message.usage.output_tokens == len("Good day.") + 1
    counted = await claude.messages.count_tokens(model=MODEL, messages=HI, system="Be kind.")
    first = message.usage
    assert first.cache_read_input_tokens is not None
    assert first.input_tokens + first.cache_read_input_tokens == counted.input_tokens
    second = (await create(claude, system="Be kind.")).usage
    assert second.cache_read_input_tokens and second.cache_read_input_tokens > first.cache_read_input_tokens
    assert second.input_tokens + second.cache_read_input_tokens == counted.input_tokens


SYSTEMS: dict[str, Any] = {
    "blocks": {"system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]},
    "a message": {"messages": [{"role": "system", "content": "Be kind."}, *HI]},
    "user's blocks": {"system": "Be kind.", "messages": [{"role": "user", "content": [
        {"type": "text", "text": "Hi"}]}]},
    "unused tools": {"system": "Be kind.", "tools": []},
}  # fmt: skip


@pytest.mark.parametrize("name", SYSTEMS)
async def test_message_prompt_is_the_same_in_all_forms(claude: anthropic.AsyncAnthropic, name: str) -> None:
    plain = await claude.messages.count_tokens(model=MODEL, messages=HI, system="Be kind.")
    other = await claude.messages.count_tokens(**{"model": MODEL, "messages": HI} | SYSTEMS[name])
    assert other.input_tokens == plain.input_tokens


@pytest.mark.parametrize(
    ("body", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["zz", " day"]}, "stop_sequence", " day"),
        ({"max_tokens": 10 * CONTEXT, "ignore_eos": True}, "model_context_window_exceeded", None),
    ],
)
async def test_message_says_why_it_ended(
    api: Api, claude: anthropic.AsyncAnthropic, body: dict[str, Any], reason: str, sequence: str | None
) -> None:
    api.model.script = "Good day."
    given = {name: value for name, value in body.items() if name != "ignore_eos"}
    message = await create(claude, **given, extra_body=body)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


async def test_message_continues_the_assistant(api: Api, claude: anthropic.AsyncAnthropic) -> None:
    count = claude.messages.count_tokens
    begun: Any = [*HI, {"role": "assistant", "content": "Good"}]
    open_turn = (await count(model=MODEL, messages=HI)).input_tokens
    assert (await count(model=MODEL, messages=begun)).input_tokens == open_turn + len("Good")
    api.model.script = "Good day."
    message = await create(claude, messages=begun)
    assert texts(message) == [{"type": "text", "text": " day."}]


async def test_message_stream_adds_up_to_the_message(api: Api, claude: anthropic.AsyncAnthropic) -> None:
    api.model.script = f"<think>Well, well.</think>\n\nI look.\n{CALL}"
    fields: Any = {"model": MODEL, "messages": HI, "max_tokens": 300, "tools": [WEATHER]}
    async with claude.messages.stream(**fields) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    whole = await create(claude, **fields)
    shown = [{key: value for key, value in block.items() if key != "id"} for block in texts(final)]
    assert shown == [{key: value for key, value in block.items() if key != "id"} for block in texts(whole)]
    assert [block["type"] for block in shown] == ["thinking", "text", "tool_use"]
    assert (shown[0]["thinking"], shown[1]["text"].strip()) == ("Well, well.", "I look.")
    assert (shown[2]["name"], shown[2]["input"]) == ("weather", {"city": "Paris"})
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


async def test_message_stream_events_are_in_order(api: Api) -> None:
    api.model.script = "Good day."
    body = {"model": MODEL, "messages": HI, "max_tokens": 50, "stream": True}
    answer = await api.http.post("/v1/messages", json=body, headers={"x-api-key": KEY})
    names = [line.removeprefix("event: ") for line in answer.text.split("\n") if line.startswith("event: ")]
    order = list(dict.fromkeys(names))
    assert order == [
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert "[DONE]" not in answer.text
    assert answer.headers["request-id"] == answer.headers[headers.REQUEST_ID]


async def test_message_tool_result_reaches_the_prompt(api: Api, claude: anthropic.AsyncAnthropic) -> None:
    api.model.script = CALL
    question: Any = [{"role": "user", "content": "Weather in Paris?"}]
    called = await create(claude, messages=question, tools=[WEATHER])
    (call,) = called.content
    assert call.type == "tool_use"
    api.model.script = "Sunny."
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sun"}]}
    messages: Any = [
        *question,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    assert texts(await create(claude, messages=messages, tools=[WEATHER])) == [
        {"type": "text", "text": "Sunny."}
    ]


PICK: Any = {
    "name": "pick",
    "input_schema": {"type": "object", "properties": {"number": {"enum": [1, 2]}}, "required": ["number"]},
}
BRIEFLY: Any = {"type": "enabled", "budget_tokens": 1}
CHOICES: dict[str, Any] = {
    "any": {"type": "any"},
    "named": {"type": "tool", "name": "pick", "disable_parallel_tool_use": True},
}


@pytest.mark.parametrize("name", CHOICES)
async def test_message_forced_call_is_constrained(claude: anthropic.AsyncAnthropic, name: str) -> None:
    fields = {"tools": [WEATHER, PICK] if name == "named" else [PICK], "tool_choice": CHOICES[name]}
    message = await create(claude, **fields, thinking=BRIEFLY, max_tokens=400)
    block = message.content[-1]
    assert block.type == "tool_use" and block.name == "pick" and block.input["number"] in (1, 2)
    assert message.stop_reason == "tool_use"


async def test_message_truncated_call_is_no_block(api: Api, claude: anthropic.AsyncAnthropic) -> None:
    api.model.script = CALL
    message = await create(claude, tools=[WEATHER], max_tokens=len(CALL) - 20)
    assert message.stop_reason == "max_tokens"
    assert [block.type for block in message.content] == []


async def test_message_thinking_can_be_limited(api: Api, claude: anthropic.AsyncAnthropic) -> None:
    api.model.script = "<think>Well, well, well.</think>\n\nYes."
    thinking: Any = {"type": "enabled", "budget_tokens": 8}
    message = await create(claude, thinking=thinking)
    thought = message.content[0]
    assert thought.type == "thinking" and len(thought.thinking) < len("Well, well, well.")
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens
    hidden = await create(claude, thinking={"type": "adaptive", "display": "omitted"})
    assert texts(hidden) == [{"type": "text", "text": "Yes."}]


async def test_message_schema_constrains_the_answer(claude: anthropic.AsyncAnthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form: Any = {"format": {"type": "json_schema", "schema": schema | {"additionalProperties": False}}}
    message = await create(claude, output_config=form, thinking=BRIEFLY)
    block = message.content[-1]
    assert block.type == "text" and block.text.replace(" ", "").replace("\n", "") in ('{"a":1}', '{"a":2}')


def user(*blocks: Any) -> Any:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an image": (user(IMAGE), "messages[0].content[0].type"),
    "a document": (user({"type": "text", "text": "Read."}, PDF), "messages[0].content[1].type"),
    "an image as a result": (
        user({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}),
        "messages[0].content[0].content[0].type",
    ),
    "no messages": ({"messages": []}, "messages"),
    "an unknown role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    "no text": (user({"type": "text"}), "messages[0].content[0].text"),
    "no blocks": ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    "a call without a result": (
        {"messages": [*HI, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "weather", "input": {}}]}]},
        "messages[1].content",
    ),
    "encrypted thoughts": (
        {"messages": [*HI, {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "x"}]}, *HI]},
        "messages[1].content[0].type",
    ),
    "a tool of Anthropic's": ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    "a tool without a schema": ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    "a tool with a wrong schema": (
        {"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "f"
    ),
    "an unknown tool": (
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"
    ),
    "no limit": ({"max_tokens": None}, "max_tokens"),
    "a limit of zero": ({"max_tokens": 0}, "max_tokens"),
    "a budget above the limit": (
        {"thinking": {"type": "enabled", "budget_tokens": 200}}, "thinking.budget_tokens"
    ),
    "too many stops": ({"stop_sequences": list("abcde")}, "stop_sequences"),
    "an empty stop": ({"stop_sequences": [""]}, "stop_sequences"),
    "heat": ({"temperature": 9}, "temperature"),
    "OpenAI's stop": ({"stop": "x"}, "stop"),
    "a container": ({"container": "x"}, "container"),
    "a prompt beyond the context": ({"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "messages"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
async def test_message_error_names_the_field(claude: anthropic.AsyncAnthropic, name: str) -> None:
    body, field = WRONG[name]
    with pytest.raises(anthropic.BadRequestError) as caught:
        await create(claude, extra_body=body)
    error: Any = caught.value.body
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert f"'{field}'" in error["error"]["message"] or name == "a prompt beyond the context"
    assert error["request_id"] == caught.value.request_id


async def test_message_statuses_raise_the_sdk_classes(api: Api, claude: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.AuthenticationError) as refused:
        await create(claude.with_options(api_key="wrong"))
    body: Any = refused.value.body
    assert body["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.NotFoundError, match=ModelNotFound("nope").message.split(".")[0]):
        await create(claude, model="nope")
    api.served.drain.draining = True
    with pytest.raises(anthropic.APIStatusError) as busy:
        await create(claude)
    body = busy.value.body
    assert (busy.value.status_code, body["error"]["type"]) == (503, "overloaded_error")
