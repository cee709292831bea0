"""
The common part of fake vLLM and SGLang workers: a server on a real socket, and a model that is a function.

The next token depends on all tokens before it. So an answer is the same whichever workers computed it, and it
differs if one token of the prompt was lost on the way.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton_router.server import address, bind

VOCABULARY = 50_000
END = 1
"""Token at the end of each message."""

GATE_S = 30.0


def tokenize(text: str) -> list[int]:
    return [2 + zlib.crc32(word.encode()) % VOCABULARY for word in text.split()]


def render(messages: Sequence[dict[str, Any]]) -> list[int]:
    """The prompt of a chat."""
    return [token for one in messages for token in (*tokenize(f"{one['role']} {one['content']}"), END)]


def next_token(tokens: Sequence[int]) -> int:
    return 2 + zlib.crc32(json.dumps(list(tokens)).encode()) % VOCABULARY


def generate(tokens: Sequence[int], count: int) -> list[int]:
    answer: list[int] = []
    for _ in range(count):
        answer.append(next_token([*tokens, *answer]))
    return answer


def text_of(token: int) -> str:
    return f" w{token}"


class FakeEngine:
    """`async with` it: it listens at `url` until the end, or until `die`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        """Bodies of the requests that it was sent, in the order of arrival."""
        self.headers: list[dict[str, str]] = []
        self.violations: list[str] = []
        """Violations of the engine's protocol."""
        self.left = asyncio.Event()
        """Set when a client left before its answer was complete."""
        self.gate_after: int | None = None
        """Tokens of an answer after which it waits for `gate`."""
        self.gate = asyncio.Event()
        self.at_gate = asyncio.Event()
        self.fail_with: int = 0
        """A status with which generating requests fail."""
        self.crashes = False
        """With it, the process dies of a generating request."""
        self._dying: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        listening = bind("127.0.0.1", 0)
        self.url = address(listening)
        config = uvicorn.Config(Starlette(routes=self.routes()), log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.die()

    async def die(self) -> None:
        """Close everything at once, as a killed process does."""
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        for server in self._server.servers:
            server.close()
        self._serving.cancel()  # uvicorn's own end takes up to 0.2 s, and tests end several engines
        await asyncio.wait({self._serving})

    @property
    def name(self) -> str:
        return self.url.removeprefix("http://")

    def routes(self) -> list[Route]:
        raise NotImplementedError

    async def take(self, body: dict[str, Any]) -> None:
        """Record the body of a generating request, and die of it if that is so."""
        self.bodies.append(body)
        if self.crashes:
            self._dying = asyncio.ensure_future(self.die())
            await asyncio.Event().wait()

    async def pause(self, sent: int) -> None:
        """Wait at the gate if `sent` tokens have passed."""
        if self.gate_after is not None and sent >= self.gate_after:
            self.at_gate.set()
            await asyncio.wait_for(self.gate.wait(), GATE_S)


async def health(request: Request) -> Response:
    return Response()


def error(status: int, message: str, kind: str = "BadRequestError") -> JSONResponse:
    """An error in vLLM's shape."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)
