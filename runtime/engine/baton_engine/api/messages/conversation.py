"""
Translation of Anthropic's messages to chat messages.

A user's message may contain results of tools, which chat has as messages of their own. Consecutive messages
of one role are joined, as in Anthropic's API. Each chat message records the path of its source, so that
errors of chat refer to it.

Agents send back everything that a service answered, and cannot leave parts of it out. Blocks that only their
own service can read are therefore skipped. An image in a tool's result becomes a note, because the agent has
not chosen it; an image of the user is rejected.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from baton_api import limits
from baton_api.errors import EMPTY_ARRAY, UNSUPPORTED_PARAMETER, InvalidRequest
from baton_engine.api.chat.messages import unreadable_note
from baton_engine.api.fields import Fields, shown, wrong_type

ROLES = ("user", "assistant", "system")
UNREADABLE = "the model supports text only"
UNSUPPORTED_BLOCKS = {
    "image": UNREADABLE,
    "document": f"{UNREADABLE}. Send the document's text as a text block",
}
"""Types of blocks that cannot be served, with the reason."""
SKIPPED_BLOCKS = ("redacted_thinking", "container_upload", "fallback", "mcp_tool_listing")
"""Types of blocks without text for this model, besides those of `_skipped`."""
SKIPPED_SUFFIXES = ("_tool_use", "_tool_result")
"""Ends of the types of calls that ran at Anthropic, such as `server_tool_use`, and of their results."""
SKIPPED_CHANGES = ("tool_addition", "tool_removal")
"""Types of blocks that change the tools during a conversation. All tools of a request are offered anyway."""
ATTRIBUTION = "x-anthropic-billing-header:"
"""Start of a system block of Claude Code for Anthropic's accounting. It is no instruction, and differs from
request to request, so that no prefix of the prompt would be cached."""

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
        _add_system(conversation, fields, "system")
    fields.require("messages")
    items = fields.array("messages", limits.MESSAGES.most)
    if not items:
        raise _empty("messages", "message")
    for position, item in enumerate(items):
        path = f"messages[{position}]"
        if not isinstance(item, dict):
            raise wrong_type(path, "an object", item)
        _add(conversation, Fields(item, path))
    if not any(message["role"] != "system" for message in conversation.messages):
        fields.wrong_value("messages", "they contain nothing that this model can read")
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
        _add_system(conversation, message, "content")
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


def _add_system(conversation: TranslatedMessages, fields: Fields, name: str) -> None:
    """Add a system message, unless all of its blocks are skipped."""
    content = _texts(fields, name)
    if isinstance(content, str):
        kept: str | list[dict[str, str]] = "" if content.startswith(ATTRIBUTION) else content
    else:
        kept = [part for part in content if not part["text"].startswith(ATTRIBUTION)]
    if kept or not fields.get(name):
        conversation.add({"role": "system", "content": kept or ""}, fields.param(name))


def _add_user_block(conversation: TranslatedMessages, block: Fields) -> None:
    """Add a block of a user's message."""
    kind, path = block.require("type"), block.path
    if _skipped(kind):
        return
    if kind in TEXT_BLOCKS:
        conversation.of_role("user", path)["content"].append(_text_part(block))
    elif kind == "tool_result":
        result = "" if block.get("content") is None else _texts(block, "content", noted=True)
        call = _text(block, "tool_use_id")
        block.boolean("is_error")
        conversation.add({"role": "tool", "tool_call_id": call, "content": result}, path)
    else:
        raise _unsupported(block, kind)


def _add_assistant_block(conversation: TranslatedMessages, block: Fields) -> None:
    """Add a block of the assistant's message."""
    kind, message = block.require("type"), conversation.of_role("assistant", block.path)
    if _skipped(kind):
        return
    if kind in TEXT_BLOCKS or kind == "compaction":
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


def _texts(fields: Fields, name: str, *, noted: bool = False) -> str | list[dict[str, str]]:
    """Read a string, or an array of blocks. With `noted`, a note stands for what the model cannot read."""
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
        if _skipped(kind):
            continue
        if noted and (kind not in TEXT_BLOCKS or (kind == "document" and not _readable(inner))):
            parts.append({"type": "text", "text": unreadable_note(kind)})
        elif kind in TEXT_BLOCKS:
            parts.append(_text_part(inner))
        else:
            raise _unsupported(inner, kind)
    return parts or ""


TEXT_BLOCKS = ("text", "document", "search_result", "tool_reference")
"""Types of blocks that have text, or whose source may be text."""


def _text_part(block: Fields) -> dict[str, str]:
    match block.get("type"):
        case "document":
            if not _readable(block):
                raise _unsupported(block, "document")
            source = Fields(block.mapping("source") or {}, block.param("source"))
            words = (
                _texts(source, "content", noted=True)
                if source.get("type") == "content"
                else _text(source, "data")
            )
            lines = [block.text("title"), block.text("context"), *_lines(words)]
        case "search_result":
            lines = [block.text("title"), block.text("source"), *_lines(_texts(block, "content"))]
        case "tool_reference":
            lines = [_text(block, "tool_name")]
        case "compaction":
            lines = [block.text("content")]
        case _:
            return {"type": "text", "text": _text(block, "text")}
    return {"type": "text", "text": "\n".join(filter(None, lines))}


def _lines(content: str | list[dict[str, str]]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _readable(document: Fields) -> bool:
    """Return whether the source of a document is text."""
    return (document.mapping("source") or {}).get("type") in ("text", "content")


def _skipped(kind: object) -> bool:
    """Return whether a block of this type is skipped, because it has nothing for this model."""
    return isinstance(kind, str) and (
        kind in SKIPPED_BLOCKS or kind in SKIPPED_CHANGES or kind.endswith(SKIPPED_SUFFIXES)
    )


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
