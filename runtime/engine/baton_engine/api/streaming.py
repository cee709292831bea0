"""
Server-sent events, and the `usage` object of answers and streams.

Events follow https://html.spec.whatwg.org/multipage/server-sent-events.html. `usage` always has both details
objects, because clients read them without a check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from baton_api.errors import BatonError


@dataclass(frozen=True, slots=True)
class Streaming:
    """`stream` and `stream_options` of a request."""

    wanted: bool = False
    include_usage: bool = False
    continuous_usage: bool = False

    def event(self, envelope: dict[str, Any], usage: Callable[[], Usage]) -> bytes:
        """One chunk as an event. With `include_usage`, all but the last have it as null, or as it stands."""
        if self.include_usage:
            envelope["usage"] = usage().body() if self.continuous_usage else None
        return data_event(envelope)

    def closing(self, envelope: dict[str, Any], usage: Usage) -> bytes:
        """The chunk without choices that `include_usage` asks for, and the end."""
        if not self.include_usage:
            return DONE
        return data_event(envelope | {"usage": usage.body()}) + DONE


DONE = b"data: [DONE]\n\n"
"""Ends a stream of chunks: what comes without it was cut."""

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip."""

FAILURE = "baton.failure"
"""The entry of an ASGI scope that is asked for the event with which a stream breaks."""


def data_event(body: object) -> bytes:
    """One event of a stream of chunks."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_event(error: BatonError) -> bytes:
    """The event after which a stream of chunks does not go on."""
    return data_event(error.body())


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    """Each prompt counts once, however many choices it has."""
    completion_tokens: int
    """Of all choices, the tokens that ended them included."""
    cached_tokens: int
    reasoning_tokens: int = 0
    """Of the completion's, those up to the end of its thoughts, the marks included."""

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }
