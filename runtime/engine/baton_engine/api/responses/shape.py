"""The response object, whole or as the stream of events by which it comes about."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_api.errors import BatonError
from baton_engine.api.answer_shape import Choice
from baton_engine.api.parsing.parts import Part, merged
from baton_engine.api.responses.output import Events, MessageLogprobs, Output
from baton_engine.api.streaming import Usage
from baton_engine.api.transcript import Piece
from baton_engine.requests import FinishReason


def new_id() -> str:
    return f"resp_{uuid.uuid4().hex}"


@dataclass(slots=True, kw_only=True)
class ResponseShape:
    """One response; `n` does not exist here."""

    model: str
    echo: dict[str, Any]
    """What it repeats of the request."""
    events_of: Events
    output: Output
    logprobs: MessageLogprobs | None
    keep: Callable[[dict[str, Any]], None]
    """Given the response once it is complete."""
    id: str = field(default_factory=new_id)
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: bool = False
    _finish: FinishReason | None = None

    def events(self, choice: Choice, piece: Piece, usage: Callable[[], Usage]) -> bytes:
        if not self._begun:
            self._begun = True
            for kind in ("response.created", "response.in_progress"):
                self.events_of.add(kind, {"response": self._body("in_progress")})
        self._take(piece, piece.parts)
        return self.events_of.take()

    def closing(self, usage: Usage) -> bytes:
        body = self._complete(usage)
        self.events_of.add(f"response.{body['status']}", {"response": body})
        return self.events_of.take()

    def answer(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        _, whole = choices[0]
        self._take(whole, merged(whole.parts))
        return self._complete(usage)

    def failure(self, error: BatonError) -> bytes:
        """The last event of a stream that breaks, with the most general of OpenAI's codes for that."""
        said = {"code": "server_error", "message": error.message}
        self.events_of.add("response.failed", {"response": self._body("failed", error=said)})
        return self.events_of.take()

    def _take(self, piece: Piece, parts: Sequence[Part]) -> None:
        if self.logprobs is not None:
            self.logprobs.saw(piece)
        self.output.push(parts)
        self._finish = piece.finish

    def _complete(self, usage: Usage) -> dict[str, Any]:
        cut = self._finish is FinishReason.LENGTH
        status = "incomplete" if cut else "completed"
        self.output.close(status)
        body = self._body(status, usage=_usage(usage))
        if cut:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            body["completed_at"] = int(time.time())
        self.keep(body)
        return body

    def _body(self, status: str, **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": self.output.items,
            "service_tier": "default",
            "usage": None,
            **self.echo,
            **more,
        }


def _usage(usage: Usage) -> dict[str, Any]:
    body = usage.body()
    return {
        "input_tokens": body["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": body["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": body["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": body["completion_tokens_details"]["reasoning_tokens"],
        },
        "total_tokens": body["total_tokens"],
    }
