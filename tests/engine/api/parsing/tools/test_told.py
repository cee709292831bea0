"""A conversation with tools for a template without tools."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from baton_engine.api.chat.prompt import describe_tools
from baton_engine.api.parsing.tools.toolbox import Toolbox
from tests.engine.api.parsing.tools.answers import BOX, calls_of, read, words_of

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Rome", "days": 3}},
}
USER = {"role": "user", "content": "How is it in Rome?"}


def test_describe_tools_system_message_names_callable_tools() -> None:
    messages = describe_tools([{"role": "system", "content": "Be kind."}, USER], BOX)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"].startswith("Be kind.\n\n")
    assert all(tool.name in messages[0]["content"] for tool in BOX.tools)
    assert (
        "now"
        not in describe_tools([USER], replace(BOX, allowed=frozenset({"weather"})))[0]["content"].split()
    )


def test_describe_tools_adds_a_missing_system_message() -> None:
    assert [message["role"] for message in describe_tools([USER], BOX)] == ["system", "user"]


@pytest.mark.parametrize("toolbox", [None, replace(BOX, choice="none")], ids=["without tools", "none"])
def test_describe_tools_uncallable_tools_change_nothing(toolbox: Toolbox | None) -> None:
    assert describe_tools([USER], toolbox) == [USER]


def test_describe_tools_example_is_read_back_as_a_call() -> None:
    words = describe_tools([USER], BOX)[0]["content"]
    example = words[words.index("<tool_call>") :].replace("the name of the tool", "weather")
    assert calls_of(read("", [example])) == [("weather", '{"parameter": "value"}')]


def test_calls_and_results_become_text() -> None:
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "tool", "content": ["warm", "dry"], "tool_call_id": "c2"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "user", "content": "And now?"},
    ]
    as_text = describe_tools(messages, None)
    assert [message["role"] for message in as_text] == ["user", "assistant", "user", "assistant", "user"]
    assert all(message.keys() == {"role", "content"} for message in as_text)
    calls = read("", [as_text[1]["content"]])
    assert words_of(calls) == "Let me see."
    assert [(name, json.loads(text)) for name, text in calls_of(calls)] == [
        ("weather", {"city": "Rome", "days": 3})
    ] * 2
    assert as_text[2]["content"].count("<tool_response>") == 2
    assert "sunny" in as_text[2]["content"]
    assert "warm\ndry" in as_text[2]["content"]
    assert as_text[4]["content"].endswith(
        "</tool_response>\nAnd now?"
    )  # many templates want roles to alternate
    assert "tool_calls" in messages[1]  # the messages given stay as they are
