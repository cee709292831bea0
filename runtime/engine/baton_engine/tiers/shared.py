"""
A tier that the workers of a model share: objects of 64 blocks each, behind the tier in memory.

A worker writes an object when the memory has all of its blocks, and nobody wrote it before. It finds the
objects of others by their keys, which follow from a prompt. It waits for the answer whether there is one
only if that is predicted to take a small part of the time of computing; otherwise it asks beside it, for the
next turn. An object that turns out to be gone is computed.

All decisions belong to the engine's thread. Requests to the storage are made by other threads, which report
by commands to it. The size of the store is bounded by its writers: see `SharedTier`.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from baton_api.errors import SetupError
from baton_api.prompt_report import Fallback
from baton_api.setting_types import show_size
from baton_engine.kv.block_pool import BlockPool
from baton_engine.kv.cache import KVCache
from baton_engine.kv.events import KvEvents
from baton_engine.requests import Fetch, FetchResult
from baton_engine.streams import Event
from baton_engine.tiers import policy
from baton_engine.tiers.index import Place
from baton_engine.tiers.known_objects import KnownObjects
from baton_engine.tiers.objects import BlockObjects, Damaged, Found, Group, header_bytes, outdated
from baton_engine.tiers.policy import PeerSpeed
from baton_engine.tiers.restore import Restored, Restores
from baton_engine.tiers.shared_read import READERS, SharedRead
from baton_engine.tiers.slab import Bytes
from baton_engine.tiers.store import PoolBytes, TierThread
from baton_engine.tiers.tier import END_S, Tier, TierPrefix, TierSnapshot, TierTotals

log = logging.getLogger(__name__)

Result = TypeVar("Result")

ENDS = 1024
"""Objects that wait to be written. The oldest are dropped first."""

TRIED = 4
"""Objects of those that are looked for in the memory beside one forward pass."""

PROBES = 64
"""Questions for objects that wait for their answers at once; others are not asked."""

FIRST_PROBE_S = 0.02
"""Assumed seconds until the storage says whether it has an object, before the first answer."""

LEAST_PROBE_S = 0.05
"""Seconds after which an answer is given up at the earliest."""

FIRST_BYTES_PER_S = 500e6
"""Assumed speed of the first read, and after a minute without one: high, so that it is tried."""

SWEEP_S = 600.0
"""Seconds between two lists of the store, of which objects that are too old or too many are deleted."""

UNLISTED = 1 / 16
"""Fraction of the size of the store that a worker writes until it lists the store again."""

LISTED_LATE_S = 60.0
"""Seconds after which a list has an object that was written."""


@dataclass(slots=True)
class _Listed:
    """What a list of the store has shown."""

    size: int
    """Bytes of what was left in it."""
    keys: set[bytes]
    began_at: float


class SharedTier:
    """
    The shared store of one engine: an `EngineTier`. Used on the engine's thread, but for `flush` and `close`.

    **Its size.** Nobody coordinates the workers. Each of them lists the store when it starts, every 10
    minutes, when it has written 1/16 of the size since its last list, and when there is no room for an
    object. Then it deletes objects that are too old, and if there is no room, those first written, until
    there is 0.9 of the size. A worker writes only if what it listed, and wrote since, is less than the size.
    So with N workers that write, the store never has more than its size and (N - 1) times 1/16 of it (or one
    object, if that is more). Workers that delete at once delete the same objects.
    """

    name = "shared"

    def __init__(
        self,
        objects: BlockObjects,
        cache: KVCache,
        memory: Tier,
        size: int,
        expiry_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        `memory` is the tier from which it copies. `expiry_s`: age from which objects are deleted; 0: never.

        Raises SetupError if not one object fits into `size`.
        """
        if size < objects.bytes:
            raise SetupError(
                f"--kv-shared-store-size {show_size(size)} is less than one object of {objects.blocks} KV "
                f"blocks, {show_size(objects.bytes)}."
            )
        self.totals = TierTotals()
        self.objects = objects
        self.readers = TierThread("read-shared", READERS)
        self._writer = TierThread("copy-shared")
        self._restores = Restores(self.name, PoolBytes(cache), clock)
        self._memory = memory
        self._size = size
        self._expiry_s = expiry_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._speed = PeerSpeed(cache.block_bytes, 0.0, FIRST_BYTES_PER_S)
        self._probe_s = FIRST_PROBE_S
        self._known = KnownObjects(clock)
        self._asked: set[bytes] = set()
        """Keys of objects that are asked for beside requests."""
        self._ends: OrderedDict[bytes, int] = OrderedDict()
        """Objects to be written, by key: the position of their first block in its chain. The newest last."""
        self._work: Future[Any] | None = None
        """What the writing thread does."""
        self._then: Callable[[Future[Any]], None]
        """What follows it."""
        self._clears = 0
        """Changes with each clear."""
        self._to_clear = False
        """Whether the store has objects that were cleared. Nothing is read or written meanwhile."""
        self._sweep_at = 0.0
        """When the store is listed. It is not written before the first time."""
        self._listed: int | None = None
        """Bytes in the last list, and what this worker has written since. None: not known."""
        self._written = 0
        """Bytes that this worker has written since the last list."""
        self._paused_until = 0.0
        """When writes are tried again. 0: the last one did not fail."""
        self._failed = False
        """Whether the last read failed or was late."""
        self._queued = 0
        """Blocks of the restores that have not reported."""

    def attach(
        self,
        pool: BlockPool,
        post: Callable[[Callable[[], None]], bool],
        fetched: Callable[[FetchResult], None],
        events: KvEvents | None,
    ) -> None:
        """Connect the engine, before its thread starts. `post` posts a command to it."""
        self._post = post
        self._fetched = fetched
        self._known.events = events
        # Nobody has it: the answer says how long answers take.
        self._ask(random.randbytes(16))

    def snapshot(self) -> TierSnapshot:
        """Any thread. Counts the blocks of all workers, and of all models in the store."""
        listed, each = self._listed, self.objects.block_bytes
        paused = listed is None or bool(self._paused_until) or self._speed.at(self._clock()) is None
        return TierSnapshot(
            self.name, (listed or 0) // each, self._size // each, each, paused, replace(self.totals)
        )

    def flush(self, until: float) -> None:
        """Write what the memory has, until this time. After the engine's thread has ended."""
        while True:
            if self._work is not None:
                wait((self._work,), max(0.0, until - self._clock()))
                if not self._work.done():
                    return
                self._ended()
            if self._clock() >= until or not self._continue():
                return

    def close(self) -> None:
        """After the engine's thread has ended. What is stuck is left behind."""
        self._restores.close(END_S)
        self.readers.close(END_S)
        self._writer.close(END_S)

    # --- What happens above ---

    def pool_unused(self, name: bytes, block: int, parent: bytes, number: int) -> None:
        each = self.objects.blocks
        if (number + 1) % each or name in self._known:
            return
        self._ends[name] = number + 1 - each
        self._ends.move_to_end(name)
        if len(self._ends) > ENDS:
            self._ends.popitem(last=False)
            self.totals.dropped += each

    def pool_evicted(self, name: bytes) -> None:
        return  # the memory has it, or not

    def has(self, name: bytes) -> bool:
        return False  # the memory is asked

    def clear(self) -> None:
        """Delete the objects of this model, those of other workers too."""
        self._clears += 1
        self._to_clear = True
        self._ends.clear()
        self._known.clear()

    def announce(self) -> None:
        """Begin to publish all blocks again."""
        self._known.announce()

    def announces(self) -> bool:
        """Publish some of them. False: all are."""
        return self._known.announces()

    # --- Writing ---

    def clean(self, idle: bool) -> None:
        """Write an object, or look after the store, if it is time to. Also beside requests."""
        if self._work is None:
            self._continue()

    def _continue(self) -> bool:
        """Begin the next work. Returns whether there is any."""
        now = self._clock()
        if now < self._paused_until:
            return False
        if self._to_clear:
            clears = self._clears
            self._begin(self.objects.clear, lambda done: self._cleared(clears, done))
        elif now >= self._sweep_at:
            self._begin(lambda: self._list(now), self._swept)
        else:
            return self._write()
        return True

    def _write(self) -> bool:
        """Begin to write an object that the memory has. Returns whether there is one."""
        objects = self.objects
        for key in list(itertools.islice(reversed(self._ends), TRIED)):
            if key in self._known:
                del self._ends[key]
                continue
            chain = self._memory.chain(key, objects.blocks)
            if chain is None:
                if self._memory.settled:  # else the rest may come
                    del self._ends[key]
                    self.totals.dropped += objects.blocks
                else:
                    self._ends.move_to_end(key, last=False)
                continue
            if not self._room():
                self._sweep_at = 0.0
                return self._continue()
            self._begin_copy(self._ends.pop(key), *chain)
            return True
        return False

    def _begin_copy(self, number: int, names: Sequence[bytes], parent: bytes) -> None:
        places, clears = self._memory.hold(names), self._clears
        group = Group(number, parent, tuple(names), tuple(place.sum for place in places))
        self._begin(lambda: self._copy(group, places), lambda done: self._copied(places, clears, done))

    def _room(self) -> bool:
        """Whether an object can be written before the store is listed again."""
        more = self.objects.bytes
        return (
            self._listed is not None
            and self._listed + more <= self._size
            and (not self._written or self._written + more <= self._size * UNLISTED)
        )

    def _copy(self, group: Group, places: Sequence[Place]) -> tuple[Found | None, float]:
        """On the writing thread. Returns the object, and the seconds of writing it, 0 if it was there."""
        try:
            found = self.objects.find(group.key)
        except Damaged:
            self.objects.remove(group.key)
            found = None
        if found is not None:
            return found, 0.0
        began = self._clock()
        # New memory each time: a request that was given up may still be sending the last one.
        content: Bytes = np.empty(self.objects.bytes, dtype=np.uint8)
        rows = content[header_bytes(self.objects.blocks) :].reshape(len(places), -1)
        for place, row in zip(places, rows, strict=True):
            if self._memory.read_slot(place.slot, row) != place.sum:
                return None, 0.0  # the memory will find that too
        return self.objects.put(group, content), self._clock() - began

    def _copied(self, places: Sequence[Place], clears: int, done: Future[tuple[Found | None, float]]) -> None:
        self._memory.release(places)
        if not self._succeeded(done, "write to"):
            return
        found, seconds = done.result()
        if found is None:
            return
        if seconds:
            assert self._listed is not None
            self._listed += self.objects.bytes
            self._written += self.objects.bytes
            self.totals.writes += len(places)
            self.totals.write_s += seconds
        if clears == self._clears:
            self._learn(found)

    def _list(self, now: float) -> _Listed:
        """On the writing thread: list the store, and delete what it should not have."""
        wall = self._wall_clock()
        entries = self.objects.list()
        room = self._size - self.objects.bytes
        gone = outdated(entries, room, self._expiry_s, wall)
        self.objects.delete(gone)
        self.objects.tidy(wall)
        left = set(entries).difference(gone)
        return _Listed(sum(entry.size for entry in left), self.objects.keys(left), now)

    def _swept(self, done: Future[_Listed]) -> None:
        now = self._clock()
        if not self._succeeded(done, "list"):
            self._sweep_at = now
            return
        listed = done.result()
        self._sweep_at = now + SWEEP_S * random.uniform(0.8, 1.2)
        self._listed, self._written = listed.size, 0
        self._known.keep_only(listed.keys, listed.began_at - LISTED_LATE_S)

    def _cleared(self, clears: int, done: Future[None]) -> None:
        if self._succeeded(done, "clear") and clears == self._clears:
            self._to_clear = False
            self._sweep_at = 0.0

    def _succeeded(self, done: Future[Any], what: str) -> bool:
        error = done.exception()
        if error is None:
            if self._paused_until:
                log.info("The shared KV store can be written again.")
            self._paused_until = 0.0
            return True
        if not self._paused_until:
            log.error("Cannot %s the shared KV store %s: %s", what, self.objects.url, error)
        self.totals.errors += 1
        self._paused_until = self._clock() + policy.PAUSE_S
        return False

    def _begin(self, work: Callable[[], Result], then: Callable[[Future[Result]], None]) -> None:
        """Run `work` on the writing thread, and `then` on the engine's."""

        def ended() -> None:
            self._ended()
            self.clean(idle=False)

        self._work, self._then = self._writer.submit(work), then
        self._work.add_done_callback(lambda done: self._post(ended))

    def _ended(self) -> None:
        done, self._work = self._work, None
        assert done is not None
        self._then(done)

    # --- What is known of the store ---

    def _learn(self, found: Found) -> None:
        self._ends.pop(found.group.key, None)
        self._known.add(found)

    def _ask(self, key: bytes) -> None:
        """Ask for an object beside requests."""
        if key not in self._asked and len(self._asked) < PROBES:
            self._asked.add(key)
            self.probe(key)

    def probe(self, key: bytes) -> Future[Found | None]:
        """Ask whether there is an object. Any thread."""
        took = 0.0

        def find() -> Found | None:
            nonlocal took
            began = time.monotonic()
            try:
                return self.objects.find(key)
            finally:
                took = time.monotonic() - began

        asked = self.readers.submit(find)
        clears = self._clears
        asked.add_done_callback(lambda done: self._post(lambda: self._probed(key, clears, done, took)))
        return asked

    def _probed(self, key: bytes, clears: int, done: Future[Found | None], took: float) -> None:
        self._asked.discard(key)
        if done.cancelled():
            return
        error = done.exception()
        if isinstance(error, Damaged):
            self._damaged(key, str(error))
        elif error is not None:
            self._read_failed(str(error), took)
        else:
            self._probe_s += policy.WEIGHT * (took - self._probe_s)
            found = done.result()
            if found is None:
                self._known.miss(key)
            elif clears == self._clears and not self._to_clear:
                self._learn(found)

    def _damaged(self, key: bytes, why: str) -> None:
        """An object is not what its key says. It is deleted, so that somebody writes it again."""
        log.error("The object %s of the shared KV store is corrupt, and is computed: %s", key.hex(), why)
        self.totals.corrupt += 1
        self._known.miss(key)
        self._writer.submit(lambda: self.objects.remove(key))

    def _read_failed(self, why: str, lost_s: float) -> None:
        self._speed.failed(self._clock(), lost_s)
        if not self._failed:
            log.warning("The shared KV store %s is left alone for a while: %s", self.objects.url, why)
        self._failed = True

    # --- Restoring ---

    def prefix(self, names: Sequence[bytes], start: int) -> TierPrefix | None:
        """Return the blocks from `start` on that may be in the store. None: it has none of them."""
        each, end = self.objects.blocks, start // self.objects.blocks
        if self._to_clear:
            return None
        while (end + 1) * each <= len(names) and not self._known.is_missing(names[(end + 1) * each - 1]):
            end += 1
        return TierPrefix(self, names, start, end * each) if end * each > start else None

    def within_s(self, names: Sequence[bytes], start: int, blocks: int, compute_s: float) -> float:
        speed = self._speed.at(self._clock())
        if speed is None:
            return 0.0
        key = self._keys(names, start, 1)[0]
        known = key in self._known
        wait_s = speed.seconds(self._queued) + (0.0 if known else self._probe_s)
        within_s = policy.read_within_s(blocks, compute_s, replace(speed, wait_s=wait_s))
        if within_s and not known and self._probe_s > policy.LOSS * compute_s:
            self._ask(key)
            return 0.0
        return within_s

    def start(self, names: Sequence[bytes], fetch: Fetch, unused: Event) -> None:
        first, count = fetch.start_block, len(fetch.blocks)
        keys = self._keys(names, first, count)
        read = SharedRead(
            self.objects,
            self.readers,
            self.probe,
            keys,
            {key: found for key in keys if (found := self._known.use(key)) is not None},
            first % self.objects.blocks,
            count,
            fetch.within_s,
            max(LEAST_PROBE_S, policy.LATE * self._probe_s),
        )
        self._queued += count

        def report(restored: Restored) -> None:
            self._post(lambda: self._restored(read, restored))
            self._fetched(restored.result)

        self._restores.start(fetch, read.blocks, unused, report, short=Fallback.MISSING)

    def cancel(self, request_id: str) -> None:
        self._restores.cancel(request_id)

    def _keys(self, names: Sequence[bytes], start: int, count: int) -> list[bytes]:
        """Return the keys of the objects with these blocks."""
        each = self.objects.blocks
        return [names[end - 1] for end in range((start // each + 1) * each, start + count + each, each)]

    def _restored(self, read: SharedRead, restored: Restored) -> None:
        self._queued -= read.count
        arrived, reason, now = restored.result.arrived, restored.result.reason, self._clock()
        self.totals.hits += arrived
        self.totals.read_s += restored.read_s
        for key in read.gone:
            self._known.remove(key)
        if restored.corrupt is not None:
            self._damaged(read.at, "the sum of a block is wrong")
        if arrived and reason in ("", Fallback.MISSING):
            read_s = max(0.0, restored.read_s - read.probed_s)
            self._speed.add(arrived, 0.0, read_s, now)
            if self._failed:
                log.info("The shared KV store is read again.")
            self._failed = False
        elif reason in (Fallback.DEADLINE, Fallback.TRANSFER_FAILED) and not restored.queued:
            self._read_failed(reason, restored.wait_s + restored.read_s)
