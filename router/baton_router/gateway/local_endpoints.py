"""
Paths that the router answers itself, also through a gateway: models, health, version.

A worker knows its own model only. The answer goes to the gateway as an immediate response.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from baton_http.replies import Receive, Scope, Send
from baton_http.upstream import Headers
from baton_router.gateway import messages
from baton_router.gateway.messages import ProcessingResponse

PATHS = frozenset({"/v1/models", "/health", "/ready", "/ping", "/version", "/openapi.json"})
MODEL = "/v1/models/"


class LocalEndpoints:
    """Passes requests to the router's own application."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    def has(self, method: str, path: str) -> bool:
        """Whether the router answers it."""
        return method == "GET" and (path in PATHS or path.startswith(MODEL))

    async def answer(self, scope: Scope) -> ProcessingResponse:
        """The application's response to a request without a body."""
        status, fields, body = 0, [], bytearray()

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status, fields
            if message["type"] == "http.response.start":
                status, fields = message["status"], message["headers"]
            else:
                body.extend(message.get("body", b""))

        await self._app(scope, receive, send)
        given: Headers = [(name, value) for name, value in fields if name != b"content-length"]
        return messages.immediate(status, bytes(body), given)
