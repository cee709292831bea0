"""
The connection to one prefill worker: kept for all prompts, and over for all of them at once.

A link belongs to one start of the peer's process. When it ends, the peer's memory is forgotten with it:
a worker that comes back at the same address is another one, and is met by a new link.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from typing import Protocol

from baton_api.errors import IncompatiblePeer, TransferFailed
from baton_api.messages import Abort, Chunk, Commit, Done, Drained, Failed, Pong, Prefill, Welcome
from baton_engine.transfer import Peer, Transfer, control, handshake
from baton_engine.transfer.control import Connection, Pace
from baton_engine.transfer.handshake import Identity

log = logging.getLogger(__name__)


class Listener(Protocol):
    """Who waits for news of one room."""

    def hear(self, message: Chunk | Commit | Failed) -> None: ...

    def lost(self) -> None:
        """The link has ended."""
        ...


class Link:
    """One prefill worker, from Welcome to the end of the connection."""

    def __init__(self, connection: Connection, welcome: Welcome, peer: Peer, address: str) -> None:
        self.address = address
        self.peer = peer
        self.worker = welcome.worker
        self.listeners: dict[str, Listener] = {}
        self.load: Pong | None = None
        """From the latest heartbeat."""
        self._connection = connection

    @classmethod
    async def open(
        cls,
        address: str,
        ticket: str,
        request_id: str,
        me: Identity,
        transfer: Transfer,
        pace: Pace,
        tls: ssl.SSLContext | None = None,
    ) -> Link:
        """Raises TransferFailed if there is nobody, IncompatiblePeer if we are not wanted there."""
        connection = await control.dial(address, pace, tls=tls)
        try:
            hello = me.hello(request_id, ticket)
            welcome = await handshake.introduce(connection, me, hello, pace)
            if welcome.pool.block_bytes != transfer.pool.block_bytes:
                raise IncompatiblePeer(
                    f"{welcome.worker} at {address} has KV blocks of {welcome.pool.block_bytes} bytes, "
                    f"but {me.worker} has {transfer.pool.block_bytes}."
                )
            peer = await transfer.connect(welcome.agent, welcome.pool, welcome.epoch)
        except BaseException:
            await connection.close()
            raise
        log.info("connected to prefill worker %s at %s", welcome.worker[:200], address)
        return cls(connection, welcome, peer, address)

    def send(self, message: Prefill | Done | Abort) -> None:
        """Raises TransferFailed if the message is too large."""
        self._connection.send(message)

    async def run(self, transfer: Transfer, on_end: Callable[[], None]) -> None:
        """Pass on what the peer says until the connection ends; then everybody is told, `on_end` first."""
        try:
            async for message in self._connection.messages():
                match message:
                    case Chunk() | Commit() | Failed():
                        listener = self.listeners.get(message.room)
                        if listener is not None:
                            listener.hear(message)
                    case Pong():
                        self.load = message
                    case Drained():
                        pass
                    case _:
                        raise TransferFailed(
                            f"{self.worker} at {self.address} sent {type(message).__name__}, "
                            "which is not its to say."
                        )
        except TransferFailed as error:
            log.warning("lost prefill worker %s: %s", self.worker[:200], error)
        finally:
            on_end()
            for listener in list(self.listeners.values()):
                listener.lost()
            await self._connection.close()
            await transfer.disconnect(self.peer)
