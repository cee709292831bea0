"""The handler of endpoints that answer at once: a JSON object in, a JSON object out, no engine between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from baton_engine.server import bodies
from baton_engine.server.disconnect import until_disconnect
from baton_engine.server.fields import Fields
from baton_engine.server.served import Served


class Call:
    """One endpoint, told apart by `work`, which runs on a thread of its own."""

    def __init__(self, served: Served, work: Callable[[Fields, Served], Any]) -> None:
        self._served = served
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await bodies.read(scope, receive)
        async with until_disconnect(receive):
            encoded = await asyncio.to_thread(self._answer, body)
        await send_json(encoded, send)

    def _answer(self, body: bytes) -> bytes:
        return msgspec.json.encode(self._work(bodies.parse(body), self._served))


async def send_json(encoded: bytes, send: Send) -> None:
    """`encoded` as the whole answer, with status 200."""
    fields = [(b"content-type", b"application/json"), (b"content-length", str(len(encoded)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    await send({"type": "http.response.body", "body": encoded})
