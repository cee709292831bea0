"""
Connections to a worker: HTTP/1.1 on asyncio transports, parsed by httptools.

Requests are bytes; a response is an `UpstreamExchange`. Its body comes in the pieces in which it arrived. At
most about `BUFFERED` bytes of it wait here, so a slow client slows the worker down. Connections are reused.
Every failure of a worker is raised as `UpstreamLost` with its cause in one word.

The method `fetch` and the pool are for short requests; the proxy's hot path builds its own heads
(`baton_router.engines.heads`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
import ssl
from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

from baton_api.errors import NotReady, WorkerLost

log = logging.getLogger(__name__)

IDLE_LIMIT = 1024
"""Maximum idle connections to one worker."""

STALE_S = 0.2
"""Seconds after sending in which a reset means that the worker had closed the idle connection before."""


BUFFERED = 64 * 1024
"""Bytes of one response that may wait for the client before the worker is paused."""

Sink = Callable[[bytes], bool]
"""Takes a piece of a body as it arrives; False if it cannot at the moment."""

Headers = list[tuple[bytes, bytes]]


class UpstreamLost(WorkerLost):
    """The worker did not respond, or not completely."""

    def __init__(self, worker: str, cause: str) -> None:
        super().__init__(worker)
        self.cause = cause
        """connect, reset, malformed, incomplete, hung, slow, overdue, idle, drained or gone."""


class ExchangeHolder(Protocol):
    """Holds an exchange before its response head has arrived, and may end it."""

    exchange: UpstreamExchange | None
    """None while the request is not on a connection."""


class Upstream:
    """One worker's address and connections."""

    def __init__(
        self, host: str, port: int, connect_s: float = 1.0, tls: ssl.SSLContext | None = None
    ) -> None:
        self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.host, self.port = host, port
        self._connect_s = connect_s
        self._tls = tls
        self._idle: list[UpstreamConnection] = []
        self._busy: set[UpstreamConnection] = set()
        self._closed = False
        self.heard = -math.inf
        """Loop time of the last byte from the worker."""

    @property
    def secure(self) -> bool:
        """Whether TLS is used."""
        return self._tls is not None

    async def request(
        self, head: bytes, body: bytes = b"", holder: ExchangeHolder | None = None
    ) -> UpstreamExchange:
        """
        Send a request and wait for the head of its response. Raises UpstreamLost.

        `holder` gets the exchange at once and may end it.

        A worker may close an idle connection in the same moment. If it closes within `STALE_S` without a
        byte, the request is sent again on a new connection. If that cannot be opened, or the reset comes
        later, the worker has died with the request.
        """
        reset: UpstreamLost | None = None
        while True:
            kept = None if reset else self._take()
            try:
                connection = kept or await self._connect()
            except UpstreamLost as unreachable:
                if reset is None:
                    raise
                raise reset from unreachable
            exchange = connection.send(head, body)
            exchange.resent = reset is not None
            self._busy.add(connection)
            if holder is not None:
                holder.exchange = exchange
            try:
                await exchange.head()
                return exchange
            except UpstreamLost as lost:
                late = connection.loop.time() - exchange.progress > STALE_S
                if not kept or exchange.begun or late or lost.cause != "reset":
                    raise
                reset = lost
                if holder is not None:
                    holder.exchange = None  # while the connection opens, there is no exchange to end
            except BaseException:
                exchange.close()
                raise

    def fail_silent(self, since: float) -> None:
        """The worker is down: end the exchanges without progress since that loop time."""
        for connection in list(self._idle):
            connection.transport.abort()
        for connection in list(self._busy):
            exchange = connection.exchange
            if exchange is not None and not exchange.paused and exchange.progress < since:
                exchange.fail("hung")

    def fail_all(self, cause: str) -> None:
        """End all exchanges, and close the connections."""
        for connection in [*self._idle, *self._busy]:
            if connection.exchange is not None:
                connection.exchange.fail(cause)
            connection.transport.abort()

    def close(self) -> None:
        """Close all connections, also those in use."""
        self._closed = True
        self.fail_all("gone")

    def freed(self, connection: UpstreamConnection) -> None:
        """The exchange is complete; reuse the connection."""
        self._busy.discard(connection)
        if len(self._idle) < IDLE_LIMIT and not self._closed:
            self._idle.append(connection)
        else:
            connection.transport.close()

    def gone(self, connection: UpstreamConnection) -> None:
        self._busy.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _take(self) -> UpstreamConnection | None:
        while self._idle:
            connection = self._idle.pop()  # the one used last: least likely to be closed meanwhile
            if not connection.transport.is_closing():
                return connection
        return None

    async def refuses(self) -> bool:
        """Whether nothing listens any more: the process has ended. False if that is not known in time."""
        try:
            async with asyncio.timeout(self._connect_s):
                transport, _ = await asyncio.get_running_loop().create_connection(
                    asyncio.Protocol, self.host, self.port
                )
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError):
            return False
        transport.close()
        return False

    async def _connect(self) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self), self.host, self.port, ssl=self._tls
                )
        except (OSError, UnicodeError) as error:  # a timeout, or a host name that no DNS can have
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise NotReady("The router has no file descriptor left for a connection.") from error
            raise UpstreamLost(self.name, "connect") from error
        return connection


class UpstreamConnection(asyncio.Protocol):
    """One connection and its current exchange."""

    transport: asyncio.Transport

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.loop = asyncio.get_running_loop()
        self.exchange: UpstreamExchange | None = None
        self._keep = False
        self._pieces: list[bytes] = []
        """Body pieces from the parser."""
        self.on_body = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)

    def send(self, head: bytes, body: bytes) -> UpstreamExchange:
        self.exchange = exchange = UpstreamExchange(self)
        if len(body) < BUFFERED:
            self.transport.write(head + body)
        else:  # rather a second call than a copy
            self.transport.write(head)
            self.transport.write(body)
        return exchange

    # asyncio's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's own is one in all but name
        no_delay(self.transport)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            self.transport.abort()  # an unsolicited response
            return
        exchange.progress = self.upstream.heard = self.loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            exchange.took(self._pieces, 0)
            exchange.fail("malformed")
            self.transport.abort()
        else:
            exchange.took(self._pieces, len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.upstream.gone(self)
        if self.exchange is not None:
            self.exchange.fail("reset")

    # httptools' side. An exception here makes `feed_data` raise.

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            raise RuntimeError("more came than one answer")
        exchange.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        exchange = self.exchange
        if exchange is None:
            raise RuntimeError("more came than one answer")
        status = self._parser.get_status_code()
        if status < 200:
            exchange.headers.clear()  # an interim answer; the real one follows
            return
        self._keep = self._parser.should_keep_alive()
        exchange.status = status

    def on_message_complete(self) -> None:
        exchange = self.exchange
        if exchange is None or not exchange.status:
            return
        self.exchange = None
        exchange.completed()
        if self._keep:
            self.upstream.freed(self)
        else:
            self.transport.close()


class UpstreamExchange:
    """The response to one request as it arrives. Read it to the end or close it."""

    __slots__ = (
        "_buffered",
        "_connection",
        "_failure",
        "_pieces",
        "_sink",
        "_waiter",
        "complete",
        "headers",
        "paused",
        "progress",
        "resent",
        "status",
    )

    def __init__(self, connection: UpstreamConnection) -> None:
        self.status = 0
        self.headers: Headers = []
        self.progress = connection.loop.time()
        """Loop time of the last byte of the response, or of sending the request."""
        self.paused = False
        """Whether the worker is paused."""
        self.resent = False
        """Whether the request was sent before, on an idle connection that the worker had closed."""
        self._connection = connection
        self._pieces: list[bytes] = []
        self._buffered = 0
        self.complete = False
        """Whether the whole response has arrived."""
        self._failure: UpstreamLost | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None

    @property
    def server(self) -> str:
        return self._connection.upstream.name

    @property
    def begun(self) -> bool:
        """Whether any byte of the response has arrived."""
        return self.status != 0 or bool(self.headers)

    async def head(self) -> None:
        """Wait for status and headers. Raises UpstreamLost."""
        while not self.status:
            await self._wait()

    async def read(self, sink: Sink | None = None) -> bytes:
        """
        The part of the body since the last read; empty at the end. Raises UpstreamLost.

        While it waits, pieces go to `sink` as they arrive, without a task. The first one that `sink` does not
        take is returned, and so is the last piece of the body. An exception of `sink` is raised here.
        """
        while not self._pieces:
            if self.complete:
                return b""
            self._sink = sink
            try:
                await self._wait()
            finally:
                self._sink = None
        return self.rest()

    def rest(self) -> bytes:
        """The buffered part of the body."""
        pieces = self._pieces
        piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._buffered = 0
        if self.paused:
            self.paused = False
            self.progress = self._connection.loop.time()
            self._connection.transport.resume_reading()
        return piece

    def close(self) -> None:
        """Stop reading; the connection closes unless the response is complete."""
        if not self.complete:
            self._connection.transport.abort()

    def fail(self, cause: str) -> bool:
        """End the exchange; readers get UpstreamLost. False if it had ended."""
        if self.complete or self._failure is not None:
            return False
        self._failure = UpstreamLost(self._connection.upstream.name, cause)
        self._connection.transport.abort()
        self._wake()
        return True

    # Called by the connection.

    def took(self, pieces: list[bytes], size: int) -> None:
        """Pass on or buffer pieces parsed from `size` bytes."""
        if self._sink is not None and pieces and not self.complete and self._passed_on(pieces, self._sink):
            return
        if pieces:
            self._pieces += pieces
            pieces.clear()
        self._buffered += size
        if self._buffered >= BUFFERED and not self.paused and not self.complete:
            self.paused = True
            self._connection.transport.pause_reading()
        self._wake()

    def _passed_on(self, pieces: list[bytes], sink: Sink) -> bool:
        """Whether the reader waited, and its sink took them."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return False
        try:
            passed = sink(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        except Exception as error:  # of the reader, whose task is to see it
            waiter.set_exception(error)
            passed = True
        if passed:
            pieces.clear()
        return passed

    def completed(self) -> None:
        self.complete = True
        if self.paused:  # the connection serves other exchanges now; the buffer here is bounded
            self.paused = False
            self._connection.transport.resume_reading()

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = self._connection.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def no_delay(transport: asyncio.BaseTransport) -> None:
    """Send small pieces at once; not every event loop sets this."""
    connected: socket.socket | None = transport.get_extra_info("socket")
    if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY):
            _log_missing_no_delay()


@cache
def _log_missing_no_delay() -> None:
    """Log once; it is the same for all connections."""
    log.error("TCP_NODELAY cannot be set here: each event of a stream may wait 40 ms for the one before it.")


Text = str | bytes


class Reply(NamedTuple):
    """A complete reply."""

    status: int
    headers: Headers
    body: bytes


class ReplyTooLarge(WorkerLost):
    """The body of a reply is over the limit."""

    def __init__(self, server: str, limit: int) -> None:
        super().__init__(server)
        self.args = (f"The reply of {server} has more than {limit} bytes.",)


def request_head(method: Text, target: Text, headers: Iterable[tuple[Text, Text]]) -> bytes:
    """
    The head of an HTTP/1.1 request.

    >>> request_head("GET", "/load", [("host", "10.0.0.1:8000")])
    b'GET /load HTTP/1.1\\r\\nhost: 10.0.0.1:8000\\r\\n\\r\\n'
    """
    fields = [b"%b: %b\r\n" % (_encode(name), _encode(value)) for name, value in headers]
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (_encode(method), _encode(target), b"".join(fields))


async def read_body(exchange: UpstreamExchange, limit: int) -> bytes:
    """The whole body of a reply. Raises UpstreamLost, and ReplyTooLarge above `limit` bytes."""
    body = bytearray()
    try:
        while piece := await exchange.read():
            body += piece
            if len(body) > limit:
                raise ReplyTooLarge(exchange.server, limit)
    finally:
        exchange.close()
    return bytes(body)


async def fetch(
    upstream: Upstream,
    method: str,
    target: str,
    headers: Iterable[tuple[Text, Text]] = (),
    body: bytes = b"",
    *,
    limit: int,
) -> Reply:
    """Send a request and read its whole reply. Raises UpstreamLost, NotReady and ReplyTooLarge."""
    length = [("content-length", str(len(body)))] if method != "GET" else []
    head = request_head(method, target, [("host", upstream.name), *length, *headers])
    exchange = await upstream.request(head, body)
    return Reply(exchange.status, exchange.headers, await read_body(exchange, limit))


def _encode(text: Text) -> bytes:
    return text.encode() if isinstance(text, str) else text


class UpstreamPool:
    """The connections of this process to all workers, opened when a worker is first used."""

    def __init__(self, connect_s: float, tls: ssl.SSLContext | None = None) -> None:
        """`tls` is for workers that require TLS."""
        self._connect_s = connect_s
        self._tls = tls
        self._secure: set[str] = set()
        self._upstreams: dict[str, Upstream] = {}

    def __len__(self) -> int:
        """Workers that were used and not dropped."""
        return len(self._upstreams)

    def set_tls(self, name: str, secure: bool) -> None:
        """Use TLS for this worker from now on, or not. A change drops its connections."""
        if secure == (name in self._secure):
            return
        self.drop(name)
        if secure:
            self._secure.add(name)
            if self._tls is None:
                log.error(
                    "The worker %s requires TLS, and this router has no certificate. Set --tls-folder.", name
                )

    def get(self, name: str) -> Upstream:
        """The worker at `name`, its `host:port`."""
        upstream = self._upstreams.get(name)
        if upstream is None:
            address = urlsplit(f"//{name}")
            tls = self._tls if name in self._secure else None
            new = Upstream(address.hostname or "", address.port or 80, self._connect_s, tls)
            upstream = self._upstreams[name] = self._upstreams.setdefault(new.name, new)
        return upstream

    def drop(self, name: str) -> None:
        """Close the connections of a worker that is gone; requests on them fail."""
        self._secure.discard(name)
        upstream = self._upstreams.pop(name, None)
        if upstream is not None:
            upstream.close()

    def close(self) -> None:
        for upstream in self._upstreams.values():
            upstream.close()
