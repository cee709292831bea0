"""
Client connections: uvicorn's httptools protocol with limits of bytes and seconds.

httptools accepts a head of any size over any time. This protocol counts the bytes that it received without
any progress, which bounds request line, headers, chunk extensions and trailers, and gives each head a
deadline. A client that sends its body, or reads its response, slower than `Pace` allows is cut off. One timer
per connection covers all of its deadlines.

A body beyond a tenant's share of `ConnectionLimits.memory` is refused, at its head if its length is known,
and a response beyond it is cut off.

No request is an upgrade. Clients offer HTTP/2 or a websocket in a request that is complete without it, and
httptools ends such a request at its head. Its body is then read by a parser of its own. What cannot be
understood is answered once, in its turn, and nothing that follows is read (`baton_http.request_heads`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from baton_api.capacity import SharedCapacity
from baton_api.errors import BatonError, BodyTooSlow, HeadTooLarge, InvalidRequest, Overloaded
from baton_http.client_memory import UnreadMemory
from baton_http.flow import Pace, PacedFlow, ReadTurns
from baton_http.replies import error_response, request_id
from baton_http.request_cycle import EXTENSION, RequestCycle
from baton_http.request_heads import body_framing, check_head
from baton_http.unwanted import UnwantedInput
from baton_http.upstream import no_delay

log = logging.getLogger(__name__)

LINGER_S = 5.0
"""Seconds for which idle connections stay open when the process stops and clients have another server.
Clients drop connections that are unused for as long, so that no request meets a closing one."""

DEADLINE_CHECKS = 4
"""Checks of the deadlines in the shortest of them."""

REFUSED_S = 2.0
"""Seconds for which a refused connection is read on."""

PIPELINE_LIMIT = 64
"""Requests of one connection that wait behind the one that is being answered."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What client connections may use. Connections with the same limits share `memory`."""

    max_header: int = 16 * 1024
    """Bytes of a request head."""
    header_s: float = 10.0
    """Seconds for a request head."""
    body_s: float = 60.0
    """Seconds for which a client may send nothing of a body; see `Pace`."""
    idle_s: float = 30.0
    """Seconds for which a client may read nothing of a response; see `Pace`."""
    memory: SharedCapacity = field(default_factory=lambda: SharedCapacity(64 * 1024 * 1024))
    """Bytes of bodies and responses."""
    unwanted: Counter[str] = field(default_factory=Counter)
    """Connections that are refused, or send what nobody wants, by tenant."""
    turns: ReadTurns = field(default_factory=ReadTurns)
    """Connections that read on."""

    @property
    def check_s(self) -> float:
        """Seconds between two checks of a connection's deadlines."""
        return min(self.header_s, self.body_s, self.idle_s) / DEADLINE_CHECKS


class BoundedHttpProtocol(HttpToolsProtocol):
    """One client connection. Subclasses made by `http_protocol` set the limits."""

    limits = ConnectionLimits()
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
        self._receiving: Pace | None = None
        """Of the body that is arriving."""
        self._sending: Pace | None = None
        """Of the response, while the client reads it slower than it is written."""
        self._unsent = 0
        """Bytes that the client had not read when `_sending` was last checked."""
        self._unread_memory = UnreadMemory(self.limits.memory)
        self._refusal = b""
        """The last answer of this connection. Everything that still arrives is ignored."""
        self._late: asyncio.TimerHandle | None = None
        """Writes a refusal that is delayed."""
        self._segment = 0
        """Bytes that are being parsed."""
        self._framing: bytes | None = None
        """Where the body of a request ends that offers an upgrade, until the parser stops at its head."""
        self._resumes = False
        """Whether the next head is the one with which another parser reads such a body."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = flow = PacedFlow(transport, self.limits.turns, self.loop)
        self._unwanted = UnwantedInput(self.limits.unwanted, transport, flow, self.loop)
        no_delay(transport)
        self._deadline = self.loop.time() + self.limits.header_s
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)
        self._count_unread(0)
        self._forget_requests()
        self._unwanted.close()
        self.cycle = self._answered = None  # type: ignore[assignment]  # they refer to this object

    def _forget_requests(self) -> None:
        """No request of this connection gets an answer any more."""
        cycles = self._answered, self.cycle, *(cycle for cycle, _ in self.pipeline)
        for cycle in dict.fromkeys(cycles):
            if isinstance(cycle, RequestCycle):
                cycle.disconnect()

    def data_received(self, data: bytes) -> None:
        if self._refusal:
            self._unwanted.discard(len(data), self.cycle.memory.tenant if self.cycle else "")  # type: ignore[attr-defined]
            return
        self._segment = len(data)
        self._unread += self._segment
        rest: bytes | memoryview = data
        try:
            while True:
                try:
                    self.parser.feed_data(rest)
                    break
                except httptools.HttpParserUpgrade as offer:
                    rest = memoryview(rest)[offer.args[0] :]
                    self._ignore_offer()
        except httptools.HttpParserError as error:
            self.refuse(_why(error))
        if self._unread > self.limits.max_header:
            self.refuse(HeadTooLarge(self.limits.max_header))

    def _ignore_offer(self) -> None:
        """Continue after the head of a request that offers an upgrade."""
        framing, self._framing = self._framing, None
        self.parser = httptools.HttpRequestParser(self)
        if framing:
            self._resumes = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._sending = Pace(self.loop.time(), self.limits.idle_s)
        self._count_unread(self._unsent)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._sending = None
        self._count_unread(0)

    def _count_unread(self, size: int) -> None:
        """Count `size` bytes of responses that the client has not read; cut it off if they are too many."""
        tenant = self._answered.memory.tenant if self._answered else ""
        if not self._unread_memory.use(size, tenant) and size:
            self.loop.call_soon(self.transport.abort)  # not while the transport is writing

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._deadline = min(self._deadline, self.loop.time() + self.limits.header_s)

    def on_headers_complete(self) -> None:
        self._deadline = math.inf
        if self._resumes:
            self._resumes = False
            return
        if self._unread > self.limits.max_header or self._segment > self.limits.max_header:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self.limits.max_header:
                raise HeadTooLarge(self.limits.max_header)
        if len(self.pipeline) >= PIPELINE_LIMIT:
            raise InvalidRequest(f"More than {PIPELINE_LIMIT} requests wait on this connection.")
        self._unread = 0
        parser = self.parser
        version = parser.get_http_version()
        method = parser.get_method().decode("ascii")
        check_head(version, method, self.headers)
        before = self.cycle
        if before is not None and not before.keep_alive:
            raise InvalidRequest("The request before this one closes the connection.")
        if parser.should_upgrade():
            self._framing = body_framing(self.headers)
        self._unwanted.size = 0
        self._receiving = Pace(self.loop.time(), self.limits.body_s)
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
            "method": method,
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self.headers,
            "state": self.app_state.copy(),
            "extensions": extensions,
        }
        stays = version != "1.0" and parser.should_keep_alive() and not self.leaving
        cycle = RequestCycle(self, self.scope, stays, self.limits.memory, self.refuse)
        extensions[EXTENSION] = {"cycle": cycle}
        self.headers = []  # for the trailers, which are no headers: a proxy in front has not checked them
        self.cycle = cycle
        if before is None or before.response_complete:
            self._answered = cycle
            self._start_asgi_task(cycle, self.app)
        else:  # it waits for its turn
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        cycle: RequestCycle = self.cycle  # type: ignore[assignment]  # it was made above
        if self._receiving is not None:
            self._receiving.moved(len(body), self.loop.time())
        if cycle.response_complete:
            self._unwanted.discard(len(body), cycle.memory.tenant)
            return
        cycle.memory.arrived(len(body))
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._unread = 0
        if self._framing:
            return  # only the head is complete
        self._receiving = None
        if self._unwanted.tenant is not None:
            self._unwanted.count_for(None)
            self.flow.resume_reading()
        self.cycle.more_body = False
        self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self._answered is not None:
            self._answered.release()
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._answered = cycle  # type: ignore[assignment]  # it was made above
            self._start_asgi_task(cycle, app)
        elif self._refusal:
            self._end(self._refusal)
        else:
            self._deadline = self.loop.time() + self.timeout_keep_alive

    def _look(self) -> None:
        """Check all deadlines, until the connection is lost."""
        now, transport = self.loop.time(), self.transport
        self._timer = self.loop.call_later(self.limits.check_s, self._look)
        if self._receiving is not None:
            if self.flow.read_paused:
                self._receiving.wait(self.limits.check_s)
            else:
                self.cycle.memory.lapse()  # type: ignore[attr-defined]
        if transport.is_closing() and self._sending is None:
            self._sending = Pace(now, self.limits.idle_s)  # the last bytes
        if self._sending is not None:
            unsent = transport.get_write_buffer_size()
            self._sending.moved(max(0, self._unsent - unsent), now)
            self._unsent = unsent
            if self._sending.late(now):
                transport.abort()
                return
        if transport.is_closing():
            return
        if now >= self._deadline:
            transport.close()
        elif self._receiving is not None and self._receiving.late(now):
            self.refuse(BodyTooSlow(self.limits.body_s))

    def shutdown(self) -> None:
        if self.leaving and (self.cycle is None or self.cycle.response_complete):
            self._deadline = min(self._deadline, self.loop.time() + LINGER_S)
        elif self._late is not None:
            self._late.cancel()
            self._end(self._refusal)
            self.transport.close()
        else:
            super().shutdown()

    def refuse(self, error: BatonError) -> None:
        """Answer what came last by `error`, once the requests before it are answered, and close."""
        if self._refusal or self.transport.is_closing():
            return
        log.debug("A request cannot be read: %s", error.message)
        last: RequestCycle | None = self.cycle  # type: ignore[assignment]
        broken = last if last is not None and last.more_body else None
        self._refusal = _answer(error, broken.scope if broken else None)
        self._deadline = math.inf
        self._receiving = None
        wait_s = 0.0
        if broken is not None:  # the body of this request is what is wrong
            if isinstance(error, Overloaded):
                wait_s = self._unwanted.refusal_delay_s(broken.memory.tenant)
            self._unwanted.count_for(broken.memory.tenant)
            broken.refusal = error
            if self.pipeline:
                self.pipeline.popleft()
                broken.disconnect()
                return
            broken.disconnect()
            if broken.response_complete:
                self._end(b"")  # it has its answer
                return
            if broken.response_started:  # what is written now would be read as a part of it
                self.transport.abort()
                return
        elif last is not None and not last.response_complete:
            return
        if wait_s:
            self.flow.pause_reading()
            self._late = self.loop.call_later(wait_s, self._end, self._refusal)
        else:
            self._end(self._refusal)

    def _end(self, answer: bytes) -> None:
        self._late = None
        if self.transport.is_closing():
            return
        self.transport.write(answer)
        if self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client has left
                self.transport.write_eof()
        self.flow.resume_reading()
        self._deadline = self.loop.time() + REFUSED_S


def _why(error: httptools.HttpParserError) -> BatonError:
    """
    The error for the client.

    No frame of the error's traceback may refer to it: only the collector would free these frames, and the
    body that they refer to.
    """
    cause = error.__context__  # of a callback
    if isinstance(cause, BatonError):
        return cause
    return InvalidRequest(
        f"Invalid HTTP request: {cause if isinstance(cause, httptools.HttpParserError) else error}."
    )


def _answer(error: BatonError, scope: Any) -> bytes:
    """
    The response to a request that cannot be read; `scope` is None if not even its head can.

    Web pages of other origins cannot read it: it has no CORS headers.
    """
    path, headers = ("", ()) if scope is None else (scope["path"], scope["headers"])
    fields, body = error_response(error, request_id(headers), path)
    lines = [b"%b: %b\r\n" % field for field in (*fields, (b"connection", b"close"))]
    return b"%b%b\r\n%b" % (STATUS_LINE[error.status], b"".join(lines), body)


def http_protocol(limits: ConnectionLimits) -> type[BoundedHttpProtocol]:
    """The protocol class with these limits."""
    return type("BoundedListener", (BoundedHttpProtocol,), {"limits": limits})
