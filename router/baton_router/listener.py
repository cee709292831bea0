"""
How clients' connections are read: uvicorn's httptools protocol, with the limits that it lacks.

httptools collects a head of any size for any time. Here what was received and led to nothing yet is
counted, which bounds request line, headers, chunk extensions and trailers alike, and a head has a
deadline. The application finds the connection's transport in the scope, because ASGI has no word for
"cut it".
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from baton_api.errors import BatonError, HeadTooLarge, InvalidRequest
from baton_router.upstream import no_delay

TRANSPORT = "baton.transport"
"""The scope's extension that holds the client's `asyncio.Transport`."""

REFUSAL = (
    b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
)


class Listener(HttpToolsProtocol):
    """One client's connection. Subclasses made by `listener` set the limits."""

    max_header = 16 * 1024
    header_s = 10.0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._unread = 0
        """Bytes received since the parser last came to something."""
        self._head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        no_delay(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        if self._unread > self.max_header:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {TRANSPORT: {"transport": self.transport}}
        if self._head_deadline is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_arrived()
        if self._unread > self.max_header:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self.max_header:
                self._refuse_head()
                raise httptools.HttpParserError("head too large")  # nothing more of it is parsed
        self._unread = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread = 0
        super().on_message_complete()

    def _await_head(self) -> None:
        self._head_deadline = self.loop.call_later(self.header_s, self.transport.close)

    def _head_arrived(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest(msg))

    def _refuse_head(self) -> None:
        self._refuse(HeadTooLarge(self.max_header))

    def _refuse(self, error: BatonError) -> None:
        if not self.transport.is_closing():
            body = json.dumps(error.body()).encode()
            reason = HTTPStatus(error.status).phrase.encode()
            self.transport.write(REFUSAL % (error.status, reason, len(body), body))
            self.transport.close()


def listener(max_header: int, header_s: float) -> type[Listener]:
    """The protocol class with these limits, in bytes and seconds."""
    return type("BoundedListener", (Listener,), {"max_header": max_header, "header_s": header_s})
