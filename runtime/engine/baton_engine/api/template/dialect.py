"""
The message format that a chat template expects, determined by test renderings.

Templates differ in the format of content (text or a list of parts) and of arguments (an object or JSON text),
in the content of messages with calls only, and in the length of call ids. Some want one system message at
the beginning or none, or that users and assistants alternate, while agents send several of each. For each
point, the template renders a short conversation, and the result shows whether it supports the format.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton_engine.api.template.sandbox import Exhausted, Program, TemplateError

Message = Mapping[str, Any]

CONTENT_TEXT = "a short text"
USER = {"role": "user", "content": CONTENT_TEXT}
SYSTEM = {"role": "system", "content": "a rule"}
LATER = {"role": "system", "content": "one more rule"}
ANSWER = {"role": "assistant", "content": "an answer"}
FURTHER = {"role": "user", "content": "something else"}
BROKEN_ARGUMENTS = "no object"
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
    broken: bool = False
    """Whether arguments may be text where they are an object; otherwise text becomes an empty object."""
    opening: bool = True
    """Whether the first message may be the system's."""
    later: bool = True
    """Whether further messages may be the system's."""
    repeated: bool = True
    """Whether a user's message may follow another one."""

    def adapt(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Convert the messages of `baton_engine.api.chat.messages` to the template's format."""
        if not (self.opening and self.later):
            messages = _in_users_turns(messages, self.opening)
        if not self.repeated:
            messages = _alternating(messages)
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
        if isinstance(arguments, str):
            arguments = arguments if self.broken or not self.objects else {}
        elif not self.objects:
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


SYSTEM_ROLES = ("system", "developer")


def _in_users_turns(messages: Sequence[Message], opening: bool) -> list[Message]:
    """
    Move system messages into the user's turns: into the one before, or else the one after.

    With `opening`, those at the beginning become one system message instead. A message never moves away from
    its place when the conversation grows, so that the prompt's prefix stays in the cache.
    """
    placed: list[Message] = []
    for message in messages:
        if message["role"] in SYSTEM_ROLES:
            if opening and all(before["role"] in SYSTEM_ROLES for before in placed):
                placed = [_joined(*placed, message)]
                continue
            message = {"role": "user", "content": message["content"], "moved": True}
        last = placed[-1] if placed else {}
        if message["role"] == last.get("role") == "user" and (message.get("moved") or last.get("moved")):
            moved = {"moved": True} if last.get("moved") and message.get("moved") else {}
            placed[-1] = _joined(last, message) | moved
        else:
            placed.append(message)
    return [{name: value for name, value in message.items() if name != "moved"} for message in placed]


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive messages of the user, and of the assistant if they have nothing but text."""
    joined: list[Message] = []
    for message in messages:
        pair = (joined[-1], message) if joined else ()
        plain = all(part["role"] in ("user", "assistant") and part.keys() <= _PLAIN for part in pair)
        if pair and plain and pair[0]["role"] == message["role"]:
            joined[-1] = _joined(*pair)
        else:
            joined.append(message)
    return joined


_PLAIN = {"role", "content", "name"}


def _joined(first: Message, *others: Message) -> dict[str, Any]:
    """Join the contents of messages: a text, or a list of texts if one of them has a list."""
    content = first["content"]
    for other in others:
        more = other["content"]
        if isinstance(content, str) and isinstance(more, str):
            content = f"{content}\n\n{more}"
        else:
            content = [
                text for part in (content, more) for text in ([part] if isinstance(part, str) else part)
            ]
    return {**first, "content": content}


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
    return _learn_roles(_learn_calls(dialect, shows), shows)


def _learn_calls(dialect: Dialect, shows: Callable[..., bool]) -> Dialect:
    """Return the first dialect, most common ones first, with which a call and its arguments are rendered."""
    for short_ids in (False, True):
        for objects in (True, False):
            for silence in ("", None):
                candidate = replace(dialect, objects=objects, silence=silence, short_ids=short_ids)
                if shows(candidate.adapt(_CALLED), "look_up", "first_key"):
                    lax = replace(candidate, broken=True)
                    return lax if shows(lax.adapt(_BROKEN), "look_up", BROKEN_ARGUMENTS) else candidate
    return dialect


def _learn_roles(dialect: Dialect, shows: Callable[..., bool]) -> Dialect:
    """Determine where the template takes system messages, and whether it takes two messages of a user."""

    def takes(*messages: Message) -> bool:
        return shows(dialect.adapt(messages), *(message["content"] for message in messages))

    if not takes(USER):
        return dialect
    opening = takes(SYSTEM, USER)
    return replace(
        dialect,
        opening=opening,
        later=opening and takes(SYSTEM, USER, ANSWER, LATER) and takes(SYSTEM, LATER, USER),
        repeated=takes(USER, ANSWER, USER, FURTHER),
    )


def _called(arguments: dict[str, str] | str) -> Sequence[Message]:
    call = {"id": CALL_ID, "function": {"name": "look_up", "arguments": arguments}}
    return (
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": CALL_ID, "name": "look_up", "content": "a result"},
    )


_CALLED = _called({"first_key": "a value"})
_BROKEN = _called(BROKEN_ARGUMENTS)


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
