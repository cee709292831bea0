"""
How a template wants its messages: learnt by trying it, not by its name.

Templates differ in whether content may be a list of parts, whether the arguments of a call are an object or
JSON text, what content a message with nothing but calls has, and how long the ids of calls are. Each of
these is one short conversation that the template renders or fails to render.
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

CONTENT_TEXT = "what was said"
USER = {"role": "user", "content": CONTENT_TEXT}
CALL_ID = "call_0123456789abcdef"
SHORT_ID = 9
"""Characters of a call's id in the templates that want no others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What one template takes."""

    texts: bool = True
    """Content as a string."""
    parts: bool = False
    """Content as a list of parts."""
    developer: bool = False
    """The role `developer`; it is `system` elsewhere."""
    objects: bool = True
    """Arguments of a call as an object; else as JSON text."""
    silence: str | None = ""
    """The content of a message that has nothing but calls."""
    short_ids: bool = False

    def adapt(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages as the template takes them: see `baton_engine.api.chat.messages` for what is given."""
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
            adapted["thinking"] = adapted["reasoning"] = thought  # the names of other templates
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
    """The dialect of a template; `specials` are the tokenizer's special tokens by name. Raises Exhausted."""

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
    """The first way, the most common one first, in which a call and its arguments are shown."""
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
        raise  # as all other tries would be, one after another
    except TemplateError:
        return ""
