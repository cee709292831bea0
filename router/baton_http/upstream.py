"""
Connections to one worker: HTTP/1.1 on asyncio's transports, read by httptools.

A request is a head and a body in bytes; the answer's body comes out in the pieces in which it came
in, and never more than about `BUFFERED` bytes of it wait here: a client that reads slowly makes the
worker write slowly. Connections are kept and used again. What can go wrong with a worker leaves this
module as `UpstreamLost`, with the cause in one word.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
import ssl
from functools import cache
from typing import Protocol, cast

import httptools

from baton_api.errors import NotReady, WorkerLost

log = logging.getLogger(__name__)

BUFFERED = 64 * 1024
"""Bytes of one answer's body that may wait for the client before the worker is made to wait."""

IDLE_LIMIT = 1024
"""Connections to one worker that are kept without a request on them."""

STALE_S = 0.2
"""Seconds after sending in which a reset means that the worker had closed the kept connection before."""

Headers = list[tuple[bytes, bytes]]


class UpstreamLost(WorkerLost):
    """The worker did not answer, or not to the end."""

    def __init__(self, worker: str, cause: str) -> None:
        super().__init__(worker)
        self.cause = cause
        """connect, reset, malformed, incomplete, hung, slow, overdue, idle, drained or gone."""


class ExchangeHolder(Protocol):
    """Who wants to have an exchange before there is a head of its answer."""

    exchange: UpstreamExchange | None
    """None while the request is not on a connection."""


class Upstream:
    """One worker's address and the connections to it."""

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
        """Loop time at which anything last came from the worker."""

    @property
    def secure(self) -> bool:
        """Whether it is spoken to by TLS."""
        return self._tls is not None

    async def request(
        self, head: bytes, body: bytes = b"", holder: ExchangeHolder | None = None
    ) -> UpstreamExchange:
        """
        Send one request and wait for the head of its answer. Raises Lost.

        `holder` has the exchange as soon as it begins, and may end it.

        A kept connection that the worker closes at the same moment is no failure of the worker: if it closes
        within `STALE_S` and without a byte of an answer, the request goes once more, on a new connection. If
        there is nobody to connect with then, or if it is reset later, the worker has died with the request.
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
                    holder.exchange = None  # nothing can be ended while there is only a connection to come
            except BaseException:
                exchange.close()
                raise

    def fail_silent(self, since: float) -> None:
        """The worker is down: end the exchanges on which nothing has come since that loop time."""
        for connection in list(self._idle):
            connection.transport.abort()
        for connection in list(self._busy):
            exchange = connection.exchange
            if exchange is not None and not exchange.paused and exchange.progress < since:
                exchange.fail("hung")

    def fail_all(self, cause: str) -> None:
        """It has had its time: end whatever is on its connections."""
        for connection in [*self._idle, *self._busy]:
            if connection.exchange is not None:
                connection.exchange.fail(cause)
            connection.transport.abort()

    def close(self) -> None:
        """For good: nobody is there any more."""
        self._closed = True
        self.fail_all("gone")

    def freed(self, connection: UpstreamConnection) -> None:
        """Its exchange is complete and another may follow."""
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


class UpstreamExchange:
    """One request's answer as it arrives. Read it to the end or close it."""

    __slots__ = (
        "_buffered",
        "_connection",
        "_failure",
        "_pieces",
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
        """When something of the answer came last; when it was asked for, before that."""
        self.paused = False
        """Whether the worker is being made to wait."""
        self.resent = False
        """Whether the request was sent before, on a kept connection that the worker had closed."""
        self._connection = connection
        self._pieces: list[bytes] = []
        self._buffered = 0
        self.complete = False
        """Whether nothing more will come than waits here."""
        self._failure: UpstreamLost | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def server(self) -> str:
        return self._connection.upstream.name

    @property
    def begun(self) -> bool:
        """Whether anything of the answer has come."""
        return self.status != 0 or bool(self.headers)

    async def head(self) -> None:
        """Wait until status and headers are there. Raises Lost."""
        while not self.status:
            await self._wait()

    async def read(self) -> bytes:
        """The part of the body that has come since the last read; empty at its end. Raises Lost."""
        while not self._pieces:
            if self.complete:
                return b""
            await self._wait()
        return self.rest()

    def rest(self) -> bytes:
        """What of the body waits here."""
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
        """Nothing more is wanted: unless all of it came, the worker sees its connection close."""
        if not self.complete:
            self._connection.transport.abort()

    def fail(self, cause: str) -> bool:
        """End the exchange: whoever waits for more of it gets Lost. False if it had ended before."""
        if self.complete or self._failure is not None:
            return False
        self._failure = UpstreamLost(self._connection.upstream.name, cause)
        self._connection.transport.abort()
        self._wake()
        return True

    # What the connection calls.

    def took(self, pieces: list[bytes], size: int) -> None:
        """What the body's parser has made of `size` bytes."""
        if pieces:
            self._pieces += pieces
            pieces.clear()
        self._buffered += size
        if self._buffered >= BUFFERED and not self.paused and not self.complete:
            self.paused = True
            self._connection.transport.pause_reading()
        self._wake()

    def completed(self) -> None:
        self.complete = True
        if self.paused:  # the connection goes on to others; what waits here has its bound already
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


class UpstreamConnection(asyncio.Protocol):
    """One connection and the exchange that is on it, if any."""

    transport: asyncio.Transport

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.loop = asyncio.get_running_loop()
        self.exchange: UpstreamExchange | None = None
        self._keep = False
        self._pieces: list[bytes] = []
        """Of the body, as the parser leaves them."""
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
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own is one in all but name
        no_delay(self.transport)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            self.transport.abort()  # an answer that nobody asked for
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


def no_delay(transport: asyncio.BaseTransport) -> None:
    """Send small pieces at once; event loops differ in whether they see to it themselves."""
    connected: socket.socket | None = transport.get_extra_info("socket")
    if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY):
            _log_missing_no_delay()


@cache
def _log_missing_no_delay() -> None:
    """Once: who looks at the first connections sees it, and it will not be otherwise with the others."""
    log.error("TCP_NODELAY cannot be set here: each event of a stream may wait 40 ms for the one before it.")
