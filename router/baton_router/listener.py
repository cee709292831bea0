"""
How clients' connections are read: uvicorn's httptools protocol, with the limits that it lacks.

httptools collects a head of any size for any time. Here what was received and led to nothing yet is
counted, which bounds request line, headers, chunk extensions and trailers alike, and a head has a
deadline. One timer for each connection looks at all that has one, so that a request sets none. The
application finds its `Cycle` in the scope, because ASGI has no word for "cut it", nor for "tell me when
the client leaves".
"""

from __future__ import annotations

import asyncio
import json
import math
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from baton_api.errors import BatonError, HeadTooLarge, InvalidRequest
from baton_router.cycle import EXTENSION, Cycle
from baton_router.upstream import no_delay

LINGER_S = 5.0
"""Seconds for which a connection without a request is kept when the process ends, if there is somewhere else
to go to: clients drop those that they have not used for as long, so no request meets a closing one."""

LOOKS = 4
"""At a connection's deadline, in the time that a head may take."""

REFUSAL = (
    b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
)


class Listener(HttpToolsProtocol):
    """One client's connection. Subclasses made by `listener` set the limits."""

    max_header = 16 * 1024
    header_s = 10.0
    leaving = False
    """Whether clients are to send their next request elsewhere: the process will end."""

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
        self._deadline = math.inf
        """Loop time at which the connection is closed, if no head, or no other request, has come."""
        self._timer: asyncio.TimerHandle | None = None
        self._answered: Cycle | None = None
        """The request that is being answered; others may have come behind it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        no_delay(transport)
        self._deadline = self.loop.time() + self.header_s
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)
        if self._answered is not None:
            self._answered.leave()

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        if self._unread > self.max_header:
            self._refuse_head()

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._deadline = min(self._deadline, self.loop.time() + self.header_s)

    def on_headers_complete(self) -> None:
        self._deadline = math.inf
        if self._unread > self.max_header:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self.max_header:
                self._refuse_head()
                raise httptools.HttpParserError("head too large")  # nothing more of it is parsed
        self._unread = 0
        parser = self.parser
        version = parser.get_http_version()
        raw_path, _, query = self.url.partition(b"?")
        if raw_path[:1] != b"/" or b"#" in self.url:
            parsed = httptools.parse_url(self.url)
            raw_path, query = parsed.path, parsed.query or b""
        path = raw_path.decode("ascii")
        extensions: dict[str, Any] = {}
        self.scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,  # type: ignore[typeddict-item]
            "method": parser.get_method().decode("ascii"),
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self.headers,
            "state": self.app_state.copy(),
            "extensions": extensions,
        }
        stays = version != "1.0" and parser.should_keep_alive() and not self.leaving
        cycle = Cycle(self, self.scope, stays)
        extensions[EXTENSION] = {"cycle": cycle}
        before = self.cycle
        self.cycle = cycle
        if before is None or before.response_complete:
            self._answered = cycle
            self._start_asgi_task(cycle, self.app)
        else:  # it waits for its turn
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._unread = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._answered = cycle  # type: ignore[assignment]  # it was made above
            self._start_asgi_task(cycle, app)
        else:
            self._deadline = self.loop.time() + self.timeout_keep_alive

    def _look(self) -> None:
        if self.loop.time() < self._deadline:
            self._timer = self.loop.call_later(self.header_s / LOOKS, self._look)
        elif not self.transport.is_closing():
            self.transport.close()

    def shutdown(self) -> None:
        if self.leaving and (self.cycle is None or self.cycle.response_complete):
            self._deadline = min(self._deadline, self.loop.time() + LINGER_S)
        else:
            super().shutdown()

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
