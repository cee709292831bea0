"""
The router's own answers: JSON, the request's id on each, and errors in OpenAI's shape.

Every error that the router words itself passes through here; a worker's answers do not, they pass as
they are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from baton_api.errors import BatonError
from baton_router.forward import REQUEST_ID

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_encoder = msgspec.json.Encoder()


async def send_error(send: Send, error: BatonError, request_id: bytes, close: bool = False) -> None:
    """`error` as the whole answer; `close` ends the connection after it, as when a body was not read."""
    body = _encoder.encode(error.body())
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (REQUEST_ID, request_id),
                *([(b"connection", b"close")] if close else []),
                *((name.encode(), value.encode()) for name, value in error.headers.items()),
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})
