"""Items become chat messages; an error in an item names its place in the input."""

from __future__ import annotations

from typing import Any

import pytest

from baton_api.errors import (
    EMPTY_ARRAY,
    INVALID_TYPE,
    INVALID_VALUE,
    MISSING_REQUIRED_PARAMETER,
    InvalidRequest,
)
from baton_engine.api.chat.input_items import read


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": content}


def call(number: int) -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": f"c{number}",
        "name": "f",
        "arguments": "{}",
        "id": f"fc_{number}",
    }


def as_call(number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}


THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [{"type": "summary_text", "text": "short"}],
    "content": [{"type": "reasoning_text", "text": "long"}],
}
TEXT = {"type": "text", "text": "Hello"}

STORIES: dict[str, tuple[list[Any], list[dict[str, Any]]]] = {
    "easy messages": (
        [{"role": "developer", "content": "Be brief."}, user("Hi"), {"role": "assistant", "content": "Ho"}],
        [{"role": "developer", "content": "Be brief."}, user("Hi"), {"role": "assistant", "content": "Ho"}],
    ),
    "parts": (
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
        [{"role": "user", "content": [TEXT]}],
    ),
    "a refusal": (
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "Hello"}]}],
        [{"role": "assistant", "content": [TEXT]}],
    ),
    "a turn with thoughts, words and calls": (
        [user("Hi"), THOUGHT, assistant("Hello"), call(0), call(1)],
        [
            user("Hi"),
            {
                "role": "assistant",
                "reasoning_content": "long",
                "content": [TEXT],
                "tool_calls": [as_call(0), as_call(1)],
            },
        ],
    ),
    "calls and their outputs": (
        [
            call(0),
            {"type": "function_call_output", "call_id": "c0", "output": "7"},
            {"type": "custom_tool_call", "call_id": "c1", "name": "shell", "input": "ls"},
            {
                "type": "custom_tool_call_output",
                "call_id": "c1",
                "output": [{"type": "input_text", "text": "Hello"}],
            },
        ],
        [
            {"role": "assistant", "content": "", "tool_calls": [as_call(0)]},
            {"role": "tool", "tool_call_id": "c0", "content": "7"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "shell", "input": "ls"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": [TEXT]},
        ],
    ),
    "two messages of the assistant": (
        [assistant("Hello"), assistant("Hello")],
        [{"role": "assistant", "content": [TEXT]}] * 2,
    ),
    "words after a call": (
        [call(0), assistant("Hello")],
        [
            {"role": "assistant", "content": "", "tool_calls": [as_call(0)]},
            {"role": "assistant", "content": [TEXT]},
        ],
    ),
    "a summary where there is no thought": (
        [THOUGHT | {"content": None}, assistant("Hello")],
        [{"role": "assistant", "reasoning_content": "short", "content": [TEXT]}],
    ),
    "a call that was cut": (
        [user("Hi"), call(0) | {"status": "incomplete", "arguments": '{"a'}],
        [user("Hi")],
    ),
    "a call that was cut, and answered": (
        [
            call(0) | {"status": "incomplete", "arguments": '{"a'},
            {"type": "function_call_output", "call_id": "c0", "output": "invalid"},
        ],
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [as_call(0) | {"function": {"name": "f", "arguments": '{"a'}}],
            },
            {"role": "tool", "tool_call_id": "c0", "content": "invalid"},
        ],
    ),
    "what only OpenAI can read": (
        [
            user("Hi"),
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
            {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
            {"type": "local_shell_call_output", "id": "l", "output": "x"},
            {"type": "compaction", "encrypted_content": "x"},
            {"type": "tool_search_output", "tools": []},
            assistant("Hello"),
        ],
        [user("Hi"), {"role": "assistant", "content": [TEXT]}],
    ),
    "a call in a namespace": (
        [call(0) | {"namespace": "mcp__docs"}],
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [as_call(0) | {"function": {"name": "mcp__docs__f", "arguments": "{}"}}],
            }
        ],
    ),
    "an output with an image, and an empty one": (
        [
            {
                "type": "function_call_output",
                "call_id": "c0",
                "output": [
                    {"type": "input_text", "text": "Hello"},
                    {"type": "input_image", "image_url": "x"},
                ],
            },
            {"type": "function_call_output", "call_id": "c1", "output": []},
        ],
        [
            {"role": "tool", "tool_call_id": "c0", "content": [TEXT, {"type": "input_image"}]},
            {"role": "tool", "tool_call_id": "c1", "content": []},
        ],
    ),
    "a thought under another name": (
        [THOUGHT | {"content": [{"type": "text", "text": "long"}]}, assistant("Hello")],
        [{"role": "assistant", "reasoning_content": "long", "content": [TEXT]}],
    ),
    "a thought that is nothing": ([THOUGHT | {"content": [], "summary": []}, user("Hi")], [user("Hi")]),
}


@pytest.mark.parametrize(("items", "messages"), STORIES.values(), ids=STORIES.keys())
def test_items_as_messages(items: list[Any], messages: list[dict[str, Any]]) -> None:
    assert read(items, 0, None).messages == messages


def test_instructions_come_first() -> None:
    conversation = read([user("Hi")], 0, "Be brief.")
    assert conversation.messages == [{"role": "system", "content": "Be brief."}, user("Hi")]
    assert conversation.sources == ["instructions", "input[0]"]


def test_conversation_messages_name_their_source_items() -> None:
    conversation = read([user("Hi"), assistant("Ho"), user("Hi"), THOUGHT, call(0), call(1)], 2, None)
    assert conversation.sources == ["previous_response_id", "previous_response_id", "input[0]", "input[1]"]


WRONG: dict[str, tuple[Any, str, str]] = {
    "no object": ("Hi", "input[1]", INVALID_TYPE),
    "no role": ({"content": "Hi"}, "input[1].role", MISSING_REQUIRED_PARAMETER),
    "another role": ({"role": "wizard", "content": "Hi"}, "input[1].role", INVALID_VALUE),
    "no content": ({"role": "user"}, "input[1].content", MISSING_REQUIRED_PARAMETER),
    "a number as content": ({"role": "user", "content": 7}, "input[1].content", INVALID_TYPE),
    "no parts": ({"role": "user", "content": []}, "input[1].content", EMPTY_ARRAY),
    "an image": (
        {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
        "input[1].content[0].type",
        INVALID_VALUE,
    ),
    "a part without text": (
        {"role": "user", "content": [{"type": "input_text"}]},
        "input[1].content[0].text",
        MISSING_REQUIRED_PARAMETER,
    ),
    "another item": ({"type": "wizardry"}, "input[1].type", INVALID_VALUE),
    "a reference": ({"type": "item_reference", "id": "msg_1"}, "input[1].type", INVALID_VALUE),
    "a call without a name": (
        {"type": "function_call", "call_id": "c", "arguments": "{}"},
        "input[1].name",
        MISSING_REQUIRED_PARAMETER,
    ),
    "a call without an id": (
        {"type": "function_call", "name": "f", "arguments": "{}"},
        "input[1].call_id",
        MISSING_REQUIRED_PARAMETER,
    ),
    "an output without its call": (
        {"type": "function_call_output", "output": "7"},
        "input[1].call_id",
        MISSING_REQUIRED_PARAMETER,
    ),
    "an output that is nothing": (
        {"type": "function_call_output", "call_id": "c"},
        "input[1].output",
        MISSING_REQUIRED_PARAMETER,
    ),
    "a thought that is no object": (THOUGHT | {"content": ["x"]}, "input[1].content[0]", INVALID_TYPE),
}


@pytest.mark.parametrize(("item", "param", "code"), WRONG.values(), ids=WRONG.keys())
def test_conversation_invalid_item_names_its_place(item: Any, param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read([user("earlier"), user("Hi"), item], 1, "Be brief.")
    assert (error.value.param, error.value.code) == (param, code)
