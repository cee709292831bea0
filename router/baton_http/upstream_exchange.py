"""
The response to one request of a worker, as it arrives.

Bodies come in the pieces in which they arrived. At most about `BUFFERED` bytes wait here, so a slow client
slows the worker down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton_api.errors import WorkerLost

if TYPE_CHECKING:
    from baton_http.upstream import UpstreamConnection

BUFFERED = 64 * 1024
"""Bytes of one response that may wait for the client before the worker is paused."""

Headers = list[tuple[bytes, bytes]]

Sink = Callable[[bytes], bool]
"""Takes a piece of a body as it arrives; False if it cannot at the moment."""


class UpstreamLost(WorkerLost):
    """The worker did not respond, or not completely."""

    def __init__(self, worker: str, cause: str) -> None:
        super().__init__(worker)
        self.cause = cause
        """connect, reset, malformed, incomplete, hung, slow, overdue, idle, drained or gone."""


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
