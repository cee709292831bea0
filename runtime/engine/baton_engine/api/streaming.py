"""
Server-sent events, and the `usage` object of responses.

Events follow https://html.spec.whatwg.org/multipage/server-sent-events.html. `usage` always has both details
objects, because clients read them without a check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from baton_api.errors import BatonError
from baton_api.json_text import on_one_line


@dataclass(frozen=True, slots=True)
class Streaming:
    """`stream` and `stream_options` of a request."""

    wanted: bool = False
    include_usage: bool = False
    continuous_usage: bool = False

    def event(self, envelope: dict[str, Any], usage: Callable[[], Usage]) -> bytes:
        """Encode one chunk. With `include_usage`, chunks have a null usage, or the current one."""
        if self.include_usage:
            envelope["usage"] = usage().body() if self.continuous_usage else None
        return data_event(envelope)

    def closing(self, envelope: dict[str, Any], usage: Usage) -> bytes:
        """Return the end of the stream, with a usage chunk before it for `include_usage`."""
        if not self.include_usage:
            return DONE
        return data_event(envelope | {"usage": usage.body()}) + DONE


DONE = b"data: [DONE]\n\n"
"""End of a stream of chunks. A stream without it is incomplete."""

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients ignore."""

FAILURE = "baton.failure"
"""Entry of an ASGI scope: the function that encodes the error event of a stream."""


def data_event(body: object) -> bytes:
    """Encode one event of a stream of chunks."""
    return b"data: " + on_one_line(msgspec.json.encode(body)) + b"\n\n"


def error_event(error: BatonError) -> bytes:
    """Encode the error event that ends a stream of chunks."""
    return data_event(error.body())


HOLE = msgspec.Raw(b"\0")
"""Stands for the text of `TextEvents`. JSON has no such byte."""


class TextEvents:
    """Events of one stream that differ in one text: the rest is encoded once."""

    __slots__ = ("_after", "_before")

    def __init__(self, event: bytes) -> None:
        """`event` has a `HOLE`."""
        self._before, self._after = event.split(b"\0")

    def event(self, text: str) -> bytes:
        return self._before + on_one_line(msgspec.json.encode(text)) + self._after


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    """Tokens of all prompts; each prompt counts once, independent of its number of choices."""
    completion_tokens: int
    """Tokens of all choices, including their end tokens."""
    cached_tokens: int
    peer_tokens: int = 0
    """Those of the cached tokens that were read from the cache of another worker."""
    tier_tokens: Sequence[tuple[str, int]] = ()
    """Those that were restored, by tier. A tier may occur several times."""
    reasoning_tokens: int = 0
    """Completion tokens up to the end of the reasoning, including the marks."""
    accepted_prediction_tokens: int = 0
    """Tokens of the request's `prediction` that the choices contain."""
    rejected_prediction_tokens: int = 0
    """The other tokens of `prediction`, for each choice. They are not completion tokens."""

    @property
    def by_source(self) -> dict[str, Any]:
        """The member that splits the cached tokens by their source; empty if all were in the pool."""
        elsewhere = Counter({"peer": self.peer_tokens} if self.peer_tokens else {})
        for tier, tokens in self.tier_tokens:
            elsewhere[tier] += tokens
        if not elsewhere:
            return {}
        return {"cached_tokens_by_source": {"local": self.cached_tokens - elsewhere.total(), **elsewhere}}

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "audio_tokens": 0,
                **self.by_source,
            },
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "audio_tokens": 0,
                "accepted_prediction_tokens": self.accepted_prediction_tokens,
                "rejected_prediction_tokens": self.rejected_prediction_tokens,
            },
        }
