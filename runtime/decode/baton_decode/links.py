"""
The connection to one prefill worker, shared by all prompts that it computes for this worker.

A link belongs to one process of the peer. When it ends, so does the access to the peer's memory: a worker
that restarts at the same address gets a new link.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Protocol

from baton_api.errors import IncompatiblePeer, TransferFailed
from baton_api.messages import Abort, Checksums, Chunk, Commit, Done, Drained, Failed, Pong, Prefill, Welcome
from baton_engine.transfer import Peer, Transfer, control, handshake
from baton_engine.transfer.control import ControlConnection, Pace
from baton_engine.transfer.handshake import Identity
from baton_engine.transfer.parts import whole_bytes

log = logging.getLogger(__name__)


class SessionListener(Protocol):
    """Receives the messages of one session."""

    def receive(self, message: Chunk | Checksums | Commit | Failed) -> None: ...

    def lost(self) -> None:
        """The link has ended."""
        ...


class Link:
    """One prefill worker, from Welcome to the end of the connection."""

    def __init__(
        self, connection: ControlConnection, welcome: Welcome, peer: asyncio.Task[Peer], address: str
    ) -> None:
        """`peer` ends with the access to the peer's memory. Starts to read messages."""
        self.address = address
        self.worker = welcome.worker
        self.listeners: dict[str, SessionListener] = {}
        self.load: Pong | None = None
        """From the latest heartbeat."""
        self._connection = connection
        self._peer = peer
        self._reading = asyncio.create_task(self._read())

    @property
    def peer(self) -> Peer:
        """Of a link that is open and has not ended."""
        return self._peer.result()

    @property
    def ended(self) -> bool:
        """Whether the connection has ended: a listener that is added now would hear nothing."""
        return self._reading.done()

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
        """
        Return a link, which may have ended already. Call `run` on it.

        Raises TransferFailed if the address does not answer, IncompatiblePeer if the peer refuses.
        """
        connection = await control.dial(address, pace, tls=tls)
        try:
            hello = me.hello(request_id, ticket, len(transfer.pools))
            welcome = await handshake.introduce(connection, me, hello, pace)
            theirs, ours = whole_bytes(welcome.pools), whole_bytes(transfer.pools)
            if theirs != ours:
                raise IncompatiblePeer(
                    f"{welcome.worker} at {address} has KV blocks of {theirs} bytes, "
                    f"but {me.worker} has {ours}."
                )
        except BaseException:
            await connection.close()
            raise
        peer = asyncio.create_task(transfer.connect(welcome.agent, welcome.pools, welcome.epoch))
        link = cls(connection, welcome, peer, address)
        try:
            # Only a reader notices that the peer ends meanwhile.
            await asyncio.wait((peer, link._reading), return_when=asyncio.FIRST_COMPLETED)
            if not link.ended:
                peer.result()
                log.info("connected to prefill worker %s at %s", welcome.worker[:200], address)
        except BaseException:
            peer.cancel()
            link._reading.cancel()
            await connection.close()
            raise
        return link

    def send(self, message: Prefill | Done | Abort) -> None:
        """Raises TransferFailed if the message is too large."""
        self._connection.send(message)

    async def run(self, transfer: Transfer, on_end: Callable[[], None]) -> None:
        """Wait until the connection ends; then call `on_end`, and `lost` of all listeners."""
        try:
            await self._reading
        finally:
            on_end()
            for listener in list(self.listeners.values()):
                listener.lost()
            await self._connection.close()
            await asyncio.wait((self._peer,))
            if self._peer.exception() is None:
                await transfer.disconnect(self.peer)

    async def _read(self) -> None:
        """Pass messages on until the connection ends."""
        try:
            async for message in self._connection.messages():
                match message:
                    case Chunk() | Checksums() | Commit() | Failed():
                        listener = self.listeners.get(message.session)
                        if listener is not None:
                            listener.receive(message)
                    case Pong():
                        self.load = message
                    case Drained():
                        pass
                    case _:
                        raise TransferFailed(
                            f"Unexpected {type(message).__name__} message from prefill worker "
                            f"{self.worker} at {self.address}."
                        )
        except TransferFailed as error:
            log.warning("lost prefill worker %s: %s", self.worker[:200], error)
