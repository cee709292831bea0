"""An OpenAI-compatible service with scripted answers, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from baton_engine.api.http import HttpServer, RequestDrain


@dataclass
class FakeService:
    """Answers each conversation with the next of `answers`, word by word."""

    answers: list[str]
    relay: dict[str, Any] | None = None
    """The relay that `/debug/requests` reports for every answer."""
    recorded_late: bool = False
    """The first look at `/debug/requests` does not show the last answer yet."""
    hangs: bool = False
    """After the first word of an answer, nothing more comes."""
    refuses: int = 0
    """Status of `/v1/models`, if it refuses."""
    has_model: bool = True
    ends: list[str] = field(default_factory=list)
    """Finish reasons of the answers. `stop` when there are no more."""
    seen: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the requests."""
    url: str = ""

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(body)
        if not self.answers:
            return JSONResponse({"error": {"message": "Nothing left to say."}}, 503)
        return StreamingResponse(self._events(self.answers.pop(0)), media_type="text/event-stream")

    async def _events(self, answer: str) -> AsyncIterator[bytes]:
        head = {
            "id": f"chatcmpl-{len(self.seen)}",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "tiny",
        }
        words = answer.split(" ")
        for number, word in enumerate(words):
            text = word if number == 0 else f" {word}"
            yield _event(
                {**head, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
            )
            if self.hangs:
                await asyncio.Event().wait()
        reason = self.ends.pop(0) if self.ends else "stop"
        yield _event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        usage = {
            "prompt_tokens": 30,
            "completion_tokens": len(words),
            "total_tokens": 30 + len(words),
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        yield _event({**head, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    async def models(self, request: Request) -> Response:
        if self.refuses:
            return JSONResponse({"error": {"message": "Not for you."}}, self.refuses)
        model = {"id": "tiny", "object": "model", "created": 1, "owned_by": "nobody"}
        return JSONResponse({"object": "list", "data": [model] if self.has_model else []})

    async def records(self, request: Request) -> Response:
        relays = [self.relay] if self.relay else []
        seen = len(self.seen) - self.recorded_late
        self.recorded_late = False
        rows = [{"id": f"chatcmpl-{n + 1}", "relays": relays} for n in range(seen)]
        return JSONResponse({"data": rows})


@contextlib.asynccontextmanager
async def serving(service: FakeService) -> AsyncIterator[FakeService]:
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", service.chat, methods=["POST"]),
            Route("/v1/models", service.models),
            Route("/debug/requests", service.records),
        ]
    )
    async with HttpServer(app, "127.0.0.1", 0, RequestDrain()) as server:
        service.url = f"http://{server.address}"
        yield service


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
