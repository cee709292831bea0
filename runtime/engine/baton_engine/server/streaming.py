"""Whether an answer is streamed, and the usage figures that a stream of chunks carries then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton_engine.server.events import DONE, data_event
from baton_engine.server.usage import Usage


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
