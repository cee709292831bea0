"""
Translation of input items to chat messages.

One turn of the model consists of several items (reasoning, text, calls) and becomes one message. Each message
records the path of its first item, so that errors of chat refer to the item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_api import limits
from baton_api.errors import EMPTY_ARRAY, InvalidRequest
from baton_engine.api.fields import Fields, shown, wrong_type

ROLES = ("user", "assistant", "system", "developer")
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of text parts, and the member with the text."""


@dataclass(slots=True)
class ChatMessages:
    """Messages, and the path of the first item of each."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def add(self, message: dict[str, Any], source: str) -> None:
        self.messages.append(message)
        self.sources.append(source)

    def assistant(self, source: str, *unlike: str) -> dict[str, Any]:
        """Return the assistant's last message, or a new one if it has one of `unlike` or another role."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in unlike):
            last = {"role": "assistant", "content": ""}
            self.add(last, source)
        return last


def read(items: Sequence[object], earlier: int, instructions: str | None) -> ChatMessages:
    """Translate items; the first `earlier` ones are of earlier responses. Raises InvalidRequest."""
    conversation = ChatMessages()
    if instructions is not None:
        conversation.add({"role": "system", "content": instructions}, "instructions")
    for position, item in enumerate(items):
        path = "previous_response_id" if position < earlier else f"input[{position - earlier}]"
        if not isinstance(item, dict):
            raise wrong_type(path, "an object", item)
        _add(conversation, Fields(item, path), path)
    return conversation


def _add(conversation: ChatMessages, item: Fields, path: str) -> None:
    kind = item.text("type") or "message"
    match kind:
        case "message":
            _add_message(conversation, item, path)
        case "reasoning":
            if thought := _thought(item):
                message = conversation.assistant(path, "content", "tool_calls", "reasoning_content")
                message["reasoning_content"] = thought
        case "function_call" | "custom_tool_call" if item.get("status") == "incomplete":
            pass  # a truncated call was never executed
        case "function_call":
            call = {"name": _text(item, "name"), "arguments": _text(item, "arguments")}
            _add_call(conversation, {"type": "function", "function": call}, item, path)
        case "custom_tool_call":
            call = {"name": _text(item, "name"), "input": _text(item, "input")}
            _add_call(conversation, {"type": "custom", "custom": call}, item, path)
        case "function_call_output" | "custom_tool_call_output":
            result = {
                "role": "tool",
                "tool_call_id": _text(item, "call_id"),
                "content": _content_parts(item, "output"),
            }
            conversation.add(result, path)
        case _:
            item.wrong_value("type", f"items of type {shown(kind)} are not supported")


def _add_message(conversation: ChatMessages, item: Fields, path: str) -> None:
    item.require("role")
    role = item.choice("role", ROLES)
    content_parts = _content_parts(item, "content")
    if role == "assistant":
        conversation.assistant(path, "content", "tool_calls")["content"] = content_parts
    else:
        conversation.add({"role": role, "content": content_parts}, path)


def _add_call(conversation: ChatMessages, call: dict[str, Any], item: Fields, path: str) -> None:
    message = conversation.assistant(path)
    message.setdefault("tool_calls", []).append({"id": _text(item, "call_id"), **call})


def _thought(item: Fields) -> str:
    """Return the text of a reasoning item, or its summary if the text is missing."""
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        texts = []
        for position, part in enumerate(item.array(name, limits.PARTS.most) or ()):
            if not isinstance(part, dict):
                raise wrong_type(item.param(f"{name}[{position}]"), "an object", part)
            fields = Fields(part, item.param(f"{name}[{position}]"))
            fields.choice("type", (kind,))
            texts.append(_text(fields, "text"))
        if texts:
            return "\n".join(texts)
    return ""


def _content_parts(item: Fields, name: str) -> str | list[dict[str, Any]]:
    """Read content: text, or a list of text parts. Raises InvalidRequest for other parts."""
    content = item.require(name)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        item.wrong_type(name, "a string or an array of parts", content)
    if not content:
        param = item.param(name)
        raise InvalidRequest(
            f"Invalid '{param}': empty array. Expected at least 1 part.", param=param, code=EMPTY_ARRAY
        )
    return [_part(part, item.param(f"{name}[{position}]")) for position, part in enumerate(content)]


def _part(part: object, path: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise wrong_type(path, "an object", part)
    fields = Fields(part, path)
    fields.require("type")
    kind = fields.text("type")
    if kind not in TEXTS:
        fields.wrong_value("type", f"the model supports text only, not {shown(kind)}")
    return {"type": "text", "text": _text(fields, TEXTS[kind])}


def _text(fields: Fields, name: str) -> str:
    fields.require(name)
    text = fields.text(name)
    assert text is not None
    return text
