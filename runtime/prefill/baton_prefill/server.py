"""
The control server of a prefill worker: computes prompts for decode workers and holds their blocks.

A decode worker sends a prompt, receives announcements of computed blocks, reads them, and sends Done. If it
disconnects, its blocks are released. `sessions` decides about a prompt, and `prompts` runs it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from baton_api import logs
from baton_api.errors import InvalidRequest
from baton_api.messages import AnyMessage, Failed, Prefill
from baton_engine.adapters import AdapterRegistry
from baton_engine.tiers.peers import PeerCaches
from baton_engine.tracing import WorkerTracing
from baton_engine.transfer import Transfer
from baton_engine.transfer.control import ControlConnection, Pace
from baton_engine.transfer.handshake import Identity
from baton_engine.transfer.integrity import by_sums
from baton_engine.transfer.server import LONGEST_DEADLINE_S, PEERS, SESSIONS, ControlServer, Sessions
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of one prefill worker."""

    prompt: PromptLimits
    sessions: int = SESSIONS
    """Maximum prompts under way, of all decode workers."""
    peers: int = PEERS
    """Maximum decode workers, and maximum connections that have not named theirs yet."""


class PrefillServer(ControlServer):
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
        peer_caches: PeerCaches | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        `matchers` is `Grammars.prepare`. Parts of prompts may be read from
        `peer_caches`. Others as of `ControlServer`.
        """
        super().__init__(
            engine,
            transfer,
            me,
            load=load,
            host=host,
            port=port,
            advertise=advertise,
            secret=secret,
            peers=limits.peers,
            max_sessions=limits.sessions,
            pace=pace,
            tls=tls,
            wall_clock=wall_clock,
        )
        self._admissions = ThreadPoolExecutor(1, thread_name_prefix="admission")
        self._context = ComputeContext(
            client,
            engine,
            transfer,
            self._executor,
            matchers,
            tracing,
            adapters or AdapterRegistry(),
            peer_caches,
        )
        self._limits = limits.prompt

    async def close(self) -> None:
        """Close all connections and release their blocks."""
        await super().close()
        self._admissions.shutdown(wait=False, cancel_futures=True)

    async def _handle(
        self, message: AnyMessage, connection: ControlConnection, sessions: Sessions, ranks: int
    ) -> None:
        if isinstance(message, Prefill):
            await self._prefill(message, connection, sessions, ranks)
        else:
            await super()._handle(message, connection, sessions, ranks)

    async def _prefill(
        self, prefill: Prefill, connection: ControlConnection, sessions: Sessions, ranks: int
    ) -> None:
        """`ranks` is the number of ranks of the decode worker."""
        before = sessions.get(prefill.session)
        if before is not None:
            if before.epoch >= prefill.epoch:
                return  # a duplicate, or a late message
            before.abort()
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
        size = self._limits.block_size
        session = PrefillSession(prefill, size, hashes[-1])

        def forget(ended: PromptTask) -> None:
            self._end(prefill.session, ended, sessions)

        # The peer chooses the session's name; two peers may choose the same one.
        request_id = f"{prefill.session}#{self._attempts}"
        full = hashes[: len(prefill.tokens) // size]
        sums = by_sums(self._transfer.pools, ranks)
        prompt = PromptTask(session, request_id, full, sums, self._context, connection, forget)
        self._begin(prefill.session, prompt, sessions)
        prompt.begin(min(prefill.deadline_s, LONGEST_DEADLINE_S))

    async def _check(self, prefill: Prefill, busy: str) -> list[bytes]:
        """The chain hashes of the prompt's blocks. Raises InvalidRequest with the reason of a refusal."""
        reason = busy or self._ticket_refusal(prefill.ticket, prefill.request_id, prefill.source)
        if reason:
            raise InvalidRequest(reason)
        # Hashing a long prompt would block the event loop for milliseconds. The thread is reserved for it,
        # since this connection's heartbeats are read only after it.
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._admissions, admission.check, prefill, self._limits)
