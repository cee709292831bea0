"""
The control server of a prefill worker: computes prompts for decode workers and holds their blocks.

A decode worker sends a prompt, receives announcements of computed blocks, reads them, and sends Done. If it
disconnects, its blocks are released. A prompt is checked before anything is computed for it; then `sessions`
decides about it, and `prompts` runs it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from baton_api import logs
from baton_api.errors import InvalidRequest
from baton_api.hashing import chain_hash, root_hash
from baton_api.messages import AnyMessage, Failed, Prefill
from baton_engine.adapters import AdapterRegistry
from baton_engine.tiers.peers import PeerCaches
from baton_engine.tracing import WorkerTracing
from baton_engine.transfer import Transfer
from baton_engine.transfer.control import ControlConnection, Pace
from baton_engine.transfer.handshake import Identity
from baton_engine.transfer.integrity import by_sums
from baton_engine.transfer.server import LONGEST_DEADLINE_S, PEERS, SESSIONS, ControlServer, Sessions
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


SESSION_LIMIT = 512
"""Maximum characters of a session's name."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """The values that a prompt is checked against."""

    vocab: int
    max_tokens: int
    """Maximum tokens of a prompt."""
    block_size: int


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
        return await loop.run_in_executor(self._admissions, check_prompt, prefill, self._limits)


def check_prompt(prefill: Prefill, limits: PromptLimits) -> list[bytes]:
    """
    Return the chain hashes of the prompt's blocks, a partial last one included. Raises InvalidRequest.

    Also compares the parent hash, which differs if the two workers have different tokens.
    """
    tokens, size = prefill.tokens, limits.block_size
    if not 0 < len(prefill.session) <= SESSION_LIMIT:
        raise InvalidRequest(
            f"the session's name has {len(prefill.session)} characters, not 1 to {SESSION_LIMIT}"
        )
    if not 0 < len(tokens) <= limits.max_tokens:
        raise InvalidRequest(f"the prompt has {len(tokens)} tokens, not 1 to {limits.max_tokens}")
    if min(tokens) < 0 or max(tokens) >= limits.vocab:
        raise InvalidRequest(f"the prompt has token {max(tokens)}, but the vocabulary has {limits.vocab}")
    blocks = -(-len(tokens) // size)
    if not 0 <= prefill.start_block < blocks:
        raise InvalidRequest(f"block {prefill.start_block} is asked for, but the prompt has {blocks}")
    if not 0 < prefill.deadline_s < math.inf:
        raise InvalidRequest(f"the deadline of {prefill.deadline_s} s is not in the future")
    problem = prefill.sampling.problem(limits.vocab)
    if problem:
        raise InvalidRequest(problem)
    hashes: list[bytes] = []
    parent = root_hash(prefill.salt, prefill.adapter_digest)
    for block in range(blocks):
        if block == prefill.start_block and parent != prefill.parent:
            raise InvalidRequest(f"the tokens before block {block} are not those that the decode worker has")
        parent = chain_hash(parent, tokens[block * size : (block + 1) * size])
        hashes.append(parent)
    return hashes
