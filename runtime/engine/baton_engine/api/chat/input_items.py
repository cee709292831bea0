"""
Translation of input items to chat messages.

One turn of the model consists of several items (reasoning, text, calls) and becomes one message. Each message
records the path of its first item, so that errors of chat refer to the item.

Agents send back all items of a conversation, whoever wrote them. Items of tools that ran at another service
are skipped: this model cannot read them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_api import limits
from baton_api.errors import EMPTY_ARRAY, InvalidRequest
from baton_engine.api.fields import Fields, shown, wrong_type

ROLES = ("user", "assistant", "system", "developer")
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of text parts, and the member with the text."""
SKIPPED = frozenset({
    "additional_tools", "compaction", "compaction_summary", "compaction_trigger", "configuration_update",
    "context_compaction", "ghost_snapshot", "image_generation_call", "mcp_approval_request",
    "mcp_approval_response", "mcp_list_tools", "program", "program_output", "tool_search_output",
})  # fmt: skip
"""Types of items without text for this model, besides those with an end in `SKIPPED_SUFFIXES`."""
SKIPPED_SUFFIXES = ("_call", "_call_output")
"""Ends of the types of calls of OpenAI's own tools, such as `web_search_call`, and of their results."""
RESULTS = ("function_call_output", "custom_tool_call_output")
THOUGHT_PARTS = {"content": ("reasoning_text", "text"), "summary": ("summary_text",)}
"""Types of the parts of a reasoning item."""


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


_MESSAGE = re.compile(r"^messages\[(\d+)\]")


def source(param: str, conversation: ChatMessages) -> str | None:
    """Return the path of the item that chat's `param` refers to; None if it is no message."""
    message = _MESSAGE.match(param)
    index = int(message[1]) if message else len(conversation.sources)
    return conversation.sources[index] if index < len(conversation.sources) else None


def read(items: Sequence[object], earlier: int, instructions: str | None) -> ChatMessages:
    """Translate items; the first `earlier` ones are of earlier responses. Raises InvalidRequest."""
    conversation = ChatMessages()
    if instructions is not None:
        conversation.add({"role": "system", "content": instructions}, "instructions")
    answered = {
        item.get("call_id") for item in items if isinstance(item, dict) and item.get("type") in RESULTS
    }
    for position, item in enumerate(items):
        path = "previous_response_id" if position < earlier else f"input[{position - earlier}]"
        if not isinstance(item, dict):
            raise wrong_type(path, "an object", item)
        truncated = item.get("status") == "incomplete" and item.get("call_id") not in answered
        _add(conversation, Fields(item, path), path, truncated)
    return conversation


def _add(conversation: ChatMessages, item: Fields, path: str, truncated: bool) -> None:
    """Add an item. `truncated` says that it is incomplete and nothing answers it."""
    kind = item.text("type") or "message"
    match kind:
        case "message":
            _add_message(conversation, item, path)
        case "reasoning":
            if thought := _thought(item):
                message = conversation.assistant(path, "content", "tool_calls", "reasoning_content")
                message["reasoning_content"] = thought
        case "function_call" | "custom_tool_call" if truncated:
            pass  # it was never executed
        case "function_call":
            call = {"name": _name(item), "arguments": item.required_text("arguments")}
            _add_call(conversation, {"type": "function", "function": call}, item, path)
        case "custom_tool_call":
            call = {"name": _name(item), "input": item.required_text("input")}
            _add_call(conversation, {"type": "custom", "custom": call}, item, path)
        case "function_call_output" | "custom_tool_call_output":
            result = {
                "role": "tool",
                "tool_call_id": item.required_text("call_id"),
                "content": _result(item),
            }
            conversation.add(result, path)
        case "item_reference":  # what keeps items has resolved those that it has
            item.wrong_value(
                "type",
                "no items are kept here. Send the item itself, in the AI SDK by the option 'store: false'",
            )
        case _ if kind in SKIPPED or kind.endswith(SKIPPED_SUFFIXES):
            pass
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
    message.setdefault("tool_calls", []).append({"id": item.required_text("call_id"), **call})


def _thought(item: Fields) -> str:
    """Return the text of a reasoning item, or its summary if the text is missing."""
    for name, kinds in THOUGHT_PARTS.items():
        texts = []
        for part in item.objects(name, limits.PARTS.most):
            part.choice("type", kinds)
            texts.append(part.required_text("text"))
        if texts:
            return "\n".join(texts)
    return ""


def _name(item: Fields) -> str:
    return qualified(item.required_text("name"), item.text("namespace"))


def qualified(name: str, namespace: str | None) -> str:
    """
    Return the name by which the model knows a tool.

    >>> qualified("search", "mcp__docs"), qualified("search", None)
    ('mcp__docs__search', 'search')
    """
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _result(item: Fields) -> str | list[dict[str, Any]]:
    """Read the output of a call. Chat leaves a note in place of what the model cannot read."""
    output = item.require("output")
    if not isinstance(output, list):
        return _content_parts(item, "output")
    parts: list[dict[str, Any]] = []
    for position, part in enumerate(output):
        path = item.param(f"output[{position}]")
        if not isinstance(part, dict):
            raise wrong_type(path, "an object", part)
        kind = Fields(part, path).require("type")
        parts.append(_part(part, path) if kind in TEXTS else {"type": kind})
    return parts


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
    return {"type": "text", "text": fields.required_text(TEXTS[kind])}
