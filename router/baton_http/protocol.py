"""
Client connections: uvicorn's httptools protocol with limits on heads, and a short path for the proxy.

httptools accepts a head of any size over any time. This protocol counts the bytes that it received without
any progress, which bounds request line, headers, chunk extensions and trailers, and gives each head a
deadline. A client that sends its body, or reads its response, slower than `Pace` allows is cut off. One timer
per connection covers all of its deadlines.

`ConnectionLimits.memory` counts what all connections hold: bodies that have arrived, until they are consumed
or their request ends, the rest of bodies of an announced length while it arrives, and responses that clients
have not read. A body beyond a tenant's share is refused, at its head if its length is known, and a response
beyond it is cut off.

A client that is refused may send on: if it were cut off, it would not read why. What nobody wants is read the
more slowly, and refusals for lack of memory come the later, the more such connections its tenant has. So a
client that ignores refusals, or asks again at once, costs little.

No request is an upgrade. Clients offer HTTP/2 or a websocket in a request that is complete without it, and
httptools ends such a request at its head. Its body is then read by a parser of its own. What cannot be
understood is answered once, in its turn, and nothing that follows is read (`baton_http.request_heads`).

ASGI passes dictionaries and checks the spelling of every header. The proxy forwards what a parser has checked
already, so it finds the `RequestCycle` in the scope and calls it: `start`, `write`, `on_disconnect`. Both
interfaces keep the same state: an answer may begin on one and end on the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from baton_api.capacity import SharedCapacity
from baton_api.errors import BatonError, BodyTooLarge, BodyTooSlow, HeadTooLarge, InvalidRequest, Overloaded
from baton_http.pace import Pace
from baton_http.replies import error_response, request_id
from baton_http.request_heads import body_framing, check_head
from baton_http.upstream import no_delay

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
"""Checks of the deadlines in the shortest of them."""

REFUSED_S = 2.0
"""Seconds for which a refused connection is read on, and longest delay of a refusal."""

REFUSAL_S = 0.02
"""Seconds by which each connection of a tenant that is refused, or sends what nobody wants, delays its next
refusal for lack of memory."""

DISCARD_S = 0.005
"""Seconds by which each such connection delays the next read of what nobody wants."""

DISCARDED_LIMIT = 64 * 1024 * 1024
"""Bytes that a connection may send after its last request was answered or refused."""

PIPELINE_LIMIT = 64
"""Requests of one connection that wait behind the one that is being answered."""

READ_AT_ONCE = 8
"""Connections that begin to read on in one turn of the event loop. Each reads up to 256 KB in it, which takes
up to 1 ms, and all others wait."""


class ReadTurns:
    """Connections whose reading was paused, in the order in which they may read on."""

    def __init__(self) -> None:
        self._waiting: deque[PacedFlow] = deque()

    def add(self, flow: PacedFlow, loop: asyncio.AbstractEventLoop) -> None:
        if not self._waiting:
            loop.call_soon(self._next, loop)
        self._waiting.append(flow)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(READ_AT_ONCE, len(self._waiting))):
            self._waiting.popleft().read_on()
        if self._waiting:
            loop.call_soon(self._next, loop)


class PacedFlow(FlowControl):
    """One connection's flow control. It reads on when its turn comes."""

    def __init__(
        self, transport: asyncio.Transport, turns: ReadTurns, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(transport)
        self._turns = turns
        self._loop = loop
        self._waits = False

    def pause_reading(self) -> None:
        self._waits = False
        super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused and not self._waits:
            self._waits = True
            self._turns.add(self, self._loop)

    def read_on(self) -> None:
        if self._waits and not self._transport.is_closing():
            super().resume_reading()
        self._waits = False


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
        self._held = 0
        """Bytes of `limits.memory` for them."""
        self._holder = ""
        """The tenant for whom they count."""
        self._discarded = 0
        """Bytes that arrived after the request was answered or refused."""
        self._unwanted: str | None = None
        """The tenant for whom this connection counts in `limits.unwanted`."""
        self._reads_on: asyncio.TimerHandle | None = None
        """Reads on what nobody wants."""
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
        self.flow = PacedFlow(transport, self.limits.turns, self.loop)
        no_delay(transport)
        self._deadline = self.loop.time() + self.limits.header_s
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._reads_on is not None:
            self._reads_on.cancel()
        super().connection_lost(exc)
        self._hold_unsent(0)
        self._forget_requests()
        self._count_unwanted(None)
        self.cycle = self._answered = None  # type: ignore[assignment]  # they refer to this object

    def _forget_requests(self) -> None:
        """No request of this connection gets an answer any more."""
        cycles = self._answered, self.cycle, *(cycle for cycle, _ in self.pipeline)
        for cycle in dict.fromkeys(cycles):
            if isinstance(cycle, RequestCycle):
                cycle.disconnect()

    def data_received(self, data: bytes) -> None:
        if self._refusal:
            self._discard(len(data))
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

    def _discard(self, size: int) -> None:
        """Nobody wants the last `size` bytes; read on after a pause."""
        self._discarded += size
        if self._discarded > DISCARDED_LIMIT:
            self.transport.abort()
            return
        self._count_unwanted(self.cycle.tenant if self.cycle else "")  # type: ignore[attr-defined]
        self.flow.pause_reading()
        if self._reads_on is None:
            wait_s = DISCARD_S * self.limits.unwanted[self._unwanted or ""]
            self._reads_on = self.loop.call_later(wait_s, self._read_on)

    def _read_on(self) -> None:
        self._reads_on = None
        if self._unwanted is not None and not self.transport.is_closing():
            self.flow.resume_reading()

    def _count_unwanted(self, tenant: str | None) -> None:
        """Count this connection in `limits.unwanted` for this tenant, or no longer."""
        counts, before = self.limits.unwanted, self._unwanted
        if before is not None:
            counts[before] -= 1
            if not counts[before]:
                del counts[before]
        if tenant is not None:
            counts[tenant] += 1
        self._unwanted = tenant

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
        self._hold_unsent(self._unsent)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._sending = None
        self._hold_unsent(0)

    def _hold_unsent(self, size: int) -> None:
        """Count `size` bytes of responses that the client has not read; cut it off if they are too many."""
        memory = self.limits.memory
        memory.add(self._holder, -self._held)
        self._held, self._holder = 0, self._answered.tenant if self._answered else ""
        if memory.fits(self._holder, size):
            memory.add(self._holder, size)
            self._held = size
        elif size:
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
        self._discarded = 0
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
        cycle = RequestCycle(self, self.scope, stays)
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
            self._discard(len(body))
            return
        cycle.arrived(len(body))
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._unread = 0
        if self._framing:
            return  # only the head is complete
        self._receiving = None
        if self._unwanted is not None:
            self._count_unwanted(None)
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
                self.cycle.lapse()  # type: ignore[attr-defined]
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
                wait_s = min(REFUSED_S, REFUSAL_S * self.limits.unwanted[broken.tenant])
            self._count_unwanted(broken.tenant)
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
            expect_100_continue=listener.expect_100_continue and scope["http_version"] != "1.0",
            keep_alive=keep_alive,
            on_response=listener.on_response_complete,
        )
        self.loop = listener.loop
        self.on_disconnect: Callable[[], None] | None = None
        """Called when the client disconnects before the response is complete."""
        self._head = b""
        """Head of a response that has started, until its first piece of body is sent."""
        self._ends_by_close = False
        """Whether the response has no length and HTTP/1.0, which has no chunks."""
        self.tenant = ""
        """Whose share of `memory` it uses."""
        self.held = 0
        """Bytes of `memory` that it uses."""
        self.refusal: BatonError | None = None
        """Why the rest of the body is not read; the client is told."""
        self.keeps = False
        """Whether the application keeps what it receives, until it says so by `hold` or the request ends."""
        self._memory = listener.limits.memory
        self._listener = listener
        self._expected = 0
        """Bytes of `held` that have not arrived yet."""
        self._missing = 0
        """`_expected` when `lapse` was last called."""

    async def run_asgi(self, app: Any) -> None:
        try:
            await super().run_asgi(app)
        finally:
            self.release()  # what it used after the client had left
            self.refusal = None  # its traceback refers to this object
            self.scope["extensions"].pop(EXTENSION, None)

    def hold(self, size: int) -> None:
        """
        Use `size` bytes of memory instead of `held`.

        Raises Overloaded beyond the tenant's share; a client that has not sent the whole body has its answer
        then.
        """
        more = size - self.held
        if more > 0 and not self._memory.fits(self.tenant, more):
            held, allowed = self._memory.held(self.tenant), self._memory.allowed(self.tenant)
            raise self.refused(Overloaded(held, allowed, what="bytes"))
        self._memory.add(self.tenant, more)
        self.held = size

    def refused(self, error: BatonError) -> BatonError:
        """The error, which is the answer to a client that has not sent the whole body."""
        if self.more_body:
            self._listener.refuse(error)
        return error

    def too_large(self, limit: int) -> BatonError:
        """
        The error for a body over `limit`.

        The application answers a client that keeps its connection: it may send on what nobody wants.
        """
        error = BodyTooLarge(limit)
        return error if self.keep_alive else self.refused(error)

    def expect(self, limit: int) -> None:
        """
        The application keeps the body, of `limit` bytes at most, until the request ends.

        Raises BodyTooLarge and Overloaded, if the head says how long the body is.
        """
        self.keeps = True
        if not self.more_body:
            return
        length = next((int(value) for name, value in self.scope["headers"] if name == b"content-length"), 0)
        if length > limit:
            raise self.too_large(limit)
        arrived = self.held - self._expected
        self._expected = max(0, length - arrived)
        self.hold(arrived + self._expected)

    def lapse(self) -> None:
        """Nothing is kept for the rest of the body if none of it has arrived since the last call."""
        if self._expected == self._missing:
            self.hold(self.held - self._expected)
            self._expected = 0
        self._missing = self._expected

    def arrived(self, size: int) -> None:
        """`size` more bytes of the body have arrived. Raises Overloaded beyond the tenant's share."""
        expected = min(size, self._expected)
        self._expected -= expected
        self.hold(self.held + size - expected)

    def belongs_to(self, tenant: str) -> None:
        """What it uses, and will use, counts for this tenant. Raises Overloaded beyond its share."""
        held = self.held
        self.hold(0)
        self.tenant = tenant
        self.hold(held)

    def release(self) -> None:
        """The request has ended: its body is not used any more."""
        self._expected = 0
        self.hold(0)
        self.body = bytearray()

    async def receive(self) -> Any:
        message = await super().receive()
        if not self.keeps and (size := len(message.get("body", b""))):  # type: ignore[arg-type]
            self.hold(max(0, self.held - size))
        return message

    def buffered_body(self) -> bytes | None:
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
        if self.chunked_encoding and self.scope["http_version"] == "1.0":
            self.chunked_encoding, self._ends_by_close = False, True
        lines.append(b"transfer-encoding: chunked\r\n\r\n" if self.chunked_encoding else b"\r\n")
        self._head = b"".join(lines)

    def write(self, piece: bytes, more: bool) -> None:
        """Send a part of the body; the last one without `more`."""
        if self.disconnected:
            return
        head, self._head = self._head, b""
        if self._ends_by_close:
            sent = head + piece
        elif not self.chunked_encoding:
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
        if not self.response_started and self.scope["http_version"] == "1.0":
            given = message.get("headers", ())
            self._ends_by_close = not any(name.lower() == b"content-length" for name, _ in given)
            if self._ends_by_close:
                self.chunked_encoding = False  # uvicorn decides it only where it is None
        elif self._ends_by_close:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)

    def disconnect(self) -> None:
        """The client is gone, or the request cannot be read."""
        self.release()
        if self.response_complete:
            return
        self.disconnected = True
        self.waiting_for_100_continue = False
        self.message_event.set()
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        if on_disconnect is not None:
            on_disconnect()


def count_for(scope: Any, tenant: str) -> None:
    """Count the memory of a request for its tenant. Raises Overloaded beyond the tenant's share."""
    if (cycle := _cycle(scope)) is not None:
        cycle.belongs_to(tenant)


def expect_body(scope: Any, limit: int) -> None:
    """
    The application keeps the body of the request, of `limit` bytes at most, until the request ends.

    Raises BodyTooLarge and Overloaded, if the head says how long the body is.
    """
    if (cycle := _cycle(scope)) is not None:
        cycle.expect(limit)


def keep_received(scope: Any) -> Callable[[int], None]:
    """The application keeps what it receives of a body. Returns a function that frees so many bytes."""
    cycle = _cycle(scope)
    if cycle is None:
        return lambda size: None
    cycle.keeps = True
    return lambda size: cycle.hold(max(0, cycle.held - size))


def _cycle(scope: Any) -> RequestCycle | None:
    """The request; None if it has not come over a connection of this module, or its application has ended."""
    extension = scope.get("extensions", {}).get(EXTENSION)
    return None if extension is None else extension["cycle"]
