"""
A request as it came, with what it is routed by: the model, and the prompt in chunks.

The body stays the bytes that it was. What is read of it serves the choice of workers alone, so a body
that makes no sense is none of the router's business: it goes to a worker, which says so in its own words.
"""

from __future__ import annotations

import array
from typing import Any

import msgspec

from baton_api.errors import InvalidRequest
from baton_router import prompt_chunks
from baton_router.answers import Scope
from baton_router.following import FollowedStream
from baton_router.prompt_chunks import Message, Prompt
from baton_router.sse import EventStream, ResponseStream
from baton_router.upstream import Headers

NOTHING = Prompt((), ())

CHAT = "/v1/chat/completions"

STREAMS: dict[str, type[EventStream]] = {
    CHAT: FollowedStream,
    "/v1/completions": FollowedStream,
    "/generate": EventStream,
    "/v1/responses": ResponseStream,
}
"""Paths whose streams end with something; others end with the last byte."""

_ABSENT = msgspec.Raw(b"")


class Body(msgspec.Struct):
    """The fields of a body that decide where it goes."""

    model: Any = None
    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT


class Chat(msgspec.Struct):
    """The same of a conversation as it should be."""

    messages: list[Message]
    model: str | None = None
    tools: msgspec.Raw = _ABSENT


_body = msgspec.json.Decoder(Body)
_chat = msgspec.json.Decoder(Chat)
_messages = msgspec.json.Decoder(list[Message])


class Asked:
    """One request. Raises InvalidRequest if its body is not JSON."""

    __slots__ = ("body", "events", "headers", "model", "prompt", "target")

    def __init__(self, scope: Scope, body: bytes) -> None:
        query = scope["query_string"]
        self.target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
        self.headers: Headers = scope["headers"]
        self.body = body
        path = scope["path"]
        self.model, self.prompt = _conversation(body) if path == CHAT else _any(body)
        self.events = STREAMS.get(path)

    @property
    def followed(self) -> bool:
        """Whether the worker is to say what another one would need to go on with the answer."""
        return self.events is FollowedStream


def _conversation(body: bytes) -> tuple[str | None, Prompt]:
    """The model and the prompt, in one pass over the body."""
    try:
        chat = _chat.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _any(body)  # says what is wrong, if it is not JSON
    root = prompt_chunks.root_name("", chat.model or "")
    return chat.model, prompt_chunks.of_messages(chat.messages, chat.tools, root)


def _any(body: bytes) -> tuple[str | None, Prompt]:
    """The model and the prompt of whatever shape."""
    try:
        read = _body.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"We could not parse the JSON body of your request: {error}.") from error
    except RecursionError as error:
        raise InvalidRequest("The JSON body of your request is nested too deeply.") from error
    model = read.model if isinstance(read.model, str) else None
    return model, _prompt(read, prompt_chunks.root_name("", model or ""))


def _prompt(body: Body, root: int) -> Prompt:
    if body.messages:
        try:
            return prompt_chunks.of_messages(_messages.decode(body.messages), body.tools, root)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return prompt_chunks.of_text(bytes(body.messages), root)
    given = body.prompt or body.input
    return prompt_chunks.of_text(_text(given), root) if given else NOTHING


def _text(given: msgspec.Raw) -> bytes:
    """A prompt's text; of several the first one's, since the others share no prefix with what follows it."""
    try:
        prompt: Any = msgspec.json.decode(given)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return bytes(given)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode(errors="replace")
    try:
        return array.array("I", prompt).tobytes()  # token ids: four bytes each, as text has on average
    except (TypeError, OverflowError, ValueError):
        return bytes(given)
