"""
One control connection between a decode and a prefill worker, as both roles use it.

Frames go out in order and come in whole; what the network does wrong comes out as `TransferFailed`
and nothing else. A peer that hangs does not close its socket, so both sides talk at least once per
tick and a peer that is silent for some ticks is dead. Silence is counted in our own ticks, not by the
clock: a worker that was itself stopped for a minute must not believe that its peers were.
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
"""Most bytes taken from the socket at a time; each piece of a long frame counts as a sign of life."""

BACKLOG_BYTES = 4 * messages.FRAME_LIMIT
"""Bytes that may wait for a peer that does not read; one more and the connection is cut."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The deadlines of a control connection. Tests make them short."""

    tick_s: float = 1.0
    """A ping is sent after a tick in which nothing else was."""
    silent_ticks: int = 5
    """Ticks without a byte from the peer after which it is dead."""
    connect_s: float = 1.0
    handshake_s: float = 5.0
    """From the connection to the end of Hello and Welcome."""
    close_s: float = 1.0
    """For the last frames to leave when the connection is closed."""


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
        self.peer = _name(writer)
        sock = writer.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start_heartbeat(self) -> None:
        """From now on the peer is to be heard in every few ticks. Call after the handshake."""
        self._heart = asyncio.create_task(self._beat())

    def send(self, message: AnyMessage) -> None:
        """
        Queue one message; on a connection that has ended it is dropped, as the network might have.

        Raises TransferFailed if the message is too large for a frame.
        """
        frame = messages.encode(message)
        if self._writer.is_closing():
            return
        self._writer.write(frame)
        self._spoke = True
        backlog = self._writer.transport.get_write_buffer_size()
        if backlog > BACKLOG_BYTES:
            self._cut(f"it has not read {backlog} bytes that wait for it")

    async def receive(self) -> AnyMessage:
        """The next message that is not a Ping; those are answered here. Raises TransferFailed at the end."""
        while True:
            message = messages.decode(await self.receive_frame(messages.FRAME_LIMIT))
            if not isinstance(message, Ping):
                return message
            self.send(self._pong(message.number))

    async def receive_frame(self, limit: int) -> bytes:
        """The body of the next frame, of at most `limit` bytes. Raises TransferFailed."""
        length = messages.frame_length(await self._read(messages.LENGTH_BYTES))
        if length > limit:
            raise TransferFailed(f"A frame of {length} bytes is over the limit of {limit}.")
        return await self._read(length)

    async def messages(self) -> AsyncIterator[AnyMessage]:
        """All messages until the connection ends, which it does by raising TransferFailed."""
        while True:
            yield await self.receive()

    async def close(self) -> None:
        """Let what is queued go out, for a short while, and end the connection."""
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
        self._cut(f"nothing was heard of it for {self._pace.silent_ticks * self._pace.tick_s:g} s")

    def _cut(self, cause: str) -> None:
        self._cause = cause
        self._writer.transport.abort()


async def dial(
    address: str,
    pace: Pace,
    pong: Callable[[int], Pong] = lambda number: Pong(number=number),
    tls: ssl.SSLContext | None = None,
) -> ControlConnection:
    """A connection to `host:port`. Raises TransferFailed."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(pace.connect_s):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    except TimeoutError as error:
        raise TransferFailed(f"{address} did not answer within {pace.connect_s:g} s.") from error
    except (OSError, UnicodeError) as error:  # the latter for a name that DNS cannot carry
        raise TransferFailed(f"{address} cannot be reached: {error}.") from error
    return ControlConnection(reader, writer, pace, pong)


def split_address(address: str) -> tuple[str, int]:
    """
    Host and port of `host:port`; raises TransferFailed if it is none.

    >>> split_address("[::1]:7000")
    ('::1', 7000)
    """
    host, _, port = address.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0
    if not host or not 0 < number < 65536:
        raise TransferFailed(f"{address[:200]!r} is not an address of the form host:port.")
    return host.removeprefix("[").removesuffix("]"), number


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets where the host has colons of its own."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _name(writer: asyncio.StreamWriter) -> str:
    with contextlib.suppress(TypeError, ValueError):  # a socket that is gone already has no name
        host, port = writer.get_extra_info("peername")[:2]
        return join_address(host, port)
    return "an unknown peer"
