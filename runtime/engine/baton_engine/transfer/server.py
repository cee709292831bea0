"""
The control server of a worker: other workers connect to it, and read its KV blocks.

This module holds the connections and their sessions, and announces cached blocks (`ReadCached`). A prefill
worker adds the prompts that it computes.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

from baton_api import exposure, tickets
from baton_api.errors import IncompatiblePeer, NotReady, SetupError, TransferFailed
from baton_api.messages import (
    Abort,
    AnyMessage,
    Checksums,
    Chunk,
    Done,
    Drained,
    Failed,
    Hello,
    Pong,
    ReadCached,
    Welcome,
)
from baton_engine.requests import LentBlocks
from baton_engine.transfer import Transfer, handshake
from baton_engine.transfer.control import ControlConnection, Pace, join_address
from baton_engine.transfer.handshake import Identity
from baton_engine.transfer.integrity import by_sums

log = logging.getLogger(__name__)

LONGEST_DEADLINE_S = 3600.0
"""Upper bound of a peer's deadline."""

LINGER_S = 10.0
"""Seconds. A peer that aborts may have reads under way; without service they stay in its quarantine."""

PEERS = 256
"""Maximum other workers, and maximum connections that have not named theirs yet."""

SESSIONS = 4096
"""Maximum sessions under way, of all other workers."""


class LendingEngine(Protocol):
    """The part of `baton_engine.engine.Engine` that reads of cached blocks use."""

    def lend(self, name: str, hashes: tuple[bytes, ...]) -> Future[LentBlocks]: ...

    def take_back(self, name: str) -> None: ...


class Session(Protocol):
    """One session of a peer, until the peer needs its blocks no longer."""

    @property
    def epoch(self) -> int: ...

    def done(self) -> None:
        """The peer has read the blocks."""
        ...

    def abort(self) -> None:
        """The peer cancels the session; its reads may be under way."""
        ...

    def lost(self) -> None:
        """The connection has ended."""
        ...


Sessions = dict[str, Session]
"""The sessions of one connection by name."""


class ControlServer:
    """Serves other workers on `address` until `close`."""

    def __init__(
        self,
        engine: LendingEngine,
        transfer: Transfer,
        me: Identity,
        *,
        load: Callable[[], tuple[int, int]],
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        secret: bytes = b"",
        peers: int = PEERS,
        max_sessions: int = SESSIONS,
        pace: Pace | None = None,
        tls: ssl.SSLContext | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        `load` gives queued tokens and free blocks for the heartbeat. `advertise` is the host that others use;
        raises SetupError if they cannot use it.
        """
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._lending = engine
        self._transfer = transfer
        self._peer_reads = PeerReads(transfer)
        self._me = me
        self._load = load
        self._host, self._port = host, port
        self._advertise = exposure.advertised_host(host, "--control-host", advertise)
        self._secret = secret
        self._max_peers, self._max_sessions = peers, max_sessions
        self._pace = pace or Pace()
        self._tls = tls
        self._wall_clock = wall_clock
        self._server: asyncio.Server | None = None
        self._connections: dict[ControlConnection, asyncio.Task[None]] = {}
        """The oldest one first."""
        self._peers: set[ControlConnection] = set()
        """Those whose Hello and ticket are valid."""
        self._sessions: set[Session] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._attempts = 0
        self.draining = False

    @property
    def address(self) -> str:
        """`host:port`, as other workers and a ticket name it."""
        return join_address(self._advertise, self._port)

    @property
    def sessions(self) -> int:
        """Sessions under way, those included whose blocks are still to be read."""
        return len(self._sessions)

    async def start(self) -> None:
        try:
            self._server = await asyncio.start_server(
                self._serve,
                self._host,
                self._port,
                ssl=self._tls,
                ssl_handshake_timeout=self._pace.handshake_s if self._tls else None,
            )
        except OSError as error:
            raise SetupError(
                f"The control server cannot listen on {join_address(self._host, self._port)}: {error}. "
                "Choose another --control-port, or 0 for a free one."
            ) from error
        self._port = self._server.sockets[0].getsockname()[1]

    async def drain(self) -> None:
        """Refuse new sessions and wait until all blocks under way were read."""
        self.draining = True
        await self._idle.wait()

    async def close(self) -> None:
        """Close all connections and release their blocks."""
        if self._server is not None:
            self._server.close()
        handlers = list(self._connections.values())
        # Closed, not cancelled: asyncio's streams log a cancelled handler as an error.
        await asyncio.gather(*(connection.close() for connection in self._connections))
        await asyncio.gather(*handlers)
        await self._idle.wait()
        self._peer_reads.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = ControlConnection(reader, writer, self._pace, self._pong)
        strangers = [other for other in self._connections if other not in self._peers]
        # A peer sends its Hello at once, so the oldest ones are none.
        for other in strangers[: max(0, len(strangers) + 1 - self._max_peers)]:
            other.abort(f"{len(strangers)} connections have sent no Hello")
        self._connections[connection] = task
        sessions: Sessions = {}
        try:
            hello = await handshake.accept(connection, self._me, self._welcome, self._admit, self._pace)
            self._peers.add(connection)
            log.info("worker %s connected from %s", hello.worker[:200], connection.peer)
            async for message in connection.messages():
                await self._handle(message, connection, sessions, hello.ranks)
        except (TransferFailed, IncompatiblePeer) as error:
            log.info("%s %d sessions were under way", error, len(sessions))
        finally:
            for session in list(sessions.values()):
                session.lost()
            await connection.close()
            del self._connections[connection]
            self._peers.discard(connection)

    def _welcome(self) -> Welcome:
        self._peer_reads.begin()
        self._peer_reads.end()  # it lingers, so the peer's first read is served
        return self._me.welcome(self._transfer.metadata, self._transfer.pools)

    def _admit(self, hello: Hello) -> str | None:
        if reason := self._ticket_refusal(hello.ticket, hello.request_id):
            return reason
        if len(self._peers) >= self._max_peers:
            return f"{self._me.worker} has connections of {self._max_peers} workers already."
        return None

    def _ticket_refusal(self, ticket: str, request_id: str, source: str = "") -> str | None:
        return tickets.refusal(self._secret, ticket, request_id, self.address, self._wall_clock(), source)

    async def _handle(
        self, message: AnyMessage, connection: ControlConnection, sessions: Sessions, ranks: int
    ) -> None:
        """Handle a message of a peer with this number of ranks. Raises TransferFailed if it is unexpected."""
        match message:
            case ReadCached():
                self._read_cached(message, connection, sessions, ranks)
            case Done(session=name, epoch=epoch) | Abort(session=name, epoch=epoch):
                session = sessions.get(name)
                if session is None or session.epoch != epoch:
                    connection.send(Drained(session=name, epoch=epoch))
                elif isinstance(message, Done):
                    session.done()
                else:
                    session.abort()
            case Pong():
                pass
            case _:
                raise TransferFailed(f"Unexpected {type(message).__name__} message from {connection.peer}.")

    def _read_cached(
        self, message: ReadCached, connection: ControlConnection, sessions: Sessions, ranks: int
    ) -> None:
        busy = self._busy()
        reason = busy or self._ticket_refusal(message.ticket, message.request_id)
        if not reason and message.session in sessions:
            reason = "the session exists already"
        if reason:
            failed = Failed(
                session=message.session, epoch=message.epoch, reason=reason, retry=True, busy=bool(busy)
            )
            connection.send(failed)
            return
        self._attempts += 1
        sums = by_sums(self._transfer.pools, ranks)
        # The peer chooses the session's name; two peers may choose the same one.
        lent = _LentSession(message, f"{message.session}#{self._attempts}", connection)
        self._begin(message.session, lent, sessions)
        task = asyncio.create_task(lent.run(self._lending, self._transfer, self._executor, sums))
        task.add_done_callback(lambda _: self._end(message.session, lent, sessions))

    def _begin(self, name: str, session: Session, sessions: Sessions) -> None:
        """Add a session to those of a connection."""
        sessions[name] = session
        self._sessions.add(session)
        self._peer_reads.begin()
        self._idle.clear()

    def _end(self, name: str, session: Session, sessions: Sessions) -> None:
        if sessions.get(name) is session:
            del sessions[name]
        self._sessions.discard(session)
        self._peer_reads.end()
        if not self._sessions:
            self._idle.set()

    def _busy(self) -> str:
        if self.draining:
            return f"{self._me.worker} is draining"
        if len(self._sessions) >= self._max_sessions:
            return f"{self._me.worker} has {self._max_sessions} sessions under way already"
        return ""

    def _pong(self, number: int) -> Pong:
        queued_tokens, free_blocks = self._load()
        return Pong(
            number=number, queued_tokens=queued_tokens, free_blocks=free_blocks, draining=self.draining
        )


class _LentSession:
    """Cached blocks that a peer reads. They are kept until its Done, its Abort, or the deadline."""

    def __init__(self, message: ReadCached, name: str, connection: ControlConnection) -> None:
        self._message = message
        self._name = name
        self._connection = connection
        self._released = asyncio.Event()

    @property
    def epoch(self) -> int:
        return self._message.epoch

    def done(self) -> None:
        self._released.set()

    abort = lost = done

    async def run(
        self, engine: LendingEngine, transfer: Transfer, checksums: ThreadPoolExecutor, sums: bool
    ) -> None:
        session, epoch = self._message.session, self._message.epoch
        announcing = asyncio.create_task(self._announce(engine, transfer, checksums, sums))
        announcing.add_done_callback(lambda task: task.cancelled() or task.exception())
        released = asyncio.create_task(self._released.wait())
        try:
            async with asyncio.timeout(max(0.0, min(self._message.deadline_s, LONGEST_DEADLINE_S))):
                await asyncio.wait((announcing, released), return_when=asyncio.FIRST_COMPLETED)
                if announcing.done() and announcing.exception() is not None:
                    error = announcing.exception()
                    self._connection.send(Failed(session=session, epoch=epoch, reason=str(error), retry=True))
                    if not isinstance(error, TransferFailed | NotReady):
                        log.error("announcing cached blocks failed", exc_info=error)
                await released
        except TimeoutError:
            log.info("cached blocks of %s were released at the reader's deadline", self._name[:200])
        finally:
            announcing.cancel()
            released.cancel()
            engine.take_back(self._name)
            self._connection.send(Drained(session=session, epoch=epoch))

    async def _announce(
        self, engine: LendingEngine, transfer: Transfer, checksums: ThreadPoolExecutor, sums: bool
    ) -> None:
        """
        Send the leading blocks that are cached, and their checksums, or that there are none.

        Raises TransferFailed or NotReady.
        """
        session, epoch = self._message.session, self._message.epoch
        lent = await asyncio.wrap_future(engine.lend(self._name, tuple(self._message.hashes)))
        if not lent.blocks:
            reason = "none of the blocks is cached"
            self._connection.send(Failed(session=session, epoch=epoch, reason=reason, retry=False))
            return
        loop = asyncio.get_running_loop()
        if not lent.written.done():
            await loop.run_in_executor(None, lent.written.wait)
        self._connection.send(Chunk(session=session, epoch=epoch, first_block=0, blocks=list(lent.blocks)))
        values = await loop.run_in_executor(checksums, transfer.checksums, lent.blocks, sums)
        self._connection.send(Checksums(session=session, epoch=epoch, first_block=0, checksums=values))


class PeerReads:
    """
    Holds `Transfer.serve` while peers may read, from the first `begin` until `linger_s` after the last `end`.
    """

    def __init__(self, transfer: Transfer, linger_s: float = LINGER_S) -> None:
        self._transfer = transfer
        self._linger_s = linger_s
        self._count = 0
        self._serving: AbstractContextManager[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def served(self) -> bool:
        return self._serving is not None

    def begin(self) -> None:
        self._count += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._serving is None:
            self._serving = self._transfer.serve()
            self._serving.__enter__()

    def end(self) -> None:
        self._count -= 1
        if not self._count:
            self._timer = asyncio.get_running_loop().call_later(self._linger_s, self.close)

    def close(self) -> None:
        """Stop at once."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._serving is not None:
            self._serving.__exit__(None, None, None)
            self._serving = None
