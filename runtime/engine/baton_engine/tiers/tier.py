"""
A tier of one worker: it keeps blocks that the pool evicts, and gives them back for less than computing them.

Writing is behind, as in a database's buffer pool: a cleaner copies unused blocks of the pool before they are
evicted, the least recently used first. Eviction never waits for it. A block that is evicted before it was
copied, or while it is copied, is dropped. Reading is a `CachedPrefix` (`restore`).

The index and all decisions belong to the engine's thread. Bytes are copied by two threads, which report by
commands to it.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from baton_api.prompt_report import Fallback
from baton_engine.kv.block_pool import BlockPool
from baton_engine.kv.cache import KVCache
from baton_engine.kv.events import KvEvents
from baton_engine.requests import Fetch, FetchResult
from baton_engine.streams import Event
from baton_engine.tiers import policy
from baton_engine.tiers.blocks import PoolBytes
from baton_engine.tiers.index import Place, TierIndex
from baton_engine.tiers.policy import PeerSpeed
from baton_engine.tiers.restore import Restored, Restores
from baton_engine.tiers.store import Copy, Store

log = logging.getLogger(__name__)

Result = TypeVar("Result")

COPY_BYTES = 32 * 2**20
"""Size of the blocks that are copied beside one forward pass, and of what may be copied in vain: 20 ms of a
core. It is several times what a pass of the default size computes of a small model."""

FIRST_WAIT_S = 0.002
"""Assumed seconds until a restore begins, before the first one."""

FIRST_BYTES_PER_S = 2e9
"""Assumed speed of the first restore."""


@dataclass(slots=True)
class TierTotals:
    """Sums since the start. The engine's thread adds to them; a snapshot copies them."""

    queries: int = 0
    """Blocks of prompts that the pool did not have."""
    hits: int = 0
    """Blocks that were restored."""
    read_s: float = 0.0
    writes: int = 0
    """Blocks that were copied to the tier."""
    write_s: float = 0.0
    dropped: int = 0
    """Blocks that the pool evicted before they were copied."""
    corrupt: int = 0
    """Blocks whose bytes had changed."""
    errors: int = 0
    """Writes that failed."""


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """State of a tier at one moment."""

    name: str
    blocks: int
    capacity: int
    """Blocks for which it has room."""
    block_bytes: int
    totals: TierTotals


class Unused(NamedTuple):
    """A published block of the pool that no request uses."""

    block: int
    parent: bytes


class Tier:
    """One tier behind the pool of one engine. Used on the engine's thread, but for `close`."""

    def __init__(self, store: Store, cache: KVCache, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = store.name
        self.totals = TierTotals()
        self._store = store
        self._cache = cache
        self._clock = clock
        self._bytes = PoolBytes(cache)
        self._restores = Restores(store, self._bytes, clock)
        self._copier = ThreadPoolExecutor(1, thread_name_prefix=f"copy-{store.name}")
        self._speed = PeerSpeed(cache.block_bytes, FIRST_WAIT_S, FIRST_BYTES_PER_S)
        self._dirty: OrderedDict[bytes, Unused] = OrderedDict()
        """Unused blocks that are not in the tier, in the order of their last use."""
        self._copying: set[bytes] = set()
        """Blocks that are being copied, and that the pool still has."""
        self._busy = False
        """Whether the copying thread has work."""
        self._prepared = False
        self._queued = 0
        """Blocks of the restores that have not reported."""
        self._paused_until = 0.0

    def attach(
        self,
        pool: BlockPool,
        post: Callable[[Callable[[], None]], bool],
        fetched: Callable[[FetchResult], None],
        events: KvEvents | None,
    ) -> None:
        """Connect the engine, before its thread starts. `post` posts a command to it."""
        self._pool = pool
        self._post = post
        self._fetched = fetched
        self._index = TierIndex(self._store.slots, self._store.medium, events)
        self._each = max(1, COPY_BYTES // self._cache.block_bytes)

    def snapshot(self) -> TierSnapshot:
        """Any thread."""
        index = self._index
        return TierSnapshot(
            self.name, len(index), index.capacity, self._cache.block_bytes, replace(self.totals)
        )

    def close(self) -> None:
        """After the engine's thread has ended."""
        self._restores.close()
        self._copier.shutdown(wait=True, cancel_futures=True)
        self._store.close()

    # --- What happens in the pool ---

    def unused(self, name: bytes, block: int, parent: bytes) -> None:
        """No request uses this published block any more. Of a chain, the last block comes first."""
        if name in self._index or name in self._copying:
            return
        self._dirty[name] = Unused(block, parent)
        self._dirty.move_to_end(name)

    def evicted(self, name: bytes) -> None:
        """The pool uses the block for something else from now on."""
        self._index.used(name)
        if self._dirty.pop(name, None) is not None or name in self._copying:
            self._copying.discard(name)
            self.totals.dropped += 1

    def has(self, name: bytes) -> bool:
        return name in self._index

    def clear(self) -> None:
        """Forget all blocks."""
        self._dirty.clear()
        self._copying.clear()
        self._index.clear()

    def announce(self) -> None:
        self._index.announce()

    # --- The cleaner ---

    def clean(self, idle: bool) -> None:
        """Copy some blocks, if it is time to. `idle`: the engine has nothing else to do."""
        if self._busy:
            return
        pool = self._pool
        room = idle and bool(self._index.free)
        if self._dirty and policy.cleans(pool.available - len(self._dirty), pool.capacity, room):
            self._copy()
        elif idle and not self._prepared:
            self._work(self._store.prepare, self._after_preparing)

    def _copy(self) -> None:
        if self._clock() < self._paused_until:
            return
        copies: list[Copy] = []
        while self._dirty and len(copies) < self._each:
            slot = self._index.reserve()
            if slot is None:
                break
            name, (block, parent) = self._dirty.popitem(last=False)
            copies.append(Copy(name, parent, block, slot))
        self._copying.update(copy.name for copy in copies)
        written, store, pool = self._cache.streams.record(), self._store, self._bytes

        def write() -> tuple[list[int], float]:
            written.wait()
            began = self._clock()
            return store.write(copies, pool), self._clock() - began

        if copies:
            self._work(write, lambda done: self._copied(copies, done))

    def _copied(self, copies: Sequence[Copy], done: Future[tuple[list[int], float]]) -> None:
        error = done.exception()
        if error is not None:
            log.error("Cannot write %d KV blocks to the tier %s: %s", len(copies), self.name, error)
            self.totals.errors += 1
            self._paused_until = self._clock() + policy.PAUSE_S
        else:
            sums, seconds = done.result()
            self.totals.write_s += seconds
        for number, copy in enumerate(copies):
            if copy.name in self._copying and error is None:
                self._index.add(copy.name, Place(copy.slot, sums[number], copy.parent))
                self.totals.writes += 1
            else:  # evicted or cleared meanwhile: the bytes may be those of another block
                self._index.give_back(copy.slot)
            self._copying.discard(copy.name)

    def _after_preparing(self, done: Future[bool]) -> None:
        self._prepared = done.exception() is not None or not done.result()

    def _work(self, work: Callable[[], Result], then: Callable[[Future[Result]], None]) -> None:
        """Run `work` on the copying thread, and `then` on the engine's."""

        def finish(done: Future[Result]) -> None:
            self._busy = False
            then(done)
            self.clean(idle=False)  # beside the next pass, whose end may be too late

        self._busy = True
        future = self._copier.submit(work)
        future.add_done_callback(lambda done: self._post(lambda: finish(done)))

    # --- Restoring ---

    def prefix(self, names: Sequence[bytes], start: int) -> TierPrefix | None:
        """Return the blocks of a chain from block `start` on that can be restored. None: there are none."""
        if start >= len(names) or names[start] not in self._index:
            return None
        count = self._index.matched(names[number] for number in range(start, len(names)))
        return TierPrefix(self, names, start + count)

    def within_s(self, blocks: int, compute_s: float) -> float:
        speed = self._speed.at(self._clock())
        if speed is None:
            return 0.0
        behind = replace(speed, wait_s=speed.seconds(self._queued))
        return policy.read_within_s(blocks, compute_s, behind)

    def start(self, names: Sequence[bytes], fetch: Fetch, unused: Event) -> None:
        places = self._index.hold(names)
        self._queued += len(places)

        def report(restored: Restored) -> None:
            self._post(lambda: self._restored(names, places, restored))
            self._fetched(restored.result)

        self._restores.start(fetch, places, unused, report)

    def cancel(self, request_id: str) -> None:
        self._restores.cancel(request_id)

    def _restored(self, names: Sequence[bytes], places: list[Place], restored: Restored) -> None:
        self._index.release(places)
        self._queued -= len(places)
        arrived, reason, now = restored.result.arrived, restored.result.reason, self._clock()
        self.totals.hits += arrived
        self.totals.read_s += restored.read_s
        if restored.corrupt is not None:
            log.error(
                "The KV block %s of the tier %s is corrupt, and is computed.", names[arrived].hex(), self.name
            )
            self.totals.corrupt += 1
            self._index.drop(names[arrived])
        if arrived and not reason:
            self._speed.add(arrived, restored.wait_s, restored.read_s, now)
        elif reason in (Fallback.DEADLINE, Fallback.TRANSFER_FAILED) and not restored.queued:
            self._speed.failed(now, restored.wait_s + restored.read_s)


@dataclass(frozen=True, slots=True)
class TierPrefix:
    """`CachedPrefix` of one prompt in one tier."""

    tier: Tier
    names: Sequence[bytes]
    """Chain hashes of the prompt."""
    blocks: int

    @property
    def name(self) -> str:
        return self.tier.name

    def read_within_s(self, blocks: int, compute_s: float) -> float:
        return self.tier.within_s(blocks, compute_s)

    def start(self, fetch: Fetch, unused: Event) -> None:
        first = fetch.start_block
        self.tier.start(self.names[first : first + len(fetch.blocks)], fetch, unused)

    def cancel(self, request_id: str) -> None:
        self.tier.cancel(request_id)


class Tiers:
    """All tiers of one worker, as the pool sees them: `PoolTiers`."""

    def __init__(self, tiers: Iterable[Tier]) -> None:
        self.all = tuple(tiers)

    def unused(self, name: bytes, block: int, parent: bytes) -> None:
        for tier in self.all:
            tier.unused(name, block, parent)

    def evicted(self, name: bytes) -> None:
        for tier in self.all:
            tier.evicted(name)

    def has(self, name: bytes) -> bool:
        return any(tier.has(name) for tier in self.all)

    def clear(self) -> None:
        for tier in self.all:
            tier.clear()

    def announce(self) -> None:
        for tier in self.all:
            tier.announce()
