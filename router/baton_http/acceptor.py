"""Accepts client connections."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 16
"""Connections that are accepted in one turn of the event loop. Processes that share a listening socket share
a burst of clients in such parts."""

ACCEPT_RETRY_S = 1.0
"""Seconds until connections are accepted again after none could be."""


class Acceptor:
    """
    Accepts the connections of one listening socket, several in one turn of the event loop.

    uvloop's own servers accept one per turn (libuv 1.45 and later). Under load a turn takes 10 ms, and the
    last of 64 clients that connect at the same moment would wait for 64 turns.
    """

    def __init__(self, listening: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        """`protocol` is called for each connection. The owner of `listening` closes it, after `close`."""
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._protocol = protocol
        self._retry: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._closed = False
        self._resume()

    def is_serving(self) -> bool:
        return not self._closed

    def close(self) -> None:
        """Accept no more connections."""
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening)

    async def wait_closed(self) -> None:
        """Return when each accepted connection has its protocol."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _resume(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no file descriptor, or no memory, is left
                log.error("The router accepts no connection for %g s: %s.", ACCEPT_RETRY_S, error.strerror)
                self._loop.remove_reader(self._listening)
                self._retry = self._loop.call_later(ACCEPT_RETRY_S, self._resume)
                return
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError as error:  # the client has left already
            connection.close()
            log.debug("A connection was lost as it was accepted: %s", error)
