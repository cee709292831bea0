"""The client's side of one request: its body, the response, and whether the client is still connected."""

from __future__ import annotations

import asyncio
from types import TracebackType

from baton_api.errors import BodyTooLarge
from baton_http.replies import Receive, Scope, Send
from baton_http.request_cycle import EXTENSION, WITHOUT_BODY, RequestCycle
from baton_http.upstream import Headers

FLUSH_S = 5.0
"""Seconds in which sent bytes must reach a client whose connection is then cut."""


class ClientDisconnected(Exception):
    """The client closed its connection."""


class ClientConnection:
    """
    One client's connection, for one request.

    As a context manager it watches the connection: when the client disconnects, the body of the `with` is
    cancelled and ClientDisconnected is raised.
    """

    __slots__ = (
        "_cycle",
        "_direct",
        "_disconnected",
        "_finished",
        "_heard",
        "_loop",
        "_receive",
        "_send",
        "_task",
        "moved",
        "sending",
        "started",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle: RequestCycle = scope["extensions"][EXTENSION]["cycle"]
        self._cycle = cycle
        self._heard = receive == cycle.receive
        """Whether no middleware reads the request or the response before this object."""
        self._direct = send == cycle.send
        self.started = False
        self.sending = False
        self.moved = 0.0
        """Loop time of the last send's start or end."""
        self._receive = receive
        self._send = send
        self._loop = cycle.loop  # to ask for the running one costs a call of the system
        self._finished = False
        self._disconnected = False

    async def body(self, limit: int) -> bytes:
        """
        The body of the request. Its memory counts for the tenant until the request ends.

        Raises BodyTooLarge, ClientDisconnected, and why the rest of it is not read.
        """
        cycle = self._cycle
        cycle.expect(limit)
        if self._heard and (here := cycle.buffered_body()) is not None:
            return self._within(here, limit)
        body, more = bytearray(), True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise cycle.refusal or ClientDisconnected
            more = message.get("more_body", False)
            if not more and not body:
                return self._within(message["body"], limit)
            body += message["body"]
            if len(body) > limit:
                raise cycle.too_large(limit)
        return bytes(body)

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        self.moved = self._loop.time()
        if self._direct and status not in WITHOUT_BODY:
            self._cycle.start(status, headers)
        else:
            self._direct = False
            await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, piece: bytes, more: bool) -> None:
        """Send a part of the response; waits while the client is slow."""
        if not more:
            self._finished = True
        self.moved = self._loop.time()
        cycle = self._cycle
        if self._direct and not cycle.flow.write_paused:
            cycle.write(piece, more)
            return
        self.sending = True
        if self._direct:
            await cycle.flow.drain()
            cycle.write(piece, more)
        else:
            await self._send({"type": "http.response.body", "body": piece, "more_body": more})
        self.sending = False
        self.moved = self._loop.time()

    @property
    def ready(self) -> bool:
        """Whether `write` may be called: the client is not slow, and no middleware reads the response."""
        return self._direct and not self._cycle.flow.write_paused

    def write(self, piece: bytes) -> None:
        """Send a part of the response, and not the last one, without a task."""
        self._cycle.write(piece, more=True)

    async def cut(self, last: bytes = b"") -> None:
        """End a started response so that no client can take it for complete."""
        self._finished = True
        try:
            async with asyncio.timeout(FLUSH_S):
                if last:
                    await self._send({"type": "http.response.body", "body": last, "more_body": True})
                self._cycle.transport.close()
                while (await self._receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            self.abort()

    def abort(self) -> None:
        """Drop the connection and unsent bytes."""
        self._cycle.transport.abort()

    def __enter__(self) -> ClientConnection:
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._task = task
        if self._cycle.disconnected:
            raise ClientDisconnected
        self._cycle.on_disconnect = self._on_disconnect
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cycle.on_disconnect = None
        if self._disconnected and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientDisconnected from error

    def _on_disconnect(self) -> None:
        if not self._finished:
            self._disconnected = True
            self._task.cancel()

    def _within(self, body: bytes, limit: int) -> bytes:
        if len(body) > limit:
            raise BodyTooLarge(limit)
        if len(body) > self._cycle.memory.used:  # a middleware has made it longer
            self._cycle.memory.use(len(body))
        return body
