"""D: tools."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from jsonschema import validate

from tests.conformance.deployment import Deployment, choices_of, joined
from tests.conformance.expected import check_error, check_param, exactly, refusal
from tests.conformance.scripted import ANSWER, THOUGHT

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Zürich"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME: dict[str, Any] = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}


def function(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    description = f"What {name} knows."
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters, **more},
    }


TOOL = function("get_weather", WEATHER)
TOOLS = [TOOL, function("get_time", TIME)]
SCHEMAS = {"get_weather": WEATHER, "get_time": TIME}

FIELDS: dict[str, Any] = {"temperature": 1, "max_tokens": 300}
AT_ONCE = {"chat_template_kwargs": {"enable_thinking": False}}
"""The model calls or answers without a thought before."""

WEATHER_QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Rome?"}]

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
"""As Qwen3 writes one."""


def check_call(call: Any, names: tuple[str, ...] = ("get_weather",)) -> None:
    assert call.type == "function" and call.id
    assert call.function.name in names
    validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("seed", range(3))
def test_D1_required_calls_with_valid_arguments(thinker: Deployment, seed: int) -> None:
    completion = thinker.chat(
        WEATHER_QUESTION, tools=[TOOL], tool_choice="required", seed=seed, extra_body=AT_ONCE, **FIELDS
    )
    choice = completion.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content in (None, "")
    calls = choice.message.tool_calls
    assert calls
    for call in calls:
        check_call(call)
    assert len({call.id for call in calls}) == len(calls)


def test_D2_a_named_function_is_the_one_that_is_called(thinker: Deployment) -> None:
    for name in SCHEMAS:
        chosen = {"type": "function", "function": {"name": name}}
        completion = thinker.chat(
            WEATHER_QUESTION, tools=TOOLS, tool_choice=chosen, extra_body=AT_ONCE, **FIELDS
        )
        choice = completion.choices[0]
        assert choice.finish_reason in ("tool_calls", "stop")
        assert choice.message.tool_calls
        for call in choice.message.tool_calls:
            check_call(call, (name,))


def test_D3_none_calls_nothing(thinker: Deployment) -> None:
    completion = thinker.chat(
        WEATHER_QUESTION, tools=TOOLS, tool_choice="none", extra_body={**AT_ONCE, **exactly(CALL)}, **FIELDS
    )
    message = completion.choices[0].message
    assert not message.tool_calls and message.content == CALL
    assert completion.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nothing"}}},
        {"tools": TOOLS, "tool_choice": "maybe"},
        {"tools": TOOLS, "tool_choice": {"type": "function"}},
        {"tools": TOOLS, "tool_choice": 5},
    ],
    ids=["required without tools", "auto without tools", "unknown", "no such word", "no name", "a number"],
)
def test_D4_a_choice_that_cannot_be_is_named(thinker: Deployment, fields: dict[str, Any]) -> None:
    check_param(thinker.post_chat(WEATHER_QUESTION, **fields), "tool_choice")


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function"},
        {"type": "function", "function": {}},
        function("two words", TIME),
        function("n" * 129, TIME),
        function("", TIME),
        {"type": "function", "function": {"name": "f", "parameters": "no schema"}},
        {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}},
        {"type": "wizardry"},
        5,
    ],
    ids=[
        "no function",
        "no name",
        "a space in the name",
        "a long name",
        "an empty name",
        "a schema that is a string",
        "a schema that is none",
        "an unknown kind",
        "a number",
    ],
)
def test_D5_a_tool_that_cannot_be_is_named(thinker: Deployment, tool: Any) -> None:
    answer = thinker.post_chat(WEATHER_QUESTION, tools=[tool], tool_choice="required", max_tokens=20)
    check_param(answer, "tools")


def test_D6_a_streamed_call_has_its_id_and_name_once(thinker: Deployment) -> None:
    fields = {"tools": [TOOL], "tool_choice": "required", "seed": 3, **AT_ONCE, **FIELDS}
    events = thinker.stream_chat(WEATHER_QUESTION, **fields)
    whole = thinker.post_chat(WEATHER_QUESTION, **fields).json()["choices"][0]["message"]["tool_calls"]
    calls = streamed_calls(events)
    assert [call["arguments"] for call in calls] == [call["function"]["arguments"] for call in whole]
    for call in calls:
        assert call["name"] == "get_weather"
        validate(json.loads(call["arguments"]), WEATHER)
    assert list(choices_of(events))[-1]["finish_reason"] == "tool_calls"
    assert not joined(events)
    assert sum(call["pieces"] for call in calls) > len(calls)  # arguments came in pieces


def streamed_calls(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls that deltas add up to; each must open with everything, and say it only then."""
    calls: list[dict[str, Any]] = []
    for choice in choices_of(events):
        for delta in choice["delta"].get("tool_calls") or ():
            function = delta["function"]
            if delta["index"] == len(calls):
                assert delta["id"] and delta["type"] == "function" and function["name"]
                calls.append({"id": delta["id"], "name": function["name"], "arguments": "", "pieces": 0})
            else:
                assert delta["index"] == len(calls) - 1
                assert delta.get("id") is None and function.get("name") is None
            calls[-1]["arguments"] += function.get("arguments") or ""
            calls[-1]["pieces"] += bool(function.get("arguments"))
    assert calls and len({call["id"] for call in calls}) == len(calls)
    return calls


def test_D7_the_sdks_helper_doubles_nothing(thinker: Deployment) -> None:
    with thinker.client.chat.completions.stream(
        model=thinker.model,
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
        tools=[{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}],
        tool_choice="required",
        extra_body=AT_ONCE,
        **FIELDS,
    ) as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls
    for call in calls:
        check_call(call)
        assert call.id.count("call_") <= 1


def test_D8_without_parallel_calls_there_is_one(thinker: Deployment) -> None:
    two = exactly(f"{CALL}\n{CALL}")
    for parallel, count in ((True, 2), (False, 1)):
        completion = thinker.chat(
            WEATHER_QUESTION,
            tools=TOOLS,
            parallel_tool_calls=parallel,
            extra_body={**AT_ONCE, **two},
            **FIELDS,
        )
        assert len(completion.choices[0].message.tool_calls or ()) == count
    for seed in range(3):
        completion = thinker.chat(
            WEATHER_QUESTION,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            seed=seed,
            extra_body=AT_ONCE,
            **FIELDS,
        )
        assert len(completion.choices[0].message.tool_calls or ()) == 1


def test_D9_a_call_and_its_result_go_back_in(thinker: Deployment) -> None:
    first = thinker.chat(
        WEATHER_QUESTION, tools=[TOOL], tool_choice="required", extra_body=AT_ONCE, **FIELDS
    ).choices[0]
    assert first.message.tool_calls
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 24 degrees."}
        for call in first.message.tool_calls
    ]
    messages = [*WEATHER_QUESTION, first.message.model_dump(exclude_none=True), *results]
    second = thinker.chat(messages, tools=[TOOL], extra_body=AT_ONCE, **FIELDS).choices[0]
    assert second.message.content == ANSWER or second.message.tool_calls
    messages[1]["content"] = None
    assert thinker.chat(messages, max_tokens=1).choices


def test_D10_deprecated_functions_are_answered_in_their_own_form(thinker: Deployment) -> None:
    functions = [{"name": "get_weather", "parameters": WEATHER}]
    completion = thinker.chat(
        WEATHER_QUESTION,
        functions=functions,
        function_call={"name": "get_weather"},
        extra_body=AT_ONCE,
        **FIELDS,
    )
    choice = completion.choices[0]
    assert choice.finish_reason == "stop" and not choice.message.tool_calls  # as of a tool by name
    assert choice.message.function_call and choice.message.function_call.name == "get_weather"
    validate(json.loads(choice.message.function_call.arguments), WEATHER)


def test_D11_forced_call_with_another_constraint_is_rejected(thinker: Deployment) -> None:
    for constraint in (
        {"response_format": {"type": "json_object"}},
        {"regex": "a"},
        {"ebnf": 'root ::= "a"'},
        {"structured_outputs": {"choice": ["a"]}},
    ):
        answer = thinker.post_chat(WEATHER_QUESTION, tools=TOOLS, tool_choice="required", **constraint)
        check_error(answer, 400)


def test_D12_a_call_that_is_cut_ends_with_length(thinker: Deployment) -> None:
    fields = {"tools": [TOOL], "tool_choice": "required", "seed": 3, **AT_ONCE}
    whole = thinker.post_chat(WEATHER_QUESTION, max_tokens=300, **fields).json()
    tokens = whole["usage"]["completion_tokens"]
    cut = thinker.post_chat(WEATHER_QUESTION, max_tokens=tokens - 8, **fields).json()["choices"][0]
    assert cut["finish_reason"] == "length"
    visible = "".join(call["function"]["arguments"] for call in cut["message"]["tool_calls"])
    everything = "".join(
        call["function"]["arguments"] for call in whole["choices"][0]["message"]["tool_calls"]
    )
    assert visible and everything.startswith(visible) and visible != everything


def test_D13_auto_finds_a_call_in_the_text(thinker: Deployment) -> None:
    text = f"Let me look.\n{CALL}"
    fields = {"tools": TOOLS, "tool_choice": "auto", **AT_ONCE, **exactly(text), **FIELDS}
    choice = thinker.post_chat(WEATHER_QUESTION, **fields).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather" and "index" not in call
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome", "days": 2}
    assert choice["message"]["content"].strip() == "Let me look."
    events = thinker.stream_chat(WEATHER_QUESTION, **fields)
    (streamed,) = streamed_calls(events)
    assert streamed["arguments"] == call["function"]["arguments"]
    assert joined(events).strip() == "Let me look."
    assert list(choices_of(events))[-1]["finish_reason"] == "tool_calls"


def test_D14_auto_leaves_text_alone(thinker: Deployment) -> None:
    choice = thinker.chat(WEATHER_QUESTION, tools=TOOLS, extra_body=AT_ONCE, **FIELDS).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == ANSWER and not choice.message.tool_calls


def test_D15_a_thought_may_come_before_a_forced_call(thinker: Deployment) -> None:
    fields = {"tools": [TOOL], "tool_choice": "required", **FIELDS}
    message = thinker.post_chat(WEATHER_QUESTION, **fields).json()["choices"][0]["message"]
    assert message["reasoning_content"] == THOUGHT
    assert message["tool_calls"] and message["content"] in (None, "")
    for call in message["tool_calls"]:
        validate(json.loads(call["function"]["arguments"]), WEATHER)


def test_D16_tools_are_in_the_prompt(thinker: Deployment) -> None:
    without = thinker.chat(WEATHER_QUESTION, max_tokens=1).usage
    those = thinker.chat(WEATHER_QUESTION, tools=TOOLS, max_tokens=1).usage
    assert without and those and those.prompt_tokens > without.prompt_tokens + 40


def test_D17_strict_arguments_validate(thinker: Deployment) -> None:
    strict = function("get_weather", WEATHER, strict=True)
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        completion = thinker.chat(
            WEATHER_QUESTION, tools=[strict], tool_choice=choice, extra_body=AT_ONCE, **FIELDS
        )
        calls = completion.choices[0].message.tool_calls
        assert calls
        for call in calls:
            check_call(call)


def test_D18_allowed_tools_narrow_the_choice(thinker: Deployment) -> None:
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "get_time"}}],
        },
    }
    for seed in range(3):
        answer = thinker.post_chat(
            WEATHER_QUESTION, tools=TOOLS, tool_choice=allowed, seed=seed, **AT_ONCE, **FIELDS
        )
        assert answer.status_code == 200, answer.text
        calls = answer.json()["choices"][0]["message"]["tool_calls"]
        assert calls and {call["function"]["name"] for call in calls} == {"get_time"}


def test_D19_a_result_for_no_call_is_still_a_message(thinker: Deployment) -> None:
    unknown = refusal(
        lambda: thinker.chat([*WEATHER_QUESTION, {"role": "tool", "content": "b"}]), openai.BadRequestError
    )
    check_param(unknown, "messages")
