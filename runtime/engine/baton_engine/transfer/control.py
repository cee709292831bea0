"""
The control connection between a decode worker and a prefill worker, for both roles.

Messages are sent in order and received whole. Every network error becomes `TransferFailed`. A peer that hangs
does not close its socket, so both sides send at least one message per tick, and a peer without messages for
several ticks is dead. Ticks are counted instead of clock time, because a worker that was stopped for a minute
must not consider its peers dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from baton_api import messages
from baton_api.errors import TransferFailed
from baton_api.messages import AnyMessage, Ping, Pong

PIECE_BYTES = 256 * 1024
"""Maximum bytes per read from the socket. Each piece of a long frame counts as activity."""

BACKLOG_BYTES = 4 * messages.FRAME_LIMIT
"""Maximum bytes that are buffered for a slow peer. Beyond it the connection is aborted."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Deadlines of a control connection. Tests shorten them."""

    tick_s: float = 1.0
    """Interval after which a ping is sent if no other message was."""
    silent_ticks: int = 5
    """Number of ticks without data after which a peer is dead."""
    connect_s: float = 1.0
    handshake_s: float = 5.0
    """Maximum time from the connection to the end of Hello and Welcome."""
    close_s: float = 1.0
    """Maximum time for sending the last frames when the connection is closed."""
    unreachable_s: float = 1.0
    """Time before an address that did not answer is tried again. Until then, fetches from it fail at once."""


class ControlConnection:
    """Messages over one TCP connection, in both directions."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pace: Pace,
        pong: Callable[[int], Pong] = lambda number: Pong(number=number),
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._pace = pace
        self._pong = pong
        self._heard = True
        self._spoke = False
        self._cause = ""
        self._heart: asyncio.Task[None] | None = None
        self.aborted = False
        """Whether `abort` was called. `receive` raises soon."""
        self.peer = _name(writer)
        sock = writer.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start_heartbeat(self) -> None:
        """Start to send pings and to require messages of the peer. Call it after the handshake."""
        self._heart = asyncio.create_task(self._beat())

    def send(self, message: AnyMessage) -> None:
        """
        Queue one message. It is dropped if the connection has ended.

        Raises TransferFailed if the message is too large for a frame.
        """
        frame = messages.encode(message)
        if self._writer.is_closing():
            return
        self._writer.write(frame)
        self._spoke = True
        backlog = self._writer.transport.get_write_buffer_size()
        if backlog > BACKLOG_BYTES:
            self.abort(f"it has not read {backlog} buffered bytes")

    async def receive(self) -> AnyMessage:
        """Return the next message, and answer pings. Raises TransferFailed at the end of the connection."""
        while True:
            message = messages.decode(await self.receive_frame(messages.FRAME_LIMIT))
            if not isinstance(message, Ping):
                return message
            self.send(self._pong(message.number))

    async def receive_frame(self, limit: int) -> bytes:
        """Return the body of the next frame, at most `limit` bytes. Raises TransferFailed."""
        length = messages.frame_length(await self._read(messages.LENGTH_BYTES))
        if length > limit:
            raise TransferFailed(f"A frame of {length} bytes exceeds the limit of {limit}.")
        return await self._read(length)

    async def messages(self) -> AsyncIterator[AnyMessage]:
        """Yield all messages. Raises TransferFailed at the end of the connection."""
        while True:
            yield await self.receive()

    async def close(self) -> None:
        """Send queued messages, for at most `close_s`, and close the connection."""
        if self._heart is not None:
            self._heart.cancel()
        self._writer.close()
        try:
            async with asyncio.timeout(self._pace.close_s):
                await self._writer.wait_closed()
        except (TimeoutError, OSError):
            self._writer.transport.abort()

    async def _read(self, size: int) -> bytes:
        pieces = bytearray()
        while len(pieces) < size:
            try:
                piece = await self._reader.read(min(size - len(pieces), PIECE_BYTES))
            except OSError as error:
                raise TransferFailed(
                    f"The connection to {self.peer} was lost: {self._cause or error}."
                ) from error
            if not piece:
                raise TransferFailed(
                    f"The connection to {self.peer} ended: {self._cause or 'it was closed'}."
                )
            self._heard = True
            pieces += piece
        return bytes(pieces)

    async def _beat(self) -> None:
        number = silent = 0
        while silent < self._pace.silent_ticks:
            await asyncio.sleep(self._pace.tick_s)
            silent = 0 if self._heard else silent + 1
            if not self._spoke:
                number += 1
                self.send(Ping(number=number))
            self._heard = self._spoke = False
        self.abort(f"no data was received for {self._pace.silent_ticks * self._pace.tick_s:g} s")

    def abort(self, cause: str) -> None:
        """End the connection at once. `receive` raises TransferFailed with the cause."""
        self._cause = cause
        self.aborted = True
        self._writer.transport.abort()


async def dial(
    address: str,
    pace: Pace,
    pong: Callable[[int], Pong] = lambda number: Pong(number=number),
    tls: ssl.SSLContext | None = None,
) -> ControlConnection:
    """Connect to `host:port`. Raises TransferFailed."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(pace.connect_s):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    except TimeoutError as error:
        raise TransferFailed(f"{address} did not answer within {pace.connect_s:g} s.") from error
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that is invalid in DNS
        raise TransferFailed(f"Cannot connect to {address}: {error}.") from error
    return ControlConnection(reader, writer, pace, pong)


def split_address(address: str) -> tuple[str, int]:
    """
    Split `host:port`. Raises TransferFailed if it is invalid.

    >>> split_address("[::1]:7000")
    ('::1', 7000)
    """
    host, _, port = address.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0
    if not host or not 0 < number < 65536:
        raise TransferFailed(f"Invalid address: {address[:200]!r}. Expected host:port.")
    return host.removeprefix("[").removesuffix("]"), number


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around a host that contains colons."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _name(writer: asyncio.StreamWriter) -> str:
    with contextlib.suppress(TypeError, ValueError):  # a closed socket has no peer name
        host, port = writer.get_extra_info("peername")[:2]
        return join_address(host, port)
    return "an unknown peer"
