"""
A tier of one worker: it keeps blocks that the pool evicts, and gives them back for less than computing them.

Writing is behind, as in a database's buffer pool: a cleaner copies unused blocks of the pool before they are
evicted, the least recently used first. Eviction never waits for it. A block that is evicted before it was
copied, or while it is copied, is dropped. Reading is a `CachedPrefix` (`restore`).

A tier can be behind another one, as a disk is behind the memory. Then it copies from there, before that one
drops them. When it is full, it takes blocks from their second use on.

The index and all decisions belong to the engine's thread. Bytes are copied by two threads, which report by
commands to it.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from baton_api.prompt_report import Fallback
from baton_engine.kv.block_pool import BlockPool
from baton_engine.kv.cache import KVCache
from baton_engine.kv.events import KvEvents
from baton_engine.requests import Fetch, FetchResult
from baton_engine.streams import Event
from baton_engine.tiers import policy
from baton_engine.tiers.index import Place, TierIndex
from baton_engine.tiers.policy import PeerSpeed
from baton_engine.tiers.restore import Restored, Restores
from baton_engine.tiers.slab import Bytes, sum_of
from baton_engine.tiers.store import Copy, PoolBytes, Read, Store, TierThread

log = logging.getLogger(__name__)

Result = TypeVar("Result")

COPY_BYTES = 32 * 2**20
"""Size of the blocks that are copied beside one forward pass, and of what may be copied in vain: 20 ms of a
core. It is several times what a pass of the default size computes of a small model."""

FIRST_WAIT_S = 0.002
"""Assumed seconds until a restore begins, before the first one."""

END_S = 1.0
"""Seconds for which `close` waits for each thread. One that is stuck ends with the process."""


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
    """Blocks that the pool evicted, or the tier above dropped, before they were copied."""
    corrupt: int = 0
    """Blocks whose bytes had changed."""
    errors: int = 0
    """Writes and clears that failed, and a start of which the tier could not be opened."""


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """State of a tier at one moment."""

    name: str
    blocks: int
    capacity: int
    """Blocks for which it has room."""
    block_bytes: int
    paused: bool
    """Whether it is not read, because it failed or was late, or the last write to it failed."""
    totals: TierTotals


class Unused(NamedTuple):
    """A block that can be copied: one of the pool that no request uses, or one of the tier above."""

    block: int
    """Its number in the pool, or its slot there."""
    parent: bytes
    sum: int | None = None
    """As in `Copy`."""


class Above(Protocol):
    """The pool, or the tier from which another one copies."""

    @property
    def capacity(self) -> int:
        """Number of its blocks."""
        ...

    @property
    def available(self) -> int:
        """Number of those that it can use for something else."""
        ...


class EngineTier(Protocol):
    """A tier of any kind, as the engine sees it. Used on its thread, but for `flush` and `close`."""

    totals: TierTotals

    @property
    def name(self) -> str: ...

    def attach(
        self,
        pool: BlockPool,
        post: Callable[[Callable[[], None]], bool],
        fetched: Callable[[FetchResult], None],
        events: KvEvents | None,
    ) -> None:
        """Connect the engine, before its thread starts. `post` posts a command to it."""
        ...

    def snapshot(self) -> TierSnapshot:
        """Any thread."""
        ...

    def flush(self, until: float) -> None:
        """Copy what would be lost, until this time. After the engine's thread has ended."""
        ...

    def close(self) -> None:
        """After the engine's thread has ended. What is stuck is left behind."""
        ...

    def pool_unused(self, name: bytes, block: int, parent: bytes, number: int) -> None:
        """As `PoolTiers.unused`."""
        ...

    def pool_evicted(self, name: bytes) -> None:
        """As `PoolTiers.evicted`."""
        ...

    def has(self, name: bytes) -> bool:
        """As `PoolTiers.has`."""
        ...

    def clear(self) -> None:
        """Forget all blocks."""
        ...

    def announce(self) -> None:
        """Begin to publish all blocks again."""
        ...

    def announces(self) -> bool:
        """Publish some of them. False: all are."""
        ...

    def clean(self, idle: bool) -> None:
        """Copy some blocks, if it is time to. `idle`: the engine has nothing else to do."""
        ...

    def prefix(self, names: Sequence[bytes], start: int) -> TierPrefix | None:
        """Return the blocks of a chain from block `start` on that can be restored. None: there are none."""
        ...

    def within_s(self, names: Sequence[bytes], start: int, blocks: int, compute_s: float) -> float:
        """As `CachedPrefix.read_within_s`, of `blocks` blocks of a chain from block `start` on."""
        ...

    def start(self, names: Sequence[bytes], fetch: Fetch, unused: Event) -> None:
        """As `RemotePrefill.start`, for a chain."""
        ...

    def cancel(self, request_id: str) -> None: ...


class Tier:
    """One tier behind the pool of one engine. Used on the engine's thread, but for `flush` and `close`."""

    def __init__(
        self,
        store: Store,
        cache: KVCache,
        clock: Callable[[], float] = time.monotonic,
        above: Tier | None = None,
    ) -> None:
        """`above` is the tier from which this one copies. None: the pool."""
        self.name = store.name
        self.totals = TierTotals()
        self._store = store
        self._cache = cache
        self._clock = clock
        self._bytes = PoolBytes(cache)
        self._restores = Restores(store.name, self._bytes, clock)
        self._copier = TierThread(f"copy-{store.name}")
        self._speed = PeerSpeed(cache.block_bytes, FIRST_WAIT_S, store.first_bytes_per_s)
        self._index = TierIndex((), store.medium, None)  # until it is attached
        self._above = above
        self._below: Tier | None = None
        self._read: Read = self._bytes.read
        if above is not None:
            above._below = self
            self._read = above.read_slot
        self._dirty: OrderedDict[bytes, Unused] = OrderedDict()
        """Blocks to be copied, in the order of their last use."""
        self._copying: set[bytes] = set()
        """Blocks that are being copied, and that the pool or the tier above still has."""
        self._work: Future[Any] | None = None
        """What the copying thread does."""
        self._then: Callable[[Future[Any]], None]
        """What follows it."""
        self._clearing: Future[None] | None = None
        """The last clear of the store, until it has ended."""
        self._announcing: Iterator[None] = iter(())
        self._prepared = False
        self._queued = 0
        """Blocks of the restores that have not reported."""
        self._paused_until = 0.0
        """When writes are tried again. 0: the last one did not fail."""
        self._failed = False
        """Whether the last restore failed or was late."""

    def attach(
        self,
        pool: BlockPool,
        post: Callable[[Callable[[], None]], bool],
        fetched: Callable[[FetchResult], None],
        events: KvEvents | None,
    ) -> None:
        """Connect the engine, before its thread starts. `post` posts a command to it."""
        self._source: Above = pool if self._above is None else self._above
        self._post = post
        self._fetched = fetched
        below, store = self._below, self._store
        dropped = None if below is None else below.evicted
        self._index = TierIndex(store.free, store.medium, events, store.found, dropped)
        for _ in self._index.announce():
            pass
        self._each = max(1, COPY_BYTES // self._cache.block_bytes)

    def snapshot(self) -> TierSnapshot:
        """Any thread."""
        index, now = self._index, self._clock()
        paused = not index.capacity or bool(self._paused_until) or self._speed.at(now) is None
        return TierSnapshot(
            self.name, len(index), index.capacity, self._cache.block_bytes, paused, replace(self.totals)
        )

    def flush(self, until: float) -> None:
        """
        Copy what would be lost, while there is room, until this time. After the engine's thread has ended.

        What was cleared is not found again by the next process.
        """
        if (clearing := self._clearing) is not None:
            wait((clearing,), max(0.0, until - self._clock()))
            if clearing.done():
                self._cleared(clearing)
        while True:
            if self._work is not None:
                wait((self._work,), max(0.0, until - self._clock()))
                if not self._work.done():
                    return
                self._ended()
            if not self._index.free or self._clock() >= until or not self._copy():
                return

    def close(self) -> None:
        """After the engine's thread has ended. What is stuck is left behind."""
        restored = self._restores.close(END_S)
        if self._copier.close(END_S) and restored:
            self._store.close()

    # --- What happens above ---

    @property
    def capacity(self) -> int:
        return self._index.capacity

    available = capacity

    def pool_unused(self, name: bytes, block: int, parent: bytes, number: int) -> None:
        if self._above is None:
            self.unused(name, Unused(block, parent))

    def pool_evicted(self, name: bytes) -> None:
        if self._above is None:
            self.evicted(name)

    def unused(self, name: bytes, unused: Unused, again: bool = False) -> None:
        """
        A block can be copied. Of a chain, the last one comes first.

        `again`: not for the first time since it came to the tier above.
        """
        place = self._index.place(name)
        if place is not None:
            if self._above is not None:
                self._index.used(name)
            if self._below is not None:
                self._below.unused(name, Unused(place.slot, place.parent, place.sum), again=True)
        elif name not in self._copying and (self._above is None or again or self._index.free):
            self._dirty[name] = unused
            self._dirty.move_to_end(name)

    def evicted(self, name: bytes) -> None:
        """The block is used for something else there from now on."""
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
        self._clearing = self._copier.submit(self._store.clear)
        self._clearing.add_done_callback(lambda done: self._post(lambda: self._cleared(done)))

    def _cleared(self, done: Future[None]) -> None:
        if done is self._clearing:
            self._clearing = None
        if (error := done.exception()) is not None:
            log.error("Cannot clear the tier %s: %s", self.name, error)
            self.totals.errors += 1

    def announce(self) -> None:
        """Begin to publish all blocks again."""
        self._announcing = self._index.announce()

    def announces(self) -> bool:
        """Publish some of them. False: all are."""
        return next(self._announcing, self) is None

    # --- The cleaner ---

    def clean(self, idle: bool) -> None:
        """Copy some blocks, if it is time to. `idle`: the engine has nothing else to do."""
        if self._work is not None:
            return
        source = self._source
        chosen = self._above is not None  # what comes to a full one is worth more than what it drops
        room = idle and (chosen or bool(self._index.free))
        if self._dirty and policy.cleans(source.available - len(self._dirty), source.capacity, room):
            self._copy()
        elif idle and not self._prepared:
            self._begin(self._store.prepare, self._after_preparing)

    def _copy(self) -> bool:
        """Begin to copy blocks. Returns whether there are any."""
        if self._clock() < self._paused_until:
            return False
        copies: list[Copy] = []
        while self._dirty and len(copies) < self._each:
            slot = self._index.reserve()
            if slot is None:
                break
            name, unused = self._dirty.popitem(last=False)
            copies.append(Copy(name, unused.parent, unused.block, slot, unused.sum))
        self._copying.update(copy.name for copy in copies)
        written, store, read = self._cache.streams.record(), self._store, self._read

        def write() -> tuple[list[int | None], float]:
            written.wait()
            began = self._clock()
            return store.write(copies, read), self._clock() - began

        if copies:
            self._begin(write, lambda done: self._copied(copies, done))
        return bool(copies)

    def _copied(self, copies: Sequence[Copy], done: Future[tuple[list[int | None], float]]) -> None:
        sums: list[int | None] = [None] * len(copies)
        error = done.exception()
        if error is not None:
            if not self._paused_until:
                log.error("Cannot write %d KV blocks to the tier %s: %s", len(copies), self.name, error)
            self.totals.errors += 1
            self._paused_until = self._clock() + policy.PAUSE_S
        else:
            sums, seconds = done.result()
            self.totals.write_s += seconds
            if self._paused_until:
                log.info("The tier %s can be written again.", self.name)
            self._paused_until = 0.0
        for copy, value in zip(copies, sums, strict=True):
            if copy.name in self._copying and value is not None:
                self._index.add(copy.name, Place(copy.slot, value, copy.parent))
                self.totals.writes += 1
                if self._below is not None:
                    self._below.unused(copy.name, Unused(copy.slot, copy.parent, value))
            else:  # evicted or cleared meanwhile: the bytes may be those of another block
                self._index.give_back(copy.slot)
            self._copying.discard(copy.name)

    def _after_preparing(self, done: Future[bool]) -> None:
        self._prepared = done.exception() is not None or not done.result()

    def _begin(self, work: Callable[[], Result], then: Callable[[Future[Result]], None]) -> None:
        """Run `work` on the copying thread, and `then` on the engine's."""

        def ended() -> None:
            self._ended()
            self.clean(idle=False)  # beside the next pass, whose end may be too late

        self._work, self._then = self._copier.submit(work), then
        self._work.add_done_callback(lambda done: self._post(ended))

    def _ended(self) -> None:
        done, self._work = self._work, None
        assert done is not None
        self._then(done)

    # --- For the tiers below ---

    @property
    def settled(self) -> bool:
        """Whether there is nothing to be copied to it."""
        return self._work is None and not self._dirty

    def chain(self, last: bytes, count: int) -> tuple[list[bytes], bytes] | None:
        """Return the names of `count` blocks up to the block `last`, and the parent of the first one."""
        names = [last]
        while (place := self._index.place(names[-1])) is not None:
            if len(names) == count:
                return names[::-1], place.parent
            names.append(place.parent)
        return None

    def hold(self, names: Sequence[bytes]) -> list[Place]:
        """Return where these blocks are, which it has. They stay there until `release`."""
        return self._index.hold(names)

    def release(self, places: Sequence[Place]) -> None:
        self._index.release(places)

    def read_slot(self, slot: int, out: Bytes) -> int:
        """Copy the bytes of a slot. Returns their sum. Any thread."""
        np.copyto(out, self._store.read(slot))
        return sum_of(out)

    # --- Restoring ---

    def prefix(self, names: Sequence[bytes], start: int) -> TierPrefix | None:
        """Return the blocks of a chain from block `start` on that can be restored. None: there are none."""
        if start >= len(names) or names[start] not in self._index:
            return None
        count = self._index.matched(names[number] for number in range(start, len(names)))
        return TierPrefix(self, names, start, start + count)

    def within_s(self, names: Sequence[bytes], start: int, blocks: int, compute_s: float) -> float:
        speed = self._speed.at(self._clock())
        if speed is None:
            return 0.0
        behind = replace(speed, wait_s=speed.seconds(self._queued))
        return policy.read_within_s(blocks, compute_s, behind)

    def start(self, names: Sequence[bytes], fetch: Fetch, unused: Event) -> None:
        first = fetch.start_block
        names = names[first : first + len(fetch.blocks)]
        places = self._index.hold(names)
        self._queued += len(places)

        def report(restored: Restored) -> None:
            self._post(lambda: self._restored(names, places, restored))
            self._fetched(restored.result)

        def blocks() -> Generator[tuple[Bytes, int]]:
            self._store.expect([place.slot for place in places])
            for place in places:
                yield self._store.read(place.slot), place.sum

        self._restores.start(fetch, blocks, unused, report)

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
        elif reason == Fallback.TRANSFER_FAILED and arrived < len(places):
            self._index.drop(names[arrived])  # it may be one that cannot be read: others can
        if arrived and not reason:
            self._speed.add(arrived, restored.wait_s, restored.read_s, now)
            if self._failed:
                log.info("The tier %s is read again.", self.name)
            self._failed = False
        elif reason in (Fallback.DEADLINE, Fallback.TRANSFER_FAILED) and not restored.queued:
            self._speed.failed(now, restored.wait_s + restored.read_s)
            if not self._failed:
                log.warning("The tier %s is left alone for a while: %s", self.name, reason)
            self._failed = True


@dataclass(frozen=True, slots=True)
class TierPrefix:
    """`CachedPrefix` of one prompt in one tier."""

    tier: EngineTier
    names: Sequence[bytes]
    """Chain hashes of the prompt."""
    first: int
    """The first block that is missing."""
    blocks: int

    @property
    def name(self) -> str:
        return self.tier.name

    def read_within_s(self, blocks: int, compute_s: float) -> float:
        return self.tier.within_s(self.names, self.first, blocks, compute_s)

    def start(self, fetch: Fetch, unused: Event) -> None:
        self.tier.start(self.names, fetch, unused)

    def cancel(self, request_id: str) -> None:
        self.tier.cancel(request_id)


class Tiers:
    """All tiers of one worker, as the pool sees them: `PoolTiers`."""

    def __init__(self, tiers: Iterable[EngineTier]) -> None:
        """The first one copies from the pool, the others from tiers before them."""
        self.all = tuple(tiers)

    def unused(self, name: bytes, block: int, parent: bytes, number: int) -> None:
        for tier in self.all:
            tier.pool_unused(name, block, parent, number)

    def evicted(self, name: bytes) -> None:
        for tier in self.all:
            tier.pool_evicted(name)

    def has(self, name: bytes) -> bool:
        return any(tier.has(name) for tier in self.all)

    def clear(self) -> None:
        for tier in reversed(self.all):  # else what is dropped above would count as lost
            tier.clear()

    def announce(self) -> None:
        for tier in self.all:
            tier.announce()

    def announces(self) -> bool:
        return any(tier.announces() for tier in self.all)
