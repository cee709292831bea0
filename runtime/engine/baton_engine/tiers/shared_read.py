"""
The read of a prompt's blocks from a shared store: headers and pieces of objects, several requests at once.

An object whose header is not known is asked for. The first such answer may take as long as was predicted.
What is missing, late or damaged ends the read, and the blocks behind it are computed.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from baton_engine.tiers.objects import BlockObjects, Damaged, Found
from baton_engine.tiers.slab import Bytes
from baton_engine.tiers.store import TierThread

READERS = 4
"""Requests for blocks and headers at once."""

PIECE_BYTES = 8 * 2**20
"""Bytes of blocks that one request reads, but one block at least."""


@dataclass(slots=True)
class SharedRead:
    """A restore. Its generator belongs to the restoring thread, until the restore has ended."""

    objects: BlockObjects
    readers: TierThread
    probe: Callable[[bytes], Future[Found | None]]
    """Asks whether there is an object of a key."""
    keys: Sequence[bytes]
    """Of the objects that have the blocks, in their order."""
    known: dict[bytes, Found]
    first: int
    """The first block to be read, in the first object."""
    count: int
    within_s: float
    probe_s: float
    """Seconds that the answer whether the first object exists may take."""
    probed_s: float = 0.0
    """Seconds for which it was waited for that answer."""
    at: bytes = b""
    """Key of the object of which blocks were read last."""
    gone: list[bytes] = field(default_factory=list)
    """Keys of objects that were not what was known."""

    def blocks(self) -> Generator[tuple[Bytes, int]]:
        """Ends before `count` blocks if an object is missing."""
        each = max(1, PIECE_BYTES // self.objects.block_bytes)
        flying: deque[tuple[Future[Bytes], Found, int, int]] = deque()
        pieces = self._pieces(each)
        try:
            while True:
                for found, first, count in itertools.islice(pieces, READERS - len(flying)):
                    read = self.readers.submit(partial(self.objects.read, found, first, count))
                    flying.append((read, found, first, count))
                if not flying:
                    return
                future, found, first, count = flying.popleft()
                self.at = found.group.key
                try:
                    data = future.result(self.within_s).reshape(count, -1)
                except FileNotFoundError:
                    self.gone.append(found.group.key)
                    return
                yield from zip(data, found.group.sums[first : first + count], strict=True)
        finally:
            for future, *_ in flying:
                future.cancel()

    def _pieces(self, each: int) -> Iterator[tuple[Found, int, int]]:
        """Yield what is read by one request: the object, the first block in it, and their number."""
        first, left = self.first, self.count
        asked: deque[Future[Found | None]] = deque()
        upcoming = iter(self.keys)
        for number in range(len(self.keys)):
            # Of the further objects, some headers are read ahead once the first one is there.
            for ahead in itertools.islice(upcoming, (1 if not number else READERS) - len(asked)):
                asked.append(self._found(ahead))
            found = self._answer(asked.popleft(), first=not number)
            if found is None:
                for other in asked:
                    other.cancel()
                return
            end = min(self.objects.blocks, first + left)
            for start in range(first, end, each):
                yield found, start, min(each, end - start)
            first, left = 0, left - (end - first)

    def _found(self, key: bytes) -> Future[Found | None]:
        known = self.known.get(key)
        if known is None:
            return self.probe(key)
        done: Future[Found | None] = Future()
        done.set_result(known)
        return done

    def _answer(self, asked: Future[Found | None], first: bool) -> Found | None:
        began = time.monotonic()
        try:
            return asked.result(min(self.within_s, self.probe_s) if first else self.within_s)
        except Damaged:  # `SharedTier` says so
            return None
        finally:
            if first:
                self.probed_s = time.monotonic() - began
