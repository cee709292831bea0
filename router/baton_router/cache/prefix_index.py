"""
The prefix index: prompt chunks by hash, and for each the set of workers that hold it.

A chunk's name covers all text before it. Equal names therefore mean equal prefixes, and no tree is needed.
A lookup walks down the prompt's chunks and keeps the workers that have all of them so far. A set of workers
is the bits of one integer, so the walk costs one dictionary lookup per chunk for any number of workers.

Workers drop the least recently used blocks, and the end of a prompt before its beginning. The index does the
same with the chunks that it assumes for each worker, within the capacity that the worker reported. The
remembered chunks of a worker are therefore always closed under prefixes. Indexes of tiers (`block_map`) are
not: `match_any` looks at each chunk.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

CHUNK_COST = 160
"""Bytes of a chunk's name, its set of workers, and their place in the dictionary; measured with a million."""

HOLDER_COST = 116
"""Bytes of one worker's holding a chunk."""


@dataclass(slots=True)
class _WorkerChunks:
    """The chunks that one worker is assumed to hold, in the order in which it would drop them."""

    capacity: int
    chunks: OrderedDict[int, None] = field(default_factory=OrderedDict)


class PrefixIndex:
    """Belongs to one thread. Workers are small integers, which may be reused after `forget`."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        """Chunk -> the workers that hold it, as bits; never 0."""
        self._held: dict[int, _WorkerChunks] = {}

    def __len__(self) -> int:
        """Number of different chunks that at least one worker holds."""
        return len(self._holders)

    @property
    def bytes(self) -> int:
        """Estimated memory."""
        held = sum(len(one.chunks) for one in self._held.values())
        return CHUNK_COST * len(self._holders) + HOLDER_COST * held

    def register(self, worker: int, capacity: int) -> None:
        """Add a worker without chunks, or change its capacity."""
        held = self._held.setdefault(worker, _WorkerChunks(capacity))
        held.capacity = capacity
        self._shrink(worker, held)

    def forget(self, worker: int) -> None:
        """Forget a worker that is gone, or that restarted with an empty cache."""
        self.clear(worker)
        self._held.pop(worker, None)

    def clear(self, worker: int) -> None:
        """The worker has dropped all chunks."""
        held = self._held.get(worker)
        if held is not None:
            for chunk in held.chunks:
                self._unset(chunk, worker)
            held.chunks.clear()

    def holds(self, worker: int) -> int:
        """Number of chunks that the worker is assumed to hold."""
        held = self._held.get(worker)
        return len(held.chunks) if held else 0

    def match(self, chunks: Sequence[int]) -> dict[int, int]:
        """
        Return how many of the leading `chunks` each worker holds, without workers that hold no chunk.

        >>> index = PrefixIndex()
        >>> index.register(0, 10); index.register(1, 10)
        >>> _ = index.insert(0, [11, 12, 13]), index.insert(1, [11])
        >>> index.match([11, 12, 99])
        {1: 1, 0: 2}
        """
        matched: dict[int, int] = {}
        holding = self._holders.get
        holders = -1
        count = 0
        for chunk in chunks:
            left = holding(chunk, 0)
            if left != holders:
                left &= holders
                if left != holders and count:
                    _record_matches(matched, holders & ~left, count)
                holders = left
                if not left:
                    return matched
            count += 1
        if count:
            _record_matches(matched, holders, count)
        return matched

    def holders_of(self, chunk: int) -> int:
        """The workers that hold a chunk, as bits."""
        return self._holders.get(chunk, 0)

    def insert(self, worker: int, chunks: Sequence[int], matched: int = 0) -> list[int]:
        """
        The worker holds these chunks, a prompt from its beginning, and has just used them.

        Returns the chunks that are new to it; it is known to hold the `matched` leading ones.
        """
        held = self._held[worker]
        used, bit, holders = held.chunks, 1 << worker, self._holders
        use = used.move_to_end
        new: list[int] = []
        for chunk in reversed(chunks[matched:]):  # the beginning is used last, and so is dropped last
            if chunk in used:
                use(chunk)
            else:
                used[chunk] = None
                holders[chunk] = holders.get(chunk, 0) | bit
                new.append(chunk)
        deque(map(use, reversed(chunks[:matched])), 0)  # written as a fast loop
        if new:
            self._shrink(worker, held)
        return new

    def remove(self, worker: int, chunks: Iterable[int]) -> None:
        """The worker has dropped these."""
        held = self._held.get(worker)
        if held is None:
            return
        for chunk in chunks:
            if chunk in held.chunks:
                del held.chunks[chunk]
                self._unset(chunk, worker)

    def _shrink(self, worker: int, held: _WorkerChunks) -> None:
        while len(held.chunks) > held.capacity:
            chunk, _ = held.chunks.popitem(last=False)
            self._unset(chunk, worker)

    def _unset(self, chunk: int, worker: int) -> None:
        left = self._holders[chunk] & ~(1 << worker)
        if left:
            self._holders[chunk] = left
        else:
            del self._holders[chunk]


def match_any(chunks: Sequence[int], places: Iterable[Callable[[int], int]], workers: int) -> dict[int, int]:
    """
    Return how many of the leading `chunks` each of the `workers`, as bits, has in any of the `places`.

    A place gives the holders of a chunk, as bits. Workers without the first chunk are left out.
    """
    matched: dict[int, int] = {}
    places = tuple(places)
    count = 0
    for chunk in chunks:
        left = 0
        for holders_of in places:
            left |= holders_of(chunk)
        left &= workers
        if left != workers:
            if count:
                _record_matches(matched, workers & ~left, count)
            workers = left
            if not workers:
                return matched
        count += 1
    if count:
        _record_matches(matched, workers, count)
    return matched


def _record_matches(matched: dict[int, int], workers: int, count: int) -> None:
    """Write `count` for each of the bits in `workers`."""
    while workers:
        lowest = workers & -workers
        matched[lowest.bit_length() - 1] = count
        workers ^= lowest
