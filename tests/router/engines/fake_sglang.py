"""
An SGLang worker in disaggregation mode that follows the protocol of its bootstrap sessions.

There is no SGLang for CPUs in the package index: this fake checks the fields that
`sglang_router/mini_lb.py` sends. Workers of one test share `sessions`: the prefill worker puts a prompt's
tokens there, the decode worker waits.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.router.engines.fake_engine import FakeEngine, error, generate, health, render, text_of

BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
TRANSFER_S = 20.0


class Sessions:
    """The KV caches on their way, by session (`bootstrap_room`)."""

    def __init__(self) -> None:
        self._sessions: defaultdict[int, asyncio.Future[list[int]]] = defaultdict(
            asyncio.get_running_loop().create_future
        )

    def send(self, session: int, prompt: list[int]) -> None:
        self._sessions[session].set_result(prompt)

    async def receive(self, session: int) -> list[int]:
        return await asyncio.wait_for(self._sessions[session], TRANSFER_S)


class FakeSglang(FakeEngine):
    """One worker in the given `mode`: null, prefill or decode."""

    def __init__(
        self, sessions: Sessions | None = None, *, mode: str = "null", bootstrap_port: int = 8998
    ) -> None:
        super().__init__()
        self.sessions = sessions
        self.mode = mode
        self.bootstrap_port = bootstrap_port

    def routes(self) -> list[Route]:
        return [
            Route("/health", health),
            Route("/server_info", lambda _: JSONResponse(self._info())),
            Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "tiny", "max_model_len": 8192}]})),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]

    def _info(self) -> dict[str, Any]:
        return {
            "model_path": "/models/tiny",
            "served_model_name": "tiny",
            "version": "0.5.23",
            "disaggregation_mode": self.mode,
            "disaggregation_bootstrap_port": self.bootstrap_port,
            "disaggregation_transfer_backend": "nixl",
            "page_size": 1,
            "kv_cache_dtype": "auto",
            "max_total_num_tokens": 1000,
        }

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        await self.take(body)
        self.headers.append(dict(request.headers))
        if self.fail_with:
            return error(self.fail_with, "It failed.", "InternalServerError")
        if self.mode == "null":
            if any(name in body for name in BOOTSTRAP):
                self.violations.append("a session for a worker without a pair")
            return self._answer(body, render(body["messages"]))
        session = body.get("bootstrap_room")
        if (
            type(session) is not int
            or not 0 <= session < 2**63
            or body.get("bootstrap_host") != "127.0.0.1"
            or type(body.get("bootstrap_port")) is not int
        ):
            self.violations.append(f"no session: {[body.get(name) for name in BOOTSTRAP]}")
            return error(400, "bootstrap_room is missing")
        assert self.sessions is not None
        if self.mode == "prefill":
            if body["bootstrap_port"] != self.bootstrap_port:
                self.violations.append(f"the bootstrap port {body['bootstrap_port']}")
            await self.pause(0)
            prompt = render(body["messages"])
            self.sessions.send(session, prompt)
            return self._answer({**body, "max_tokens": 1}, prompt)
        return self._answer(body, await self.sessions.receive(session))

    def _answer(self, body: dict[str, Any], prompt: list[int]) -> Response:
        answer = generate(prompt, body.get("max_tokens", 8))
        head = {"id": "x", "object": "chat.completion", "created": 17, "model": "tiny"}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(answer)}
        if body.get("stream"):
            return StreamingResponse(self._stream(head, answer), media_type="text/event-stream")
        message = {"role": "assistant", "content": "".join(map(text_of, answer))}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        return JSONResponse({**head, "choices": [choice], "usage": usage})

    async def _stream(self, head: dict[str, Any], answer: list[int]) -> AsyncIterator[str]:
        for number, token in enumerate(answer, 1):
            choice = {"index": 0, "delta": {"content": text_of(token)}, "finish_reason": None}
            if number == len(answer):
                choice["finish_reason"] = "length"
            chunk = {**head, "object": "chat.completion.chunk", "choices": [choice]}
            yield f"data: {json.dumps(chunk)}\n\n"
            await self.pause(number)
        yield "data: [DONE]\n\n"
