"""
One request on a client connection: its body, and the writing of its response.

ASGI passes dictionaries and checks the spelling of every header. The proxy forwards what a parser has checked
already, so it finds the `RequestCycle` in the scope and calls it: `start`, `write`, `on_disconnect`. Both
interfaces keep the same state: an answer may begin on one and end on the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from baton_api.capacity import SharedCapacity
from baton_api.errors import BatonError, BodyTooLarge, Overloaded
from baton_http.client_memory import BodyMemory

EXTENSION = "baton.cycle"
"""The scope's extension that holds the `RequestCycle`."""

WITHOUT_BODY = (204, 304)


class RequestCycle(RequestResponseCycle):
    """One request; the protocol creates it."""

    def __init__(
        self,
        listener: HttpToolsProtocol,
        scope: Any,
        keep_alive: bool,
        memory: SharedCapacity,
        refuse: Callable[[BatonError], None],
    ) -> None:
        """`refuse` answers a client that has not sent the whole body, and ends its connection."""
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
        self.memory = BodyMemory(memory)
        self.keeps = False
        """Whether the application keeps what it receives, until it frees `memory` or the request ends."""
        self.refusal: BatonError | None = None
        """Why the rest of the body is not read; the client is told."""
        self._refuse = refuse

    async def run_asgi(self, app: Any) -> None:
        try:
            await super().run_asgi(app)
        finally:
            self.release()  # what it used after the client had left
            self.refusal = None  # its traceback refers to this object
            self.scope["extensions"].pop(EXTENSION, None)

    def refused(self, error: BatonError) -> BatonError:
        """The error, which is the answer to a client that has not sent the whole body."""
        if self.more_body:
            self._refuse(error)
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
        try:
            self.memory.expect(length)
        except Overloaded as error:
            raise self.refused(error) from None

    def belongs_to(self, tenant: str) -> None:
        """Count the body's memory for this tenant. Raises Overloaded beyond its share."""
        try:
            self.memory.belongs_to(tenant)
        except Overloaded as error:
            raise self.refused(error) from None

    def release(self) -> None:
        """The request has ended: its body is not used any more."""
        self.memory.release()
        self.body = bytearray()

    async def receive(self) -> Any:
        message = await super().receive()
        if not self.keeps and (size := len(message.get("body", b""))):  # type: ignore[arg-type]
            self.memory.free(size)
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
    return cycle.memory.free


def _cycle(scope: Any) -> RequestCycle | None:
    """The request; None if another server received it, or its application has ended."""
    extension = scope.get("extensions", {}).get(EXTENSION)
    return None if extension is None else extension["cycle"]
