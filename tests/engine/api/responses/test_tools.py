"""Thoughts, calls of tools and schemas, as items of a response."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest

from baton_engine.api.parsing.tools.request import log_left_out
from baton_engine.settings import WorkerSettings
from tests.engine.api.api import MODEL, Api, open_api
from tests.engine.api.responses.typed import kinds, typed_events

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SHELL: Any = {"type": "custom", "name": "shell", "description": "Runs a command."}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SHELL_CALL = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls -l"}}\n</tool_call>'


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    settings = WorkerSettings(reasoning_parser="qwen3", tool_call_parser="hermes")
    async with open_api(settings=settings) as api:
        yield api


async def stream_of(api: Api, **body: Any) -> list[dict[str, Any]]:
    answer = await api.http.post("/v1/responses", json={"model": MODEL, "input": "Hi", "stream": True} | body)
    assert answer.status_code == 200, answer.text
    return typed_events(answer.text)


async def test_response_tools_call_is_an_item_and_takes_output(api: Api, sdk: openai.AsyncOpenAI) -> None:
    api.model.script = CALL
    first = await sdk.responses.create(model=MODEL, input="Weather in Paris?", tools=[WEATHER])
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    assert call.status == "completed"
    assert call.call_id
    assert first.output_text == ""
    assert first.tools[0].to_dict() == WEATHER | {"strict": None}
    api.model.script = "Sunny."
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = await sdk.responses.create(
        model=MODEL, input=[output], previous_response_id=first.id, tools=[WEATHER]
    )
    assert answer.output_text == "Sunny."
    without_store = await sdk.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": "Weather in Paris?"}, call.to_dict(), output],  # type: ignore[list-item]
        tools=[WEATHER],
    )
    assert without_store.usage is not None
    assert answer.usage is not None
    assert without_store.usage.input_tokens == answer.usage.input_tokens


async def test_response_tools_streamed_call_grows_by_arguments(api: Api) -> None:
    api.model.script = CALL
    events = await stream_of(api, tools=[WEATHER])
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    deltas = "".join(event["delta"] for event in events if event["type"].endswith("delta"))
    done = next(event for event in events if event["type"].endswith("arguments.done"))
    assert json.loads(deltas) == json.loads(done["arguments"]) == {"city": "Paris"}
    assert done["name"] == "weather"


async def test_response_tools_sdk_parses_a_call(api: Api, sdk: openai.AsyncOpenAI) -> None:
    class Weather(pydantic.BaseModel):
        city: str

    api.model.script = CALL
    tool = openai.pydantic_function_tool(Weather, name="weather")
    flat: Any = {"type": "function", **tool["function"]}
    async with sdk.responses.stream(model=MODEL, input="Weather in Paris?", tools=[flat]) as stream:
        final = await stream.get_final_response()
    (call,) = final.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Paris"}


async def test_response_tools_custom_tool_gets_text(api: Api, sdk: openai.AsyncOpenAI) -> None:
    api.model.script = SHELL_CALL
    response = await sdk.responses.create(model=MODEL, input="List.", tools=[SHELL])
    (call,) = response.output
    assert call.type == "custom_tool_call"
    assert (call.name, call.input) == ("shell", "ls -l")
    output: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "a b"}
    api.model.script = "Two."
    answer = await sdk.responses.create(
        model=MODEL, input=[output], previous_response_id=response.id, tools=[SHELL]
    )
    assert answer.output_text == "Two."
    api.model.script = SHELL_CALL
    events = await stream_of(api, tools=[SHELL])
    assert kinds(events)[3:5] == ["custom_tool_call_input.delta", "custom_tool_call_input.done"]


CHOICES: dict[str, Any] = {
    "required": "required",
    "named": {"type": "function", "name": "weather"},
    "allowed": {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "weather"}],
    },
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())
async def test_response_tools_choice_forces_the_call(choice: Any) -> None:
    async with open_api(settings=WorkerSettings(tool_call_parser="hermes")) as api:
        api.model.script = "I would rather talk."
        body = {"model": MODEL, "input": "Weather?", "tools": [WEATHER], "max_output_tokens": 60}
        answer = await api.http.post("/v1/responses", json=body | {"tool_choice": choice})
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"][0]["type"] == "function_call"
    assert answer.json()["tool_choice"] == choice


SEARCH: Any = {"type": "web_search", "external_web_access": False}
DOCS: Any = {"type": "namespace", "name": "mcp__docs", "description": "Docs.", "tools": [WEATHER, SHELL]}


async def test_response_tools_that_run_at_openai_are_left_out(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    log_left_out.cache_clear()
    api.model.script = CALL
    body = {"model": MODEL, "input": "Weather?", "tools": [SEARCH, WEATHER], "tool_choice": "required"}
    with caplog.at_level("INFO"):
        answer = (await api.http.post("/v1/responses", json=body)).json()
    assert [item["name"] for item in answer["output"]] == ["weather"]
    assert answer["tools"] == [WEATHER | {"strict": None}]
    assert "'web_search' run at OpenAI" in caplog.text
    api.model.script = "No."
    only: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    for choice in ("auto", "none", only):
        body = {"model": MODEL, "input": "Hi", "tools": [SEARCH], "tool_choice": choice}
        assert (await api.http.post("/v1/responses", json=body)).json()["output"][0]["type"] == "message"


async def test_response_tools_of_a_namespace_are_called_by_it(api: Api, sdk: openai.AsyncOpenAI) -> None:
    api.model.script = CALL.replace("weather", "mcp__docs__weather")
    offered: Any = [SEARCH, WEATHER, DOCS]
    first = await sdk.responses.create(model=MODEL, input="Weather?", tools=offered)
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, call.namespace) == ("weather", "mcp__docs")
    assert [tool.type for tool in first.tools] == ["function", "namespace"]
    events = await stream_of(api, tools=offered)
    done = next(event for event in events if event["type"] == "response.function_call_arguments.done")
    assert done["name"] == "weather"
    item = next(event["item"] for event in events if event["type"] == "response.output_item.added")
    assert (item["name"], item["namespace"]) == ("weather", "mcp__docs")
    api.model.script = "Sunny."
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items: Any = [{"role": "user", "content": "Weather?"}, call.to_dict(), output]
    assert (await sdk.responses.create(model=MODEL, input=items, tools=offered)).output_text == "Sunny."


async def test_response_tools_choice_may_name_a_namespace() -> None:
    async with open_api(settings=WorkerSettings(tool_call_parser="hermes")) as api:
        api.model.script = "I would rather talk."
        choice = {"type": "function", "name": "weather", "namespace": "mcp__docs"}
        body = {"model": MODEL, "input": "Weather?", "tools": [WEATHER, DOCS], "tool_choice": choice}
        answer = await api.http.post("/v1/responses", json=body | {"max_output_tokens": 70})
    call = answer.json()["output"][0]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "weather", "mcp__docs")


async def test_response_tools_of_items_can_be_called(api: Api) -> None:
    api.model.script = CALL
    added: Any = {"type": "additional_tools", "role": "developer", "tools": [WEATHER, SEARCH]}
    items = [{"role": "user", "content": "Weather?"}, added, added]
    body = {"model": MODEL, "input": items, "tools": [SHELL]}
    answer = (await api.http.post("/v1/responses", json=body)).json()
    assert [item.get("name") for item in answer["output"]] == ["weather"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [SEARCH], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tools": [{"type": "local_shell"}]}, "tools"),
        ({"tools": [SEARCH, WEATHER | {"name": "no good"}]}, "tools[1].name"),
        ({"tools": [SEARCH, DOCS | {"tools": [WEATHER | {"name": "no good"}]}]}, "tools[1].tools[0].name"),
        (
            {"tools": [DOCS | {"tools": [WEATHER | {"parameters": {"type": "x"}}]}]},
            "tools[0].tools[0].parameters",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"tools": [WEATHER | {"name": "no good"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [WEATHER | {"parameters": {"type": "string"}}]}, "tools[0].parameters"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": CHOICES["allowed"] | {"tools": [{"type": "function", "name": "other"}]},
            },
            "tool_choice.tools[0].name",
        ),
        ({"tools": [SHELL | {"format": {"type": "grammar", "syntax": "lark"}}]}, None),
    ],
    ids=str,
)
async def test_response_tools_invalid_field_names_its_place(
    api: Api, body: dict[str, Any], param: str | None
) -> None:
    answer = await api.http.post("/v1/responses", json={"model": MODEL, "input": "Hi"} | body)
    assert answer.status_code == 400
    named = answer.json()["error"]["param"]
    assert named == param if param else named.startswith("tools[0].format")


async def test_thoughts_are_an_item_before_the_message(api: Api, sdk: openai.AsyncOpenAI) -> None:
    api.model.script = "<think>\nHm, so.\n</think>\n\nYes."
    response = await sdk.responses.create(model=MODEL, input="Well?")
    thought, message = response.output
    assert thought.type == "reasoning"
    assert message.type == "message"
    assert thought.content is not None
    assert [part.text for part in thought.content] == ["Hm, so."]
    assert response.output_text == "Yes."
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    events = await stream_of(api)
    assert kinds(events)[2:8] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    text_deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(text_deltas) == "Yes."
    again = await sdk.responses.create(model=MODEL, input="And?", previous_response_id=response.id)
    assert again.status == "completed"


async def test_response_logprobs_of_thoughts_are_omitted(api: Api, sdk: openai.AsyncOpenAI) -> None:
    api.model.script = "<think>\nHm, so.\n</think>\n\nYes."
    include: Any = {"include": ["message.output_text.logprobs"]}
    response = await sdk.responses.create(model=MODEL, input="Well?", **include)
    message = response.output[1].to_dict()
    events = await stream_of(api, **include)
    streamed = [
        entry for event in events if event["type"].endswith("delta") for entry in event.get("logprobs", ())
    ]
    for logprobs in (message["content"][0]["logprobs"], streamed):
        assert "".join(entry["token"] for entry in logprobs) == "Yes."


class Person(pydantic.BaseModel):
    name: str
    age: int


async def test_response_format_sdk_parses_the_schema(api: Api, sdk: openai.AsyncOpenAI) -> None:
    api.model.script = '{"name": "Ada", "age": 36}'
    response = await sdk.responses.parse(model=MODEL, input="Who?", text_format=Person)
    assert response.output_parsed == Person(name="Ada", age=36)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    async with sdk.responses.stream(model=MODEL, input="Who?", text_format=Person) as stream:
        assert (await stream.get_final_response()).output_parsed == Person(name="Ada", age=36)


@pytest.mark.parametrize(
    "form", [{"type": "json_object"}, {"type": "json_schema", "name": "x", "schema": {}}]
)
async def test_response_format_json_is_kept(api: Api, form: dict[str, Any]) -> None:
    api.model.script = '{"a": [1, 2]}'
    body = {"model": MODEL, "input": "Hi", "text": {"format": form}}
    answer = (await api.http.post("/v1/responses", json=body)).json()
    assert json.loads(answer["output"][0]["content"][0]["text"]) == {"a": [1, 2]}
    assert answer["text"]["format"] == form


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}},
            "text.format",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x y", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex"),
        ({"regex": "("}, "regex"),
    ],
    ids=str,
)
async def test_response_format_invalid_names_its_place(api: Api, body: dict[str, Any], param: str) -> None:
    answer = await api.http.post("/v1/responses", json={"model": MODEL, "input": "Hi"} | body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


async def test_response_format_impossible_leaves_the_server_serving(api: Api) -> None:
    await api.http.post("/v1/responses", json={"model": MODEL, "input": "Hi", "regex": "("})
    api.model.script = "Hello"
    answer = await api.http.post("/v1/responses", json={"model": MODEL, "input": "Hi"})
    assert answer.status_code == 200
