"""
One request on a client's connection and its answer: uvicorn's cycle, with a short way for the hot path.

ASGI speaks in dictionaries, checks every header's spelling and finds out by a waiting task that a client has
left. What the proxy passes on was read by a parser that checked it, so it calls here: `start`, `write`, and
`on_gone` to be told. Both ways keep the same state, and an answer may begin on one and end on the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

if TYPE_CHECKING:
    from baton_router.listener import Listener

EXTENSION = "baton.cycle"
"""The scope's extension that holds the `Cycle`."""

WITHOUT_BODY = (204, 304)


class Cycle(RequestResponseCycle):
    """Made by the listener for each request."""

    def __init__(self, listener: Listener, scope: Any, keep_alive: bool) -> None:
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
        """Called when the client leaves before the answer is complete."""
        self._head = b""
        """Of an answer that has started, until its first piece is there."""

    def taken(self) -> bytes | None:
        """The request's body, if all of it is here already."""
        if self.more_body:
            return None
        body, self.body = self.body, bytearray()
        return bytes(body)

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """
        The answer's head, which goes with the first piece that is written.

        `headers` have lower-case names, and none is of one connection; `status` is of an answer with a body.
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
        """A part of the body; without `more` the last one."""
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
        """The client's connection is lost."""
        if self.response_complete:
            return
        self.disconnected = True
        self.message_event.set()
        if self.on_gone is not None:
            self.on_gone()
