"""A conversation's form before it reaches a template; rejected ones are in test_validation."""

from __future__ import annotations

from typing import Any

import pytest

from baton_engine.api.chat.messages import read_messages
from baton_engine.api.fields import Fields

USER = {"role": "user", "content": "Hi"}


def call(name: str = "f", arguments: Any = '{"a": 1}', id: str = "call_1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, **fields}


def called(arguments: Any, name: str = "f", id: str = "call_1") -> dict[str, Any]:
    return assistant(tool_calls=[call(name, arguments, id)])


F, G = ({"name": name, "arguments": "{}"} for name in "fg")
TALKS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "text": ([USER], [USER]),
    "a name": ([USER | {"name": "Ada"}], [USER | {"name": "Ada"}]),
    "parts of text, by all their names": (
        [{"role": "user", "content": [{"type": kind, "text": kind} for kind in ("text", "input_text")]}],
        [{"role": "user", "content": ["text", "input_text"]}]),
    "a developer": ([{"role": "developer", "content": "Be."}], [{"role": "developer", "content": "Be."}]),
    "calls, whose arguments are an object then": ([called('{"a": 1}')], [called({"a": 1})]),
    "arguments that are an object already": ([called({"a": 1})], [called({"a": 1})]),
    "no arguments": ([called("")], [called({})]),
    "arguments that are null": ([called(None)], [called({})]),
    "arguments that max_tokens cut": ([called('{"a": ')], [called('{"a": ')]),
    "arguments that are no object": ([called("[1]")], [called("[1]")]),
    "arguments nested too deeply to be read": ([called("[" * 9999)], [called("[" * 9999)]),
    "words beside calls": (
        [assistant(content="So:", tool_calls=[call()])],
        [assistant(content="So:", tool_calls=[call("f", {"a": 1})])]),
    "no calls": ([assistant(content="So.", tool_calls=[])], [assistant(content="So.")]),
    "a call of a custom tool": (
        [assistant(tool_calls=[{"id": "c", "type": "custom", "custom": {"name": "run", "input": "ls"}}])],
        [called({"input": "ls"}, "run", "c")]),
    "a result, which gets the name of what was called": (
        [called("{}"), {"role": "tool", "tool_call_id": "call_1", "content": "7"}],
        [called({}), {"role": "tool", "tool_call_id": "call_1", "content": "7", "name": "f"}]),
    "a result with a name of its own": (
        [called("{}"), {"role": "tool", "tool_call_id": "call_1", "content": "7", "name": "g"}],
        [called({}), {"role": "tool", "tool_call_id": "call_1", "content": "7", "name": "g"}]),
    "a result of parts": (
        [{"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "7"}]}],
        [{"role": "tool", "tool_call_id": "x", "content": ["7"]}]),
    "a result with an image": (
        [{"role": "tool", "tool_call_id": "x", "content": [
            {"type": "text", "text": "7"}, {"type": "image_url", "image_url": {"url": "data:,"}}]}],
        [{"role": "tool", "tool_call_id": "x",
          "content": ["7", "['image_url' left out: this model reads text only]"]}]),
    "a tool that returns nothing": (
        [{"role": "tool", "tool_call_id": "x", "content": []},
         {"role": "tool", "tool_call_id": "y", "content": None}],
        [{"role": "tool", "tool_call_id": "x", "content": ""},
         {"role": "tool", "tool_call_id": "y", "content": ""}]),
    "calls beside an empty list": (
        [assistant(content=[], tool_calls=[call()])], [called({"a": 1})]),
    "a deprecated call and its result": (
        [assistant(function_call=F), {"role": "function", "name": "f", "content": "7"}],
        [called({}, id="call_0"), {"role": "tool", "tool_call_id": "call_0", "content": "7", "name": "f"}]),
    "two deprecated calls": (
        [assistant(function_call=F), {"role": "function", "name": "f", "content": "7"},
         assistant(function_call=G), {"role": "function", "name": "g", "content": None}],
        [called({}, id="call_0"), {"role": "tool", "tool_call_id": "call_0", "content": "7", "name": "f"},
         called({}, "g", "call_1"), {"role": "tool", "tool_call_id": "call_1", "content": "", "name": "g"}]),
    "earlier thoughts, as SGLang calls them": (
        [assistant(content="Yes.", reasoning_content="Hm.")],
        [assistant(content="Yes.", reasoning_content="Hm.")]),
    "earlier thoughts, as vLLM calls them": (
        [assistant(content="Yes.", reasoning="Hm.")], [assistant(content="Yes.", reasoning_content="Hm.")]),
    "thoughts alone": ([assistant(reasoning="Hm.")], [assistant(content="", reasoning_content="Hm.")]),
    "a refusal": ([assistant(refusal="No.")], [assistant(content="No.")]),
    "a refusal as a part": (
        [assistant(content=[{"type": "refusal", "refusal": "No."}])], [assistant(content=["No."])]),
}  # fmt: skip


@pytest.mark.parametrize("name", TALKS)
def test_read_messages_variants_have_one_form(name: str) -> None:
    given, expected = TALKS[name]
    assert read_messages(Fields({"messages": given})) == expected


def test_read_messages_leaves_its_input_unchanged() -> None:
    talk = [called('{"a": 1}'), {"role": "tool", "tool_call_id": "call_1", "content": "7"}]
    before = repr(talk)
    read_messages(Fields({"messages": talk}))
    assert repr(talk) == before
