"""Ends the work of a request whose client has gone away."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


class until_disconnect:
    """
    Cancels the body of the `async with` when the client disconnects, and raises ClientGone.

    The body must not send the last part of the answer: a server reports a finished answer as a
    disconnect too.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        if self._gone and self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            raise ClientGone from error
