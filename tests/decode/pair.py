"""A prefill and a decode worker in one process: real engines, real sockets, loopback with faults to order."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import torch

from baton_api.errors import InvalidRequest
from baton_api.sampling import Constraint, SamplingParams, Thinking
from baton_decode.prefill_workers import PrefillWorkers
from baton_engine.adapters import AdapterRegistry
from baton_engine.client import AsyncEngine
from baton_engine.engine import EngineLimits
from baton_engine.kv.cache import KVCache
from baton_engine.kv.events import KvEvents
from baton_engine.metrics.counters import EngineSnapshot
from baton_engine.model.decoder import Decoder, Model
from baton_engine.requests import GrammarMatcher, Output, Request
from baton_engine.tiers.peers import PeerCaches
from baton_engine.tiers.store import MemoryStore
from baton_engine.tiers.tier import Tier
from baton_engine.transfer import Transfer
from baton_engine.transfer.control import Pace
from baton_engine.transfer.handshake import Compatibility, Identity
from baton_engine.transfer.loopback import LoopbackTransfer
from baton_engine.transfer.server import ControlServer
from baton_prefill.prompts import MatchersOf, PromptClient
from baton_prefill.server import PrefillServer, PromptLimits, ServerLimits
from tests.engine.fake_model import FakeModel, make_cache
from tests.engine.faulty_transfer import FaultyTransfer

TIMEOUT_S = 300.0
"""Time limit for events that must come; machines that run tests are slow at times."""

PACE = Pace(tick_s=0.05, silent_ticks=10_000, connect_s=TIMEOUT_S, handshake_s=TIMEOUT_S, close_s=0.2)
"""Many heartbeats, and no deadline that a slow machine misses. Tests of a deadline shorten this one."""

_numbers = itertools.count()


@dataclass
class Side:
    """One worker's engine, cache and transfer."""

    name: str
    model: Model
    cache: KVCache
    client: AsyncEngine
    transfer: Transfer
    me: Identity
    tier: Tier | None = None

    @classmethod
    def make(
        cls,
        name: str,
        model: Model,
        cache: KVCache,
        *,
        weights: str = "w",
        dtype: torch.dtype = torch.float32,
        chunk_tokens: int = 8,
        last_chunk_tokens: int = 0,
        local_prefill_tokens: int = 0,
        max_running: int = 64,
        speculation_tokens: int = 0,
        overlap: bool = False,
        quarantine_limit: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        on_fatal: Callable[[str], None] | None = None,
        kv_events: KvEvents | None = None,
        tier_slots: int = 0,
    ) -> Side:
        limits = EngineLimits(
            max_model_len=model.spec.context,
            chunk_tokens=chunk_tokens,
            last_chunk_tokens=last_chunk_tokens,
            max_running=max_running,
            local_prefill_tokens=local_prefill_tokens,
            quarantine_limit=quarantine_limit,
            speculation_tokens=speculation_tokens,
            overlap=overlap,
        )
        compatibility = Compatibility.of(model.spec, dtype, weights, cache.block_size)
        me = Identity(name, uuid.uuid4().hex, "fake", compatibility)
        tier = None
        if tier_slots:
            tier = Tier(MemoryStore(tier_slots * cache.block_bytes, cache.block_bytes, None), cache)
        tiers = [] if tier is None else [tier]
        drafts = model.drafts if isinstance(model, Decoder) and speculation_tokens else None
        if drafts is not None:
            drafts.reserve(limits.results)
        client = AsyncEngine(
            model,
            cache,
            limits,
            clock=clock,
            on_fatal=on_fatal,
            kv_events=kv_events,
            tiers=tiers,
            head=None if drafts is None else (drafts, drafts),
        )
        transfer = FaultyTransfer(LoopbackTransfer(cache, name), cache)
        return cls(name, model, cache, client, transfer, me, tier)

    @property
    def faulty(self) -> FaultyTransfer:
        assert isinstance(self.transfer, FaultyTransfer)
        return self.transfer

    @property
    def now(self) -> EngineSnapshot:
        return self.client.snapshot()

    async def generate(self, request: Request) -> list[Output]:
        async with asyncio.timeout(TIMEOUT_S):
            return [output async for output in self.client.generate(request)]

    async def open(self) -> None:
        self.client.start()

    async def close(self) -> None:
        if isinstance(self.model, FakeModel):
            self.model.resume()  # a test that fails half way must not leave the engine waiting
        await self.client.close()
        if self.tier is not None:
            self.tier.close()
        await self.transfer.close()


@dataclass
class Pair:
    prefill: Side
    decode: Side
    server: PrefillServer
    prefills: PrefillWorkers
    lender: ControlServer | None = None
    """Of the decode worker, if the prefill worker reads its cache."""
    caches: PeerCaches | None = None
    """Of the prefill worker, then."""

    def request(
        self,
        prompt: list[int] | tuple[int, ...],
        *,
        remote: bool = True,
        address: str = "",
        ticket: str = "",
        matcher: GrammarMatcher | None = None,
        **sampling: object,
    ) -> Request:
        name = f"q{next(_numbers)}"
        parameters: dict[str, object] = {"temperature": 0.0, "max_tokens": 4, **sampling}
        where = self.prefills.remote(address or self.server.address, ticket, name) if remote else None
        drawn = SamplingParams(**parameters)  # type: ignore[arg-type]
        return Request(name, tuple(prompt), drawn, matcher=matcher, remote=where)

    async def generate(self, prompt: list[int], **how: object) -> list[Output]:
        return await self.decode.generate(self.request(prompt, **how))  # type: ignore[arg-type]

    async def quiet(self) -> None:
        """Wait until neither side holds anything; cached and free blocks are all there are."""
        await eventually(lambda: not self.held(), lambda: self.held())

    def held(self) -> dict[str, int]:
        counts = {"sessions": self.server.sessions, "unsettled": self.prefills.unsettled}
        if self.lender is not None:
            counts["lent"] = self.lender.sessions
        for side in (self.prefill, self.decode):
            now = side.now
            for what in ("running", "queued", "fetching", "held", "owned_blocks", "pinned_blocks"):
                counts[f"{side.name} {what}"] = getattr(now, what)
            counts[f"{side.name} quarantined"] = now.quarantined_blocks
        return {name: count for name, count in counts.items() if count}


async def eventually(claim: Callable[[], object], describe: Callable[[], object] = lambda: "") -> None:
    """Wait until `claim` holds; fails with what `describe` returns."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not claim():  # noqa: ASYNC110 - the claims are figures of other threads, which set no event
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"it never came to hold: {describe()}") from None


async def no_matcher(
    constraint: Constraint | None, thinking: Thinking | None, tenant: str
) -> Callable[[], GrammarMatcher]:
    raise InvalidRequest("This worker has no grammars.")


def serve(
    side: Side,
    *,
    pace: Pace = PACE,
    port: int = 0,
    sessions: int = 4096,
    peers: int = 256,
    secret: bytes = b"",
    wall_clock: Callable[[], float] = lambda: 1000.0,
    matchers: MatchersOf = no_matcher,
    client: PromptClient | None = None,
    adapters: AdapterRegistry | None = None,
    peer_caches: PeerCaches | None = None,
) -> PrefillServer:
    limits = PromptLimits(side.model.spec.vocab, side.model.spec.context - 1, side.cache.block_size)
    return PrefillServer(
        client or side.client,
        side.client.engine,
        side.transfer,
        side.me,
        ServerLimits(prompt=limits, sessions=sessions, peers=peers),
        matchers,
        load=lambda: (side.now.queued_tokens, side.now.available_blocks),
        port=port,
        pace=pace,
        secret=secret,
        wall_clock=wall_clock,
        adapters=adapters,
        peer_caches=peer_caches,
    )


def lend(
    side: Side,
    *,
    pace: Pace = PACE,
    port: int = 0,
    sessions: int = 4096,
    secret: bytes = b"",
    wall_clock: Callable[[], float] = lambda: 1000.0,
) -> ControlServer:
    """A decode worker's control server, which announces its cached blocks."""
    return ControlServer(
        side.client.engine,
        side.transfer,
        side.me,
        load=lambda: (side.now.queued_tokens, side.now.available_blocks),
        port=port,
        max_sessions=sessions,
        pace=pace,
        secret=secret,
        wall_clock=wall_clock,
    )


def ask(
    side: Side,
    *,
    pace: Pace = PACE,
    transfer_deadline_s: float = TIMEOUT_S,
    answer_deadline_s: float = TIMEOUT_S,
    secret: bytes = b"",
    source: str = "",
    wall_clock: Callable[[], float] = lambda: 1000.0,
) -> PrefillWorkers:
    return PrefillWorkers(
        side.client.engine,
        side.cache,
        side.transfer,
        side.me,
        vocab=side.model.spec.vocab,
        transfer_deadline_s=transfer_deadline_s,
        answer_deadline_s=answer_deadline_s,
        secret=secret,
        source=source,
        pace=pace,
        wall_clock=wall_clock,
    )


def slow_clock(step_s: float = 1000.0) -> Callable[[], float]:
    """A clock by which each forward pass takes long: a read of a peer's cache is predicted to be sooner."""
    ticks = itertools.count()
    return lambda: step_s * next(ticks)


def fake_side(name: str, blocks: int = 64, **how: object) -> Side:
    return Side.make(name, FakeModel(), make_cache(blocks), **how)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def open_pair(
    prefill: Side | None = None,
    decode: Side | None = None,
    *,
    pace: Pace = PACE,
    sessions: int = 4096,
    secret: bytes = b"",
    wall_clock: Callable[[], float] = lambda: 1000.0,
    transfer_deadline_s: float = TIMEOUT_S,
    answer_deadline_s: float = TIMEOUT_S,
    matchers: MatchersOf = no_matcher,
    adapters: AdapterRegistry | None = None,
    peers: bool = False,
    lender_secret: bytes | None = None,
    source: str = "",
    hung_s: float = TIMEOUT_S,
    peer_clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Pair]:
    """
    Both workers, started; at the end nothing may be held on either side.

    With `peers`, the prefill worker reads the decode worker's cache, whose secret may be another one, or that
    of `source`.
    """
    prefill, decode = prefill or fake_side("prefill"), decode or fake_side("decode")
    lender, caches = None, None
    if peers:
        lender_secret = secret if lender_secret is None else lender_secret
        lender = lend(decode, pace=pace, secret=lender_secret, wall_clock=wall_clock)
        await lender.start()
        caches = PeerCaches(
            prefill.client.engine,
            prefill.transfer,
            prefill.me,
            secret=secret,
            pace=pace,
            hung_s=hung_s,
            clock=peer_clock,
            wall_clock=wall_clock,
        )
    server = serve(
        prefill,
        pace=pace,
        sessions=sessions,
        secret=secret,
        wall_clock=wall_clock,
        matchers=matchers,
        adapters=adapters,
        peer_caches=caches,
    )
    prefills = ask(
        decode,
        pace=pace,
        transfer_deadline_s=transfer_deadline_s,
        answer_deadline_s=answer_deadline_s,
        secret=secret,
        source=source or (lender.address if lender is not None else ""),
        wall_clock=wall_clock,
    )
    pair = Pair(prefill, decode, server, prefills, lender, caches)
    await prefill.open()
    await decode.open()
    await server.start()
    try:
        yield pair
        await pair.quiet()
    finally:
        await pair.prefills.close()
        await pair.server.close()
        if caches is not None:
            await caches.close()
        if lender is not None:
            await lender.close()
        await decode.close()
        await prefill.close()


def tokens(outputs: list[Output]) -> list[int]:
    return [choice.token for output in outputs for choice in output.tokens]
