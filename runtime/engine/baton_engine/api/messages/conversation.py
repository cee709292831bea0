"""
Translation of Anthropic's messages to chat messages.

A user's message may contain results of tools, which chat has as messages of their own. Consecutive messages
of one role are joined, as in Anthropic's API. Each chat message records the path of its source, so that
errors of chat refer to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from baton_api import limits
from baton_api.errors import EMPTY_ARRAY, UNSUPPORTED_PARAMETER, InvalidRequest
from baton_engine.api.fields import Fields, shown, wrong_type

ROLES = ("user", "assistant", "system")
UNREADABLE = "the model supports text only"
UNSUPPORTED_BLOCKS = {
    "image": UNREADABLE,
    "document": f"{UNREADABLE}. Send the document's text as a text block",
    "redacted_thinking": "the encrypted reasoning of another service cannot be read. Remove the block",
}
"""Types of blocks that cannot be served, with the reason."""

ChatMessage = dict[str, Any]


@dataclass(slots=True)
class TranslatedMessages:
    """Chat messages, and the path of the source of each."""

    messages: list[ChatMessage] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def add(self, message: ChatMessage, source: str) -> None:
        self.messages.append(message)
        self.sources.append(source)

    def of_role(self, role: str, source: str) -> ChatMessage:
        """Return the last message if it has this role, otherwise a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.add({"role": role, "content": []}, source)
        return self.messages[-1]

    @property
    def continued(self) -> bool:
        """Whether the answer continues the assistant's last message."""
        return bool(self.messages[-1]["role"] == "assistant")


def read(fields: Fields) -> TranslatedMessages:
    """Translate `system` and `messages`. Raises InvalidRequest."""
    conversation = TranslatedMessages()
    if fields.get("system") is not None:
        conversation.add({"role": "system", "content": _texts(fields, "system")}, "system")
    fields.require("messages")
    items = fields.array("messages", limits.MESSAGES.most)
    if not items:
        raise _empty("messages", "message")
    for position, item in enumerate(items):
        path = f"messages[{position}]"
        if not isinstance(item, dict):
            raise wrong_type(path, "an object", item)
        _add(conversation, Fields(item, path))
    last = conversation.messages[-1]
    if last.get("tool_calls"):
        raise InvalidRequest(
            f"Invalid '{conversation.sources[-1]}': the last message calls tools. "
            "Add a user's message with a 'tool_result' for each 'tool_use'.",
            param=conversation.sources[-1],
        )
    return conversation


def _add(conversation: TranslatedMessages, message: Fields) -> None:
    message.require("role")
    role = message.choice("role", ROLES)
    content = message.require("content")
    if role == "system":
        conversation.add({"role": "system", "content": _texts(message, "content")}, message.param("content"))
        return
    add = _add_assistant_block if role == "assistant" else _add_user_block
    if isinstance(content, str):
        add(conversation, Fields({"type": "text", "text": content}, message.param("content")))
        return
    blocks = message.array("content", limits.PARTS.most) or ()
    if role == "assistant":
        conversation.of_role("assistant", message.param("content"))  # even without blocks
    elif not blocks:
        raise _empty(message.param("content"), "block")
    for position, block in enumerate(blocks):
        path = message.param(f"content[{position}]")
        if not isinstance(block, dict):
            raise wrong_type(path, "an object", block)
        add(conversation, Fields(block, path))


def _add_user_block(conversation: TranslatedMessages, block: Fields) -> None:
    """Add a block of a user's message."""
    kind, path = block.require("type"), block.path
    if kind == "text":
        conversation.of_role("user", path)["content"].append(_text_part(block))
    elif kind == "tool_result":
        result = "" if block.get("content") is None else _texts(block, "content")
        call = _text(block, "tool_use_id")
        block.boolean("is_error")
        conversation.add({"role": "tool", "tool_call_id": call, "content": result}, path)
    else:
        raise _unsupported(block, kind)


def _add_assistant_block(conversation: TranslatedMessages, block: Fields) -> None:
    """Add a block of the assistant's message."""
    kind, message = block.require("type"), conversation.of_role("assistant", block.path)
    if kind == "text":
        message["content"].append(_text_part(block))
    elif kind == "thinking":
        thought = _text(block, "thinking")
        message["reasoning_content"] = "\n".join(filter(None, (message.get("reasoning_content"), thought)))
    elif kind == "tool_use":
        block.require("input")
        function = {"name": _text(block, "name"), "arguments": block.mapping("input")}
        call = {"id": _text(block, "id"), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
    else:
        raise _unsupported(block, kind)


def finished(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with plain text where it is the only content; templates know it best."""
    return [message | {"content": _simplest(message)} for message in messages]


def _simplest(message: ChatMessage) -> Any:
    content = message["content"]
    if isinstance(content, str):
        return content
    if not content:
        return None if message.get("tool_calls") else ""
    return content[0]["text"] if len(content) == 1 else content


def _texts(fields: Fields, name: str) -> str | list[dict[str, str]]:
    """Read a string, or an array of text blocks."""
    value = fields.require(name)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        fields.wrong_type(name, "a string or an array of text blocks", value)
    parts = []
    for position, block in enumerate(fields.array(name, limits.PARTS.most) or ()):
        path = fields.param(f"{name}[{position}]")
        if not isinstance(block, dict):
            raise wrong_type(path, "an object", block)
        inner = Fields(block, path)
        kind = inner.require("type")
        if kind != "text":
            raise _unsupported(inner, kind)
        parts.append(_text_part(inner))
    return parts or ""


def _text_part(block: Fields) -> dict[str, str]:
    return {"type": "text", "text": _text(block, "text")}


def _text(fields: Fields, name: str) -> str:
    fields.require(name)
    text = fields.text(name)
    assert text is not None
    return text


def _unsupported(block: Fields, kind: object) -> InvalidRequest:
    reason = UNSUPPORTED_BLOCKS.get(kind, "") if isinstance(kind, str) else ""
    param = block.param("type")
    return InvalidRequest(
        f"Unsupported '{param}': blocks of type {shown(kind)} are not served here"
        + (f", because {reason}." if reason else "."),
        param=param,
        code=UNSUPPORTED_PARAMETER,
    )


def _empty(param: str, item: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid '{param}': empty array. Expected at least 1 {item}.", param=param, code=EMPTY_ARRAY
    )
