"""
Connections between the processes of one server over a Unix socket: frames, and errors that pass them.

Each message is a length of four bytes and msgpack.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec

from baton_api import errors
from baton_api.errors import BatonError, InternalError

FRAME_LIMIT = 64 * 1024 * 1024
"""Bytes of one message: the longest prompts are some hundred kilobytes."""


class RemoteError(msgspec.Struct, frozen=True, array_like=True):
    """A BatonError of the other process."""

    kind: str
    """The error's class."""
    message: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: BatonError) -> RemoteError:
        return cls(type(error).__name__, str(error), dict(vars(error)))

    def error(self) -> BatonError:
        """The error as the other process raised it."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, BatonError)):
            kind = InternalError  # one that this process does not know
        error = kind.__new__(kind, self.message)
        error.args = (self.message,)
        vars(error).update(self.fields)
        return error


class LinkProtocol(asyncio.Protocol):
    """
    One end of a connection: whole messages in and out.

    Messages sent within one iteration of the event loop go out in one write.
    """

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder()
        self._received = bytearray()
        self._sending = bytearray()

    def on_frame(self, frame: memoryview) -> None:
        """One message has come."""
        raise NotImplementedError

    def on_closed(self) -> None:
        """The connection is closed."""
        raise NotImplementedError

    def send(self, message: msgspec.Struct) -> None:
        """Send a message soon; it is dropped if the connection is closed."""
        if not self._sending:
            self._loop.call_soon(self.flush)
        encoded = self._encoder.encode(message)
        self._sending += len(encoded).to_bytes(4)
        self._sending += encoded

    def flush(self) -> None:
        """Write now what is not written yet."""
        sending, self._sending = self._sending, bytearray()
        if sending and not self.transport.is_closing():
            self.transport.write(sending)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        start, end = 0, len(received)
        with memoryview(received) as view:
            while end - start >= 4:
                size = int.from_bytes(view[start : start + 4])
                if size > FRAME_LIMIT:
                    self.transport.abort()
                    return
                if end - start - 4 < size:
                    break
                start += 4 + size
                self.on_frame(view[start - size : start])
        del received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self.on_closed()
