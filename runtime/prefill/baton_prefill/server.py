"""
The prefill role: a control server that computes prompts for decode workers and keeps their blocks.

It never acts by itself. A decode worker asks, is told of blocks as they are computed, pulls them, and
says when it is done; if it vanishes, whatever was computed for it is let go. What is decided about a
prompt stands in `rooms`, what is done about it in `prompts`; here are the connections.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from baton_api import exposure, logs, tickets
from baton_api.errors import IncompatiblePeer, InvalidRequest, SetupError, TransferFailed
from baton_api.messages import Abort, AnyMessage, Done, Drained, Failed, Hello, Pong, Prefill, Welcome
from baton_engine.kv.cache import KVCache
from baton_engine.metrics.tracing import WorkerTracing
from baton_engine.transfer import Transfer, handshake
from baton_engine.transfer.control import Connection, Pace, join_address
from baton_engine.transfer.handshake import Identity
from baton_prefill import admission
from baton_prefill.admission import PromptLimits
from baton_prefill.presence import Presence
from baton_prefill.prompts import NAME_LENGTH, Client, Computer, MatchersOf, Prompt, PromptEngine
from baton_prefill.sessions import Room

log = logging.getLogger(__name__)

LONGEST_DEADLINE_S = 3600.0
"""No decode worker may have blocks held for longer, whatever it asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What a prefill worker takes on."""

    prompt: PromptLimits
    rooms: int = 4096
    """Prompts under way, of all decode workers."""
    peers: int = 256
    """Connections."""


class PrefillServer:
    """Serves decode workers on `address` until `close`."""

    def __init__(
        self,
        client: Client,
        engine: PromptEngine,
        cache: KVCache,
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
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        `matchers` is `Grammars.prepare`, `load` gives queued tokens and free blocks for the heartbeat, and
        `advertise` is the host that others use. Raises SetupError if others cannot use it.
        """
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._admissions = ThreadPoolExecutor(1, thread_name_prefix="admission")
        self._computer = Computer(client, engine, cache, self._executor, matchers, tracing)
        self._transfer = transfer
        self._presence = Presence(transfer)
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
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._prompts: set[Prompt] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._attempts = 0
        self.draining = False

    @property
    def address(self) -> str:
        """`host:port`, as a decode worker and a ticket name it."""
        return join_address(self._advertise, self._port)

    @property
    def rooms(self) -> int:
        """Prompts under way, those that wait to be pulled included."""
        return len(self._prompts)

    async def start(self) -> None:
        try:
            self._server = await asyncio.start_server(self._serve, self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise SetupError(
                f"The control server cannot listen on {join_address(self._host, self._port)}: {error}. "
                "Choose another --control-port, or 0 for a free one."
            ) from error
        self._port = self._server.sockets[0].getsockname()[1]

    async def drain(self) -> None:
        """Take no new prompts and wait until the last block of those under way was pulled."""
        self.draining = True
        await self._idle.wait()

    async def close(self) -> None:
        """End all connections; what was computed for them is let go."""
        if self._server is not None:
            self._server.close()
        handlers = list(self._connections.values())
        # Closed, not cancelled: asyncio's streams take a cancelled handler for a broken one.
        await asyncio.gather(*(connection.close() for connection in self._connections))
        await asyncio.gather(*handlers)
        self._presence.close()
        for executor in (self._executor, self._admissions):
            executor.shutdown(wait=False, cancel_futures=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = Connection(reader, writer, self._pace, self._pong)
        self._connections[connection] = task
        prompts: dict[str, Prompt] = {}
        try:
            hello = await handshake.accept(connection, self._me, self._welcome, self._admit, self._pace)
            log.info("decode worker %s connected from %s", hello.worker[:200], connection.peer)
            async for message in connection.messages():
                await self._handle(message, connection, prompts)
        except (TransferFailed, IncompatiblePeer) as error:
            log.info("%s %d prompts were under way", error, len(prompts))
        finally:
            for prompt in list(prompts.values()):
                prompt.do(prompt.room.lost())
            await connection.close()
            del self._connections[connection]

    def _welcome(self) -> Welcome:
        self._presence.begin()
        self._presence.end()  # it lingers: the peer's first read finds somebody there
        return self._me.welcome(self._transfer.metadata, self._transfer.pool)

    def _admit(self, hello: Hello) -> str | None:
        if len(self._connections) > self._limits.peers:
            return f"{self._me.worker} has {self._limits.peers} connections already."
        return self._ticket_refusal(hello.ticket, hello.request_id)

    def _ticket_refusal(self, ticket: str, request_id: str) -> str | None:
        return tickets.refusal(self._secret, ticket, request_id, self.address, self._wall_clock())

    async def _handle(self, message: AnyMessage, connection: Connection, prompts: dict[str, Prompt]) -> None:
        match message:
            case Prefill():
                await self._ask(message, connection, prompts)
            case Done(room=room, epoch=epoch) | Abort(room=room, epoch=epoch):
                prompt = prompts.get(room)
                if prompt is None or prompt.room.ask.epoch != epoch:
                    connection.send(Drained(room=room, epoch=epoch))
                elif isinstance(message, Done):
                    prompt.do(prompt.room.done())
                else:
                    prompt.do(prompt.room.abort())
            case Pong():
                pass
            case _:
                raise TransferFailed(
                    f"{connection.peer} sent {type(message).__name__}, which is not its to say."
                )

    async def _ask(self, ask: Prefill, connection: Connection, prompts: dict[str, Prompt]) -> None:
        before = prompts.get(ask.room)
        if before is not None:
            if before.room.ask.epoch >= ask.epoch:
                return  # said twice, or late
            before.do(before.room.abort())
        reason, hashes = self._busy(), list[bytes]()
        busy = bool(reason)
        if not reason:
            reason = self._ticket_refusal(ask.ticket, ask.request_id) or ""
        if not reason:
            try:
                # Hashing a long prompt takes milliseconds that the event loop does not have. Nothing else may
                # hold this thread: heartbeats are read only after it.
                loop = asyncio.get_running_loop()
                hashes = await loop.run_in_executor(
                    self._admissions, admission.check, ask, self._limits.prompt
                )
            except InvalidRequest as error:
                reason = error.message
        if reason:
            said = logs.of(ask.request_id[:NAME_LENGTH])
            log.warning(
                "refused prompt %s of %s: %s", ask.room[:NAME_LENGTH], connection.peer, reason, extra=said
            )
            connection.send(Failed(room=ask.room, epoch=ask.epoch, reason=reason, retry=busy, busy=busy))
            return
        self._attempts += 1
        size = self._limits.prompt.block_size
        room = Room(ask, size, hashes[-1])

        def forget(ended: Prompt) -> None:
            prompts.pop(ask.room)
            self._prompts.discard(ended)
            self._presence.end()
            if not self._prompts:
                self._idle.set()

        # The room's name is the peer's choice; two peers may choose the same.
        request_id = f"{ask.room}#{self._attempts}"
        full = hashes[: len(ask.tokens) // size]
        prompt = Prompt(room, request_id, full, self._computer, connection, forget)
        prompts[ask.room] = prompt
        self._prompts.add(prompt)
        self._presence.begin()
        self._idle.clear()
        prompt.begin(min(ask.deadline_s, LONGEST_DEADLINE_S))

    def _busy(self) -> str:
        if self.draining:
            return f"{self._me.worker} is draining"
        if len(self._prompts) >= self._limits.rooms:
            return f"{self._me.worker} has {self._limits.rooms} prompts under way already"
        return ""

    def _pong(self, number: int) -> Pong:
        queued_tokens, free_blocks = self._load()
        return Pong(
            number=number, queued_tokens=queued_tokens, free_blocks=free_blocks, draining=self.draining
        )
