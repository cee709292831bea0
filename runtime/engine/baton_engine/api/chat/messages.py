"""
Validation of a conversation, and its normalized form for chat templates.

A normalized message has `role` and `content` (text, a list of texts, or None), and optionally `name`,
`reasoning_content`, `tool_call_id` and `tool_calls`, whose arguments are an object, or the text that a model
wrote instead of one. Deprecated function calls are converted to tool calls. A template's `Dialect` adapts
messages further.

A tool's result may contain what the model cannot read, such as an image. A note stands for it, because the
agent that sends the result cannot leave it out, and would fail at every later turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from baton_api import limits
from baton_api.errors import EMPTY_ARRAY, InvalidRequest
from baton_engine.api.fields import Fields, shown, wrong_type
from baton_engine.api.parameters import unsupported
from baton_engine.api.parsing.tools.toolbox import INPUT

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")
OTHER_PARTS = ("image_url", "input_image", "input_audio", "file", "input_file", "video_url", "audio_url")
THOUGHTS = ("reasoning_content", "reasoning")
"""Fields with the reasoning of an earlier answer."""

Message = dict[str, Any]


def read_messages(fields: Fields) -> list[Message]:
    """Read `messages`, at least one. Raises InvalidRequest."""
    fields.require("messages")
    if not fields.array("messages", limits.MESSAGES.most):
        raise InvalidRequest(
            "Invalid 'messages': empty array. Expected at least 1 message.",
            param="messages",
            code=EMPTY_ARRAY,
        )
    called = CallHistory()
    return [_message(item, called) for item in fields.objects("messages", limits.MESSAGES.most)]


class CallHistory:
    """The calls so far, which later results refer to."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._last = ""

    def add(self, call: Message) -> None:
        self._last = call["id"]
        self._names[self._last] = call["function"]["name"]

    def name(self, given: str) -> str | None:
        """Return the function name of the call with this id, or None."""
        return self._names.get(given)

    def fresh(self) -> str:
        """Return an id for a deprecated function call, which lacks an id."""
        return f"call_{len(self._names)}"

    def latest(self, name: str) -> str:
        """Return the id of the last call if it called this function, otherwise a new id."""
        return self._last if self.name(self._last) == name else self.fresh()


def _message(fields: Fields, called: CallHistory) -> Message:
    fields.require("role")
    role = fields.choice("role", ROLES)
    match role:
        case "assistant":
            message = _assistant(fields, called)
        case "tool":
            call = fields.required_text("tool_call_id")
            message = {"role": "tool", "content": _result(fields), "tool_call_id": call}
            if name := called.name(call):
                message["name"] = name
        case "function":
            call = called.latest(fields.required_text("name"))
            message = {"role": "tool", "content": _result(fields), "tool_call_id": call}
        case _:
            message = {"role": role, "content": read_content(fields)}
    speaker = fields.text("name")
    return message if speaker is None else message | {"name": speaker}


def _assistant(fields: Fields, called: CallHistory) -> Message:
    if fields.given("audio"):
        raise unsupported(fields.param("audio"))
    message: Message = {"role": "assistant", "content": None}
    calls = _calls(fields) or _function_call(fields, called)
    if calls:
        message["tool_calls"] = calls
        for call in calls:
            called.add(call)
    thoughts = next(filter(None, (fields.text(name) for name in THOUGHTS)), None)
    if thoughts:
        message["reasoning_content"] = thoughts
    refusal = fields.text("refusal")
    if fields.get("content") not in (None, []):
        message["content"] = read_content(fields)
    elif refusal or thoughts:
        message["content"] = refusal or ""
    elif not calls:
        fields.require("content")
    return message


def _calls(fields: Fields) -> list[Message]:
    return [
        {"id": call.required_text("id"), "type": "function", "function": _called(call)}
        for call in fields.objects("tool_calls", limits.TOOL_CALLS.most)
    ]


def _called(call: Fields) -> Message:
    """Read a call. The text of a custom tool becomes the parameter of a function."""
    kind = call.choice("type", ("function", "custom")) or "function"
    call.require(kind)
    function = call.member(kind)
    name = function.required_text("name")
    arguments = {INPUT: function.required_text("input")} if kind == "custom" else _arguments(function)
    return {"name": name, "arguments": arguments}


def _arguments(function: Fields) -> dict[str, Any] | str:
    """
    Read arguments: JSON text of an object. Some clients send an object, or omit empty arguments.

    Returns other text unchanged: a model wrote it, for example until `max_tokens` ended it.
    """
    given = function.get("arguments")
    if given is None or isinstance(given, dict):
        return given or {}
    text = function.text("arguments") or ""
    if not text.strip():
        return {}
    try:
        arguments = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text


def _function_call(fields: Fields, called: CallHistory) -> list[Message]:
    """Read the deprecated `function_call`."""
    if not fields.mapping("function_call"):
        return []
    function = fields.member("function_call")
    call = {"name": function.required_text("name"), "arguments": _arguments(function)}
    return [{"id": called.fresh(), "type": "function", "function": call}]


def _result(fields: Fields) -> str | Sequence[str]:
    """Read the content of a tool's result; some tools return nothing."""
    return "" if fields.get("content") in (None, []) else read_content(fields, noted=True)


def read_content(fields: Fields, *, noted: bool = False) -> str | Sequence[str]:
    """Read `content`: a text, or its parts. With `noted`, a note stands for what the model cannot read."""
    content = fields.require("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        fields.wrong_type("content", "a string or an array of text parts", content)
    path = fields.param("content")
    fields.array("content", limits.PARTS.most)
    if not content:
        raise InvalidRequest(
            f"Invalid '{path}': empty array. Expected at least 1 part.", param=path, code=EMPTY_ARRAY
        )
    return [_part(part, f"{path}[{position}]", noted) for position, part in enumerate(content)]


def unreadable_note(kind: object) -> str:
    """Return the text that stands for a part of a tool's result that the model cannot read."""
    return f"[{shown(kind)} left out: this model reads text only]"


def _part(part: Any, path: str, noted: bool) -> str:
    if not isinstance(part, dict):
        raise wrong_type(path, "an object", part)
    fields = Fields(part, path)
    kind = fields.require("type")
    if kind in (*TEXT_PARTS, "refusal"):
        name = "refusal" if kind == "refusal" else "text"
        return fields.required_text(name)
    if noted:
        return unreadable_note(kind)
    if kind in OTHER_PARTS:
        fields.wrong_value("type", f"the model supports text only, not {kind}")
    fields.wrong_value("type", f"Expected 'text', but got {shown(kind)}")
