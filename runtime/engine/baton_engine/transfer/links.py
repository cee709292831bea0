"""
The connections to other workers, of whose memory this worker reads: one for each, shared by all sessions.

A decode worker has links to the prefill workers that compute its prompts. A prefill worker has links to the
workers whose cached blocks it reads. A link belongs to one process of the peer. When it ends, so does the
access to the peer's memory: a worker that restarts at the same address gets a new link.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine
from typing import Protocol

from baton_api.errors import IncompatiblePeer, TransferFailed
from baton_api.messages import (
    Abort,
    Checksums,
    Chunk,
    Commit,
    Done,
    Drained,
    Failed,
    Pong,
    Prefill,
    ReadCached,
    Welcome,
)
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
    """One other worker, from Welcome to the end of the connection."""

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
        return self._reading.done() or self._connection.aborted

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
                log.info("connected to worker %s at %s", welcome.worker[:200], address)
        except BaseException:
            peer.cancel()
            link._reading.cancel()
            await connection.close()
            raise
        return link

    def send(self, message: Prefill | ReadCached | Done | Abort) -> None:
        """Raises TransferFailed if the message is too large."""
        self._connection.send(message)

    def fail(self, error: TransferFailed) -> None:
        """
        End the link, because a read of the peer's memory has failed.

        The transfer reads nothing more over this access to the peer, so the next session needs another link.
        """
        self._connection.abort(str(error))

    async def run(self, transfer: Transfer, on_end: Callable[[], None]) -> None:
        """Wait until the connection ends; then call `on_end`, and `lost` of all listeners."""
        try:
            await self._reading
        finally:
            on_end()
            for listener in list(self.listeners.values()):
                listener.lost()
            # Disconnected before the peer is dialed anew: the access of the next link has the same name.
            await asyncio.gather(self._disconnect(transfer), self._connection.close())

    async def _disconnect(self, transfer: Transfer) -> None:
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
                            f"Unexpected {type(message).__name__} message from worker "
                            f"{self.worker} at {self.address}."
                        )
        except TransferFailed as error:
            log.warning("lost worker %s: %s", self.worker[:200], error)


class Links:
    """The links of one worker by address. They are opened on first use, and again after a loss."""

    def __init__(self, me: Identity, transfer: Transfer, pace: Pace, tls: ssl.SSLContext | None) -> None:
        self._me = me
        self._transfer = transfer
        self._pace = pace
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._openings: dict[str, asyncio.Task[Link]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._openings)

    @property
    def open(self) -> list[Link]:
        return [opening.result() for opening in self._openings.values() if _is_open(opening)]

    async def link(self, address: str, ticket: str, request_id: str) -> Link:
        """
        Return the link to `address`; open it with `ticket`, which is for `request_id`, if there is none.

        Raises TransferFailed if the address does not answer, IncompatiblePeer if the peer refuses.
        """
        opening = self._openings.get(address)
        if opening is None or _has_ended(opening):
            opening = asyncio.create_task(
                Link.open(address, ticket, request_id, self._me, self._transfer, self._pace, self._tls)
            )
            self._openings[address] = opening
            opening.add_done_callback(lambda task: self._opened(address, task))
        return await asyncio.shield(opening)

    async def close(self) -> None:
        tasks = [*self._openings.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _opened(self, address: str, opening: asyncio.Task[Link]) -> None:
        if _is_open(opening):
            self._spawn(self._keep(opening.result(), opening))
        elif not opening.cancelled() and isinstance(opening.exception(), TransferFailed):
            self._loop.call_later(self._pace.unreachable_s, self._forget, address, opening)
        else:
            self._forget(address, opening)

    async def _keep(self, link: Link, opening: asyncio.Task[Link]) -> None:
        await link.run(self._transfer, lambda: self._forget(link.address, opening))

    def _forget(self, address: str, opening: asyncio.Task[Link]) -> None:
        if self._openings.get(address) is opening:
            del self._openings[address]

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_open(opening: asyncio.Task[Link]) -> bool:
    return opening.done() and not opening.cancelled() and opening.exception() is None


def _has_ended(opening: asyncio.Task[Link]) -> bool:
    return _is_open(opening) and opening.result().ended
