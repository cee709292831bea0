"""
Client connections: uvicorn's httptools protocol with limits on heads, and a short path for the proxy.

httptools accepts a head of any size over any time. This protocol counts the bytes that it received without
any progress, which bounds request line, headers, chunk extensions and trailers, and gives each head a
deadline. One timer per connection covers all of its deadlines.

ASGI passes dictionaries and checks the spelling of every header. The proxy forwards what a parser has
checked already, so it finds the `RequestCycle` in the scope and calls it: `start`, `write`, `on_gone`. Both
interfaces keep the same state: an answer may begin on one and end on the other.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from baton_api.errors import BatonError, HeadTooLarge, InvalidRequest
from baton_http.upstream import no_delay

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 16
"""Connections that are accepted in one turn of the event loop. Processes that share a listening socket share
a burst of clients in such parts."""

ACCEPT_RETRY_S = 1.0
"""Seconds until connections are accepted again after none could be."""

LINGER_S = 5.0
"""Seconds for which idle connections stay open when the process stops and clients have another server.
Clients drop connections that are unused for as long, so that no request meets a closing one."""

DEADLINE_CHECKS = 4
"""Checks of the deadline in the time that a head may take."""

REJECTION = (
    b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
)


class BoundedHttpProtocol(HttpToolsProtocol):
    """One client connection. Subclasses made by `http_protocol` set the limits."""

    max_header = 16 * 1024
    header_s = 10.0
    leaving = False
    """Whether clients should send their next request elsewhere: the process will stop."""

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
        self._answered: RequestCycle | None = None
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
                raise httptools.HttpParserError("head too large")  # stops the parser
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
        cycle = RequestCycle(self, self.scope, stays)
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
        if self._answered is not None:
            # The request refers to itself, and only the garbage collector would free it.
            self._answered.scope["extensions"].pop(EXTENSION, None)
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
            self._timer = self.loop.call_later(self.header_s / DEADLINE_CHECKS, self._look)
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
            self.transport.write(REJECTION % (error.status, reason, len(body), body))
            self.transport.close()


def http_protocol(max_header: int, header_s: float) -> type[BoundedHttpProtocol]:
    """The protocol class with these limits, in bytes and seconds."""
    return type("BoundedListener", (BoundedHttpProtocol,), {"max_header": max_header, "header_s": header_s})


class Acceptor:
    """
    Accepts the connections of one listening socket, several in one turn of the event loop.

    uvloop's own servers accept one per turn (libuv 1.45 and later). Under load a turn takes 10 ms, and the
    last of 64 clients that connect at the same moment would wait for 64 turns.
    """

    def __init__(self, listening: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        """`protocol` is called for each connection. The owner of `listening` closes it, after `close`."""
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._protocol = protocol
        self._retry: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._closed = False
        self._resume()

    def is_serving(self) -> bool:
        return not self._closed

    def close(self) -> None:
        """Accept no more connections."""
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening)

    async def wait_closed(self) -> None:
        """Return when each accepted connection has its protocol."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _resume(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no file descriptor, or no memory, is left
                log.error("The router accepts no connection for %g s: %s.", ACCEPT_RETRY_S, error.strerror)
                self._loop.remove_reader(self._listening)
                self._retry = self._loop.call_later(ACCEPT_RETRY_S, self._resume)
                return
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError as error:  # the client has left already
            connection.close()
            log.debug("A connection was lost as it was accepted: %s", error)


EXTENSION = "baton.cycle"
"""The scope's extension that holds the `RequestCycle`."""

WITHOUT_BODY = (204, 304)


class RequestCycle(RequestResponseCycle):
    """One request; the protocol creates it."""

    def __init__(self, listener: BoundedHttpProtocol, scope: Any, keep_alive: bool) -> None:
        super().__init__(
            scope=scope,
            transport=listener.transport,
            flow=listener.flow,
            logger=listener.logger,
            access_logger=listener.access_logger,
            access_log=listener.access_log,
            default_headers=listener.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=listener.expect_100_continue,
            keep_alive=keep_alive,
            on_response=listener.on_response_complete,
        )
        self.loop = listener.loop
        self.on_gone: Callable[[], None] | None = None
        """Called when the client disconnects before the response is complete."""
        self._head = b""
        """Head of a response that has started, until its first piece of body is sent."""

    def taken(self) -> bytes | None:
        """The body of the request if it has arrived completely."""
        if self.more_body:
            return None
        body, self.body = self.body, bytearray()
        return bytes(body)

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """
        Set the head of the response, which is sent with the first piece.

        `headers` have lower-case names and none belongs to one connection; a response of this `status` has a
        body.
        """
        self.response_started = True
        self.waiting_for_100_continue = False
        self.chunked_encoding = True
        lines = [STATUS_LINE[status]]
        for header in self.default_headers:
            lines.append(b"%b: %b\r\n" % header)
        for header in headers:
            lines.append(b"%b: %b\r\n" % header)
            if header[0] == b"content-length":
                self.chunked_encoding = False
                self.expected_content_length = int(header[1])
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"transfer-encoding: chunked\r\n\r\n" if self.chunked_encoding else b"\r\n")
        self._head = b"".join(lines)

    def write(self, piece: bytes, more: bool) -> None:
        """Send a part of the body; the last one without `more`."""
        if self.disconnected:
            return
        head, self._head = self._head, b""
        if not self.chunked_encoding:
            self.expected_content_length -= len(piece)
            if self.expected_content_length < 0 or (self.expected_content_length and not more):
                raise RuntimeError("The answer is not as long as its head says.")
            sent = head + piece if head else piece
        elif not piece:
            sent = head if more else head + b"0\r\n\r\n"
        elif more:
            sent = b"%b%x\r\n%b\r\n" % (head, len(piece), piece)
        else:
            sent = b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(piece), piece)
        if sent:
            self.transport.write(sent)
        if not more:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()

    async def send(self, message: Any) -> None:
        if self._head:
            self.write(b"", more=True)
        await super().send(message)

    def leave(self) -> None:
        """The connection is lost."""
        if self.response_complete:
            return
        self.disconnected = True
        self.message_event.set()
        if self.on_gone is not None:
            self.on_gone()
