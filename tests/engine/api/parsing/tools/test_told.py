"""A conversation with tools for a template that knows none."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from baton_engine.api.chat.prompt import tell
from baton_engine.api.parsing.tools.toolbox import Toolbox
from tests.engine.api.parsing.tools.answers import BOX, calls_of, read, words_of

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Rome", "days": 3}},
}
USER = {"role": "user", "content": "How is it in Rome?"}


def test_the_system_message_names_every_tool_that_may_be_called() -> None:
    told = tell([{"role": "system", "content": "Be kind."}, USER], BOX)
    assert [message["role"] for message in told] == ["system", "user"]
    assert told[0]["content"].startswith("Be kind.\n\n")
    assert all(tool.name in told[0]["content"] for tool in BOX.tools)
    assert "now" not in tell([USER], replace(BOX, allowed=frozenset({"weather"})))[0]["content"].split()


def test_there_is_a_system_message_if_there_was_none() -> None:
    assert [message["role"] for message in tell([USER], BOX)] == ["system", "user"]


@pytest.mark.parametrize("toolbox", [None, replace(BOX, choice="none")], ids=["without tools", "none"])
def test_nothing_is_said_of_tools_that_may_not_be_called(toolbox: Toolbox | None) -> None:
    assert tell([USER], toolbox) == [USER]


def test_the_way_to_call_that_is_told_is_the_one_that_is_read() -> None:
    words = tell([USER], BOX)[0]["content"]
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
    told = tell(messages, None)
    assert [message["role"] for message in told] == ["user", "assistant", "user", "assistant", "user"]
    assert all(message.keys() == {"role", "content"} for message in told)
    said = read("", [told[1]["content"]])
    assert words_of(said) == "Let me see."
    assert [(name, json.loads(text)) for name, text in calls_of(said)] == [
        ("weather", {"city": "Rome", "days": 3})
    ] * 2
    assert told[2]["content"].count("<tool_response>") == 2
    assert "sunny" in told[2]["content"]
    assert "warm\ndry" in told[2]["content"]
    assert told[4]["content"].endswith("</tool_response>\nAnd now?")  # many templates want roles to alternate
    assert "tool_calls" in messages[1]  # the messages given stay as they are
