"""
The message format that a chat template expects, determined by test renderings.

Templates differ in the format of content (text or a list of parts) and of arguments (an object or JSON text).
They also differ in the content of messages with calls only, and in the length of call ids. For each point,
the template renders a short conversation, and the result shows whether it supports the format.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton_engine.api.chat.template.sandbox import Exhausted, Program, TemplateError

Message = Mapping[str, Any]

CONTENT_TEXT = "a short text"
USER = {"role": "user", "content": CONTENT_TEXT}
CALL_ID = "call_0123456789abcdef"
SHORT_ID = 9
"""Characters of a call's id in templates that require short ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Message format of one template."""

    texts: bool = True
    """Whether content may be a string."""
    parts: bool = False
    """Whether content may be a list of parts."""
    developer: bool = False
    """Whether the role `developer` is supported; otherwise it becomes `system`."""
    objects: bool = True
    """Whether the arguments of a call are an object; otherwise JSON text."""
    silence: str | None = ""
    """Content of a message with calls only."""
    short_ids: bool = False

    def adapt(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Convert the messages of `baton_engine.api.chat.messages` to the template's format."""
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> dict[str, Any]:
        adapted = dict(message)
        if adapted["role"] == "developer" and not self.developer:
            adapted["role"] = "system"
        adapted["content"] = self._content(message.get("content"))
        if calls := message.get("tool_calls"):
            adapted["tool_calls"] = [self._call(call) for call in calls]
        if "tool_call_id" in message:
            adapted["tool_call_id"] = self._id(message["tool_call_id"])
        if thought := message.get("reasoning_content"):
            adapted["thinking"] = adapted["reasoning"] = thought  # names that other templates use
        return adapted

    def _content(self, content: str | Sequence[str] | None) -> Any:
        if content is None:
            return self.silence
        if isinstance(content, str):
            return content if self.texts else [{"type": "text", "text": content}]
        return [{"type": "text", "text": text} for text in content] if self.parts else "\n".join(content)

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if not self.objects:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {
            "id": self._id(call["id"]),
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments},
        }

    def _id(self, given: str) -> str:
        if not self.short_ids or (len(given) == SHORT_ID and given.isalnum() and given.isascii()):
            return given
        return hashlib.blake2b(given.encode(errors="replace"), digest_size=8).hexdigest()[:SHORT_ID]


@functools.lru_cache(maxsize=64)
def learn(program: Program, specials: tuple[tuple[str, str], ...]) -> Dialect:
    """Determine the dialect of a template. `specials` are special tokens by name. Raises Exhausted."""

    def shows(messages: Sequence[Message], *texts: str) -> bool:
        return all(text in _rendered(program, messages, specials) for text in texts)

    parts = [{"role": "user", "content": [{"type": "text", "text": CONTENT_TEXT}]}]
    takes_parts = shows(parts, CONTENT_TEXT) and "'type'" not in _rendered(program, parts, specials)
    dialect = Dialect(
        texts=shows([USER], CONTENT_TEXT) or not takes_parts,
        parts=takes_parts,
        developer="developer" in program.source,
    )
    return _learn_calls(dialect, shows)


def _learn_calls(dialect: Dialect, shows: Callable[..., bool]) -> Dialect:
    """Return the first dialect, most common ones first, with which a call and its arguments are rendered."""
    for short_ids in (False, True):
        for objects in (True, False):
            for silence in ("", None):
                way = Dialect(
                    texts=dialect.texts,
                    parts=dialect.parts,
                    developer=dialect.developer,
                    objects=objects,
                    silence=silence,
                    short_ids=short_ids,
                )
                if shows(way.adapt(_CALLED), "look_up", "first_key"):
                    return way
    return dialect


_CALLED: Sequence[Message] = (
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": CALL_ID, "function": {"name": "look_up", "arguments": {"first_key": "a value"}}},
        ],
    },
    {"role": "tool", "tool_call_id": CALL_ID, "name": "look_up", "content": "a result"},
)


def _rendered(program: Program, messages: Sequence[Message], specials: tuple[tuple[str, str], ...]) -> str:
    variables = {
        "messages": messages,
        "tools": None,
        "documents": None,
        "add_generation_prompt": False,
        **dict(specials),
    }
    try:
        return program.run(variables)
    except Exhausted:
        raise  # further renderings would exceed the limits as well
    except TemplateError:
        return ""
