"""
The control server of a prefill worker: computes prompts for decode workers and holds their blocks.

A decode worker sends a prompt, receives announcements of computed blocks, reads them, and sends Done. If it
disconnects, its blocks are released. `sessions` decides about a prompt, `prompts` runs it, and this module
holds the connections.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

from baton_api import exposure, logs, tickets
from baton_api.errors import IncompatiblePeer, InvalidRequest, SetupError, TransferFailed
from baton_api.messages import Abort, AnyMessage, Done, Drained, Failed, Hello, Pong, Prefill, Welcome
from baton_engine.adapters import AdapterRegistry
from baton_engine.tracing import WorkerTracing
from baton_engine.transfer import Transfer, handshake
from baton_engine.transfer.control import ControlConnection, Pace, join_address
from baton_engine.transfer.handshake import Identity
from baton_engine.transfer.integrity import by_sums
from baton_prefill import admission
from baton_prefill.admission import PromptLimits
from baton_prefill.prompts import (
    NAME_LENGTH,
    ComputeContext,
    MatchersOf,
    PromptClient,
    PromptEngine,
    PromptTask,
)
from baton_prefill.sessions import PrefillSession

log = logging.getLogger(__name__)

LONGEST_DEADLINE_S = 3600.0
"""Upper bound of a decode worker's deadline."""

LINGER_S = 10.0
"""Seconds. A decode worker that aborts may have reads under way; without service they stay in its
quarantine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of one prefill worker."""

    prompt: PromptLimits
    sessions: int = 4096
    """Maximum prompts under way, of all decode workers."""
    peers: int = 256
    """Maximum decode workers, and maximum connections that have not named theirs yet."""


class PrefillServer:
    """Serves decode workers on `address` until `close`."""

    def __init__(
        self,
        client: PromptClient,
        engine: PromptEngine,
        transfer: Transfer,
        me: Identity,
        limits: ServerLimits,
        matchers: MatchersOf,
        *,
        load: Callable[[], tuple[int, int]],
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        secret: bytes = b"",
        pace: Pace | None = None,
        tls: ssl.SSLContext | None = None,
        tracing: WorkerTracing | None = None,
        adapters: AdapterRegistry | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        `matchers` is `Grammars.prepare`, `load` gives queued tokens and free blocks for the heartbeat, and
        `advertise` is the host that others use. Raises SetupError if others cannot use it.
        """
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._admissions = ThreadPoolExecutor(1, thread_name_prefix="admission")
        self._context = ComputeContext(
            client, engine, transfer, self._executor, matchers, tracing, adapters or AdapterRegistry()
        )
        self._transfer = transfer
        self._peer_reads = PeerReads(transfer)
        self._me = me
        self._limits = limits
        self._load = load
        self._host, self._port = host, port
        self._advertise = exposure.advertised_host(host, "--control-host", advertise)
        self._secret = secret
        self._pace = pace or Pace()
        self._tls = tls
        self._wall_clock = wall_clock
        self._server: asyncio.Server | None = None
        self._connections: dict[ControlConnection, asyncio.Task[None]] = {}
        """The oldest one first."""
        self._peers: set[ControlConnection] = set()
        """Those whose Hello and ticket are valid."""
        self._prompts: set[PromptTask] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._attempts = 0
        self.draining = False

    @property
    def address(self) -> str:
        """`host:port`, as a decode worker and a ticket name it."""
        return join_address(self._advertise, self._port)

    @property
    def sessions(self) -> int:
        """Prompts under way, those included whose blocks are still to be read."""
        return len(self._prompts)

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
        """Refuse new prompts and wait until all blocks under way were read."""
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
        self._peer_reads.close()
        for executor in (self._executor, self._admissions):
            executor.shutdown(wait=False, cancel_futures=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = ControlConnection(reader, writer, self._pace, self._pong)
        strangers = [other for other in self._connections if other not in self._peers]
        # A decode worker sends its Hello at once, so the oldest ones are none.
        for other in strangers[: max(0, len(strangers) + 1 - self._limits.peers)]:
            other.abort(f"{len(strangers)} connections have sent no Hello")
        self._connections[connection] = task
        prompts: dict[str, PromptTask] = {}
        try:
            hello = await handshake.accept(connection, self._me, self._welcome, self._admit, self._pace)
            self._peers.add(connection)
            log.info("decode worker %s connected from %s", hello.worker[:200], connection.peer)
            async for message in connection.messages():
                await self._handle(message, connection, prompts, hello.ranks)
        except (TransferFailed, IncompatiblePeer) as error:
            log.info("%s %d prompts were under way", error, len(prompts))
        finally:
            for prompt in list(prompts.values()):
                prompt.do(prompt.session.lost())
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
        if len(self._peers) >= self._limits.peers:
            return f"{self._me.worker} has connections of {self._limits.peers} decode workers already."
        return None

    def _ticket_refusal(self, ticket: str, request_id: str) -> str | None:
        return tickets.refusal(self._secret, ticket, request_id, self.address, self._wall_clock())

    async def _handle(
        self, message: AnyMessage, connection: ControlConnection, prompts: dict[str, PromptTask], ranks: int
    ) -> None:
        match message:
            case Prefill():
                await self._prefill(message, connection, prompts, ranks)
            case Done(session=session, epoch=epoch) | Abort(session=session, epoch=epoch):
                prompt = prompts.get(session)
                if prompt is None or prompt.session.prefill.epoch != epoch:
                    connection.send(Drained(session=session, epoch=epoch))
                elif isinstance(message, Done):
                    prompt.do(prompt.session.done())
                else:
                    prompt.do(prompt.session.abort())
            case Pong():
                pass
            case _:
                raise TransferFailed(
                    f"Unexpected {type(message).__name__} message from decode worker {connection.peer}."
                )

    async def _prefill(
        self, prefill: Prefill, connection: ControlConnection, prompts: dict[str, PromptTask], ranks: int
    ) -> None:
        """`ranks` is the number of ranks of the decode worker."""
        before = prompts.get(prefill.session)
        if before is not None:
            if before.session.prefill.epoch >= prefill.epoch:
                return  # a duplicate, or a late message
            before.do(before.session.abort())
        busy = self._busy()
        try:
            hashes = await self._check(prefill, busy)
        except InvalidRequest as error:
            fields = logs.of(prefill.request_id[:NAME_LENGTH])
            names = prefill.session[:NAME_LENGTH], connection.peer
            log.warning("refused prompt %s of %s: %s", *names, error.message, extra=fields)
            failed = Failed(
                session=prefill.session,
                epoch=prefill.epoch,
                reason=error.message,
                retry=bool(busy),
                busy=bool(busy),
            )
            connection.send(failed)
            return
        self._attempts += 1
        size = self._limits.prompt.block_size
        session = PrefillSession(prefill, size, hashes[-1])

        def forget(ended: PromptTask) -> None:
            prompts.pop(prefill.session)
            self._prompts.discard(ended)
            self._peer_reads.end()
            if not self._prompts:
                self._idle.set()

        # The peer chooses the session's name; two peers may choose the same one.
        request_id = f"{prefill.session}#{self._attempts}"
        full = hashes[: len(prefill.tokens) // size]
        sums = by_sums(self._transfer.pools, ranks)
        prompt = PromptTask(session, request_id, full, sums, self._context, connection, forget)
        prompts[prefill.session] = prompt
        self._prompts.add(prompt)
        self._peer_reads.begin()
        self._idle.clear()
        prompt.begin(min(prefill.deadline_s, LONGEST_DEADLINE_S))

    async def _check(self, prefill: Prefill, busy: str) -> list[bytes]:
        """The chain hashes of the prompt's blocks. Raises InvalidRequest with the reason of a refusal."""
        reason = busy or self._ticket_refusal(prefill.ticket, prefill.request_id)
        if reason:
            raise InvalidRequest(reason)
        # Hashing a long prompt would block the event loop for milliseconds. The thread is reserved for it,
        # since this connection's heartbeats are read only after it.
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._admissions, admission.check, prefill, self._limits.prompt)

    def _busy(self) -> str:
        if self.draining:
            return f"{self._me.worker} is draining"
        if len(self._prompts) >= self._limits.sessions:
            return f"{self._me.worker} has {self._limits.sessions} prompts under way already"
        return ""

    def _pong(self, number: int) -> Pong:
        queued_tokens, free_blocks = self._load()
        return Pong(
            number=number, queued_tokens=queued_tokens, free_blocks=free_blocks, draining=self.draining
        )


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
