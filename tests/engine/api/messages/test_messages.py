"""`/v1/messages` as Anthropic's SDK sees it: answers, streams, tools, thinking and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from baton_api import headers, limits
from baton_api.errors import ModelNotFound
from baton_api.keys import KeyDigest, Keys
from baton_engine.api.fields import Fields
from baton_engine.api.http import HttpServer
from baton_engine.api.messages import request
from baton_engine.api.parsing.tools.request import log_left_out
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
    # With "any" there may be several calls, by chance up to the limit.
    ended = message.usage.output_tokens < 400
    assert ended or name == "any"
    assert message.stop_reason == ("tool_use" if ended else "max_tokens")


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
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an image": (user(IMAGE), "messages[0].content[0].type"),
    "a document": (user({"type": "text", "text": "Read."}, PDF), "messages[0].content[1].type"),
    "nothing that the model can read": (user({"type": "web_search_tool_result"}), "messages"),
    "no messages": ({"messages": []}, "messages"),
    "an unknown role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    "no text": (user({"type": "text"}), "messages[0].content[0].text"),
    "no blocks": ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    "a call without a result": (
        {"messages": [*HI, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "weather", "input": {}}]}]},
        "messages[1].content",
    ),
    "a block of no known type": (user({"type": "wizardry"}), "messages[0].content[0].type"),
    "a tool that Anthropic defines": (
        {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"
    ),
    "a call of a tool that runs at Anthropic": (
        {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice"
    ),
    "a wrong tool behind one that runs at Anthropic": (
        {"tools": [SEARCH, {"name": "f g", "input_schema": {"type": "object"}}]}, "tools[1].name"
    ),
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
    "too many stops": ({"stop_sequences": ["a"] * (limits.STOPS.most + 1)}, "stop_sequences"),
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


def says(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


CALLED = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
DOCUMENT = {"type": "text", "media_type": "text/plain", "data": "Rain."}
FOUND = {"type": "search_result", "title": "News", "source": "a.org", "content": [text("Rain.")]}
HISTORIES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "encrypted thoughts": (
        [*HI, says("assistant", {"type": "redacted_thinking", "data": "x"}, text("Ho")), *HI],
        [*HI, {"role": "assistant", "content": "Ho"}, *HI]),
    "a search that ran at Anthropic": (
        [says("assistant", {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
              {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}, text("Ho"))],
        [{"role": "assistant", "content": "Ho"}]),
    "the summary of an earlier conversation": (
        [says("assistant", {"type": "compaction", "content": "Ho"})],
        [{"role": "assistant", "content": "Ho"}]),
    "a document of text": (
        [says("user", {"type": "document", "title": "Sky", "source": DOCUMENT})],
        [{"role": "user", "content": "Sky\nRain."}]),
    "a document of blocks": (
        [says("user", {"type": "document", "source": {
            "type": "content", "content": [text("Rain."), IMAGE]}})],
        [{"role": "user", "content": "Rain.\n['image' left out: this model reads text only]"}]),
    "a result of a search": ([says("user", FOUND)], [{"role": "user", "content": "News\na.org\nRain."}]),
    "results of tools that the model cannot read": (
        [says("assistant", CALLED), says("user", {"type": "tool_result", "tool_use_id": "a", "content": [
            text("See:"), IMAGE, PDF, FOUND, {"type": "tool_reference", "tool_name": "weather"}]})],
        [{"role": "assistant", "content": None, "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {}}}]},
         {"role": "tool", "tool_call_id": "a", "content": [
             text("See:"), text("['image' left out: this model reads text only]"),
             text("['document' left out: this model reads text only]"), text("News\na.org\nRain."),
             text("weather")]}]),
    "a system message with changes of the tools": (
        [*HI, says("system", {"type": "tool_addition", "tool": {}}, text("Be brief.")),
         says("system", {"type": "tool_removal", "tool": {}})],
        [*HI, {"role": "system", "content": "Be brief."}]),
    "a block for Anthropic's accounting": (
        [says("system", text("x-anthropic-billing-header: cch=1"), text("Be brief.")), *HI],
        [{"role": "system", "content": "Be brief."}, *HI]),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_message_history_of_agents_becomes_chat(name: str) -> None:
    given, expected = HISTORIES[name]
    read = request.read_conversation(Fields({"messages": given}))
    assert request.finished(read.messages) == expected


EDITS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


async def test_message_context_management_is_answered_without_edits(
    api: Api, claude: anthropic.AsyncAnthropic
) -> None:
    api.model.script = "Good day."
    body: Any = {"context_management": EDITS}
    none: Any = {"applied_edits": []}
    message: Any = await create(claude, extra_body=body)
    assert texts(message) == [text("Good day.")] and message.context_management == none
    plain: Any = await create(claude)
    assert not hasattr(plain, "context_management")
    async with claude.messages.stream(model=MODEL, messages=HI, max_tokens=9, extra_body=body) as stream:
        deltas: list[Any] = [event async for event in stream if event.type == "message_delta"]
    assert deltas[-1].context_management == none
    count: Any = await claude.messages.count_tokens(model=MODEL, messages=HI, extra_body=body)
    assert count.context_management == {"original_input_tokens": count.input_tokens}


async def test_message_tools_that_run_at_anthropic_are_left_out(
    api: Api, claude: anthropic.AsyncAnthropic, caplog: pytest.LogCaptureFixture
) -> None:
    log_left_out.cache_clear()
    api.model.script = CALL
    with caplog.at_level("INFO"):
        (call,) = (await create(claude, tools=[SEARCH, WEATHER], tool_choice={"type": "any"})).content
    assert call.type == "tool_use" and call.name == "weather"
    assert "'web_search_20250305' run at Anthropic" in caplog.text
    api.model.script = "No."
    assert texts(await create(claude, tools=[SEARCH])) == [text("No.")]
    alone = await create(claude, tools=[SEARCH], tool_choice={"type": "auto"})
    assert alone.usage == (await create(claude)).usage


async def test_message_thinking_of_a_model_that_does_not_reason_is_ignored() -> None:
    body = {"model": MODEL, "messages": HI, "max_tokens": 9}
    async with open_api() as api:
        api.model.script = "Yes."
        for thinking in (
            {"type": "enabled", "budget_tokens": 2048}, {"type": "adaptive", "display": "omitted"},
            {"type": "between_tools"},
        ):  # fmt: skip
            answer = await api.http.post("/v1/messages", json=body | {"thinking": thinking})
            assert answer.status_code == 200, answer.text
            assert answer.json()["content"] == [text("Yes.")]


async def test_message_ends_at_any_of_many_stops(api: Api, claude: anthropic.AsyncAnthropic) -> None:
    api.model.script = "One. Two. Three."
    stops = [f"<{number}>" for number in range(limits.STOPS.most - 1)]
    message = await create(claude, stop_sequences=[*stops, "Three"])
    assert (texts(message), message.stop_sequence) == ([text("One. Two. ")], "Three")


@pytest.mark.one_process("gives its keys to the computing process only")
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
