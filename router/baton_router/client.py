"""The client's side of one request: its body, what is sent to it, and whether it is still there."""

from __future__ import annotations

import asyncio
from types import TracebackType

from baton_api.errors import BodyTooLarge, InvalidRequest
from baton_router.answers import Receive, Scope, Send
from baton_router.listener import TRANSPORT
from baton_router.upstream import Headers

PATIENCE = 4
"""A body that is too large is still read to this many times the limit: who is cut off while sending
does not read the answer that says why."""

FLUSH_S = 5.0
"""Seconds in which what was sent must reach a client whose connection is then cut."""


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class Client:
    """
    One client, for one request.

    As a context manager it watches the connection: when the client leaves, the body of the `async
    with` is cancelled wherever it waits, and ClientGone comes out.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        extension = scope.get("extensions", {}).get(TRANSPORT)
        self.transport: asyncio.Transport | None = extension["transport"] if extension else None
        self.read = False
        """Whether the whole body has come."""
        self.started = False
        self.sending = False
        self.moved = 0.0
        """Loop time at which the last sending began or ended."""
        self._receive = receive
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._finished = False
        self._gone = False

    async def body(self, limit: int, seconds: float) -> bytes:
        """The request's body. Raises BodyTooLarge, InvalidRequest if it is slow, ClientGone."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            self.read = True
            return self._within(message["body"], limit)
        body = bytearray()
        size = 0
        try:
            async with asyncio.timeout(seconds):
                while True:
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    size += len(message["body"])
                    if size <= limit:
                        body += message["body"]
                    self.read = not message.get("more_body")
                    if self.read or size > PATIENCE * limit:
                        break
                    message = await self._receive()
        except TimeoutError as error:
            raise InvalidRequest(f"The request's body did not arrive within {seconds:g} seconds.") from error
        if size > limit:
            raise BodyTooLarge(limit)
        return bytes(body)

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        self.moved = self._loop.time()
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, piece: bytes, more: bool) -> None:
        """Pass on a part of the answer; waits while the client is slow."""
        if not more:
            self._finished = True
        self.sending = True
        self.moved = self._loop.time()
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})
        self.sending = False
        self.moved = self._loop.time()

    async def cut(self, last: bytes = b"") -> None:
        """End a started answer so that nobody can take it for complete."""
        self._finished = True
        try:
            async with asyncio.timeout(FLUSH_S):
                if last:
                    await self._send({"type": "http.response.body", "body": last, "more_body": True})
                if self.transport is None:
                    return  # to return without the end makes the server cut
                self.transport.close()
                while (await self._receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            self.abort()

    def abort(self) -> None:
        """Drop the connection and what waits on it."""
        if self.transport is not None:
            self.transport.abort()

    async def __aenter__(self) -> Client:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = self._loop.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if self._gone and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientGone from error

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._finished:
            self._gone = True
            self._task.cancel()

    @staticmethod
    def _within(body: bytes, limit: int) -> bytes:
        if len(body) > limit:
            raise BodyTooLarge(limit)
        return body
