"""
The owners of the KV cache's blocks, and the prefix cache.

A block is free, cached (unused, with its content known by hash), owned (one or more requests use it) or
quarantined (a peer may still write it). An owned block may also be pinned while a network card reads or
writes it; releasing it then is a defect. Block 0 is never allocated: padding points there.

The prefix cache is one flat map from chain hash to block; equal hashes mean equal prefixes, so no
tree is needed. A count of cached children per hash replaces it for eviction: the least recently used block
without a cached child is evicted, so no prefix gets a hole.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from baton_api.errors import SetupError

CLEAN_LEAVES = 8
"""Number of the blocks that are evicted next, of which one that a tier has goes first."""


class PoolTiers(Protocol):
    """Tiers behind the pool. Blocks are named by their chain hash."""

    def unused(self, name: bytes, block: int, parent: bytes, number: int) -> None:
        """
        A published block is not used any more. Of a chain, the last one comes first.

        `number` is its position in the chain.
        """
        ...

    def evicted(self, name: bytes) -> None:
        """A block was evicted. Its content may change after the return."""
        ...

    def has(self, name: bytes) -> bool:
        """Whether a tier has the block, so that evicting it loses nothing."""
        ...


class BlockPool:
    """The states of all blocks. Not thread-safe: it belongs to the engine's thread."""

    def __init__(
        self,
        blocks: int,
        on_evicted: Callable[[bytes], None] | None = None,
        tiers: PoolTiers | None = None,
    ) -> None:
        """`on_evicted` is called with the hash of each evicted block."""
        if blocks < 2:
            raise SetupError(
                f"A KV cache of {blocks} blocks is too small, because block 0 is reserved for padding. "
                "Start the worker with a larger --kv-cache-memory."
            )
        self.capacity = blocks - 1
        """Blocks that can be allocated."""
        self._on_evicted = on_evicted
        self._tiers = tiers
        self._free = list(range(blocks - 1, 0, -1))  # the lowest number is handed out first
        self.used_below = 1
        """No block from this number on has ever been allocated."""
        self._users = [0] * blocks
        self._hash: list[bytes | None] = [None] * blocks
        self._parent = [b""] * blocks
        self._number = [0] * blocks
        self._used_at = [0] * blocks
        self._clock = 0
        self._by_hash: dict[bytes, int] = {}
        self._cached = 0
        self._children: dict[bytes, int] = {}
        """Number of cached children by the hash of their parent, which may be missing."""
        self._leaves: list[tuple[int, int]] = []
        """Heap of (last use, block). Entries may be stale: one counts if `_is_leaf` says so."""
        self._pins: dict[int, int] = {}
        self._quarantined: set[int] = set()
        self.evictions = 0
        """Number of evicted blocks."""

    @property
    def free(self) -> int:
        """Blocks without known content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        return self._cached

    @property
    def available(self) -> int:
        """Blocks that `allocate` can return."""
        return len(self._free) + self._cached

    @property
    def owned(self) -> int:
        """Blocks in use, the pinned ones included."""
        return self.capacity - self.available - len(self._quarantined)

    @property
    def pinned(self) -> int:
        return len(self._pins)

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of a chain. Call `take` to use them."""
        blocks: list[int] = []
        for name in hashes:
            block = self._by_hash.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def unused(self, blocks: Iterable[int]) -> int:
        """Number of these known blocks that are not in use. Taking them reduces `available` by as many."""
        return sum(1 for block in blocks if not self._users[block])

    def take(self, blocks: Iterable[int]) -> None:
        """Use blocks that `match` returned. Each `take` needs its own `release`."""
        for block in blocks:
            assert self._hash[block] is not None, f"block {block} is not known by a hash"
            if not self._users[block]:
                self._unshelve(block)
            self._users[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks. Evicts cached blocks if there are not enough free ones."""
        assert count <= self.available, f"{count} blocks are requested and {self.available} are available"
        blocks: list[int] = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block = self._evict()
                self.evictions += 1
            assert not self._users[block] and self._hash[block] is None, f"block {block} is not free"
            self._users[block] = 1
            blocks.append(block)
        self.used_below = max(self.used_below, 1 + max(blocks, default=0))
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Stop using the blocks of one chain, first to last; the known ones stay cached."""
        self._clock += 1
        for block in reversed(blocks):  # children first, so that parents do not become leaves
            assert self._users[block] > 0, f"block {block} is released twice"
            self._users[block] -= 1
            assert self._users[block] >= self._pins.get(block, 0), f"block {block} is released while pinned"
            if self._users[block]:
                continue
            if self._hash[block] is None:
                self._free.append(block)
            else:
                self._shelve(block)

    def publish(self, block: int, name: bytes, parent: bytes, number: int) -> bool:
        """
        Publish an owned block under its chain hash. Its KV must be complete. `number` is its position in
        the chain.

        Returns False if another block with the same content is published.
        """
        assert self._users[block] > 0 and self._hash[block] is None, f"block {block} cannot be published"
        if name in self._by_hash:
            return False
        self._by_hash[name] = block
        self._hash[block] = name
        self._parent[block] = parent
        self._number[block] = number
        return True

    def published(self) -> tuple[dict[bytes, int], list[bytes]]:
        """Return copies for other threads: blocks by hash, and the parent hash of each block."""
        return self._by_hash.copy(), self._parent.copy()

    def pin(self, blocks: Iterable[int]) -> None:
        """Mark owned blocks that a network card reads or writes."""
        for block in blocks:
            assert self._users[block] > 0, f"block {block} is pinned without an owner"
            self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            pins = self._pins.pop(block)
            if pins > 1:
                self._pins[block] = pins - 1

    def quarantine(self, blocks: Collection[int]) -> None:
        """Release unpublished blocks that a peer may still write. They are not available until `settle`."""
        for block in blocks:
            assert self._users[block] == 1, f"block {block} has {self._users[block]} users"
            assert self._hash[block] is None, f"block {block} is published, but unsafe"
            assert block not in self._pins, f"block {block} is pinned"
            self._users[block] = 0
            self._quarantined.add(block)

    def settle(self, blocks: Collection[int]) -> None:
        """Free quarantined blocks after all writes have ended."""
        for block in blocks:
            assert block in self._quarantined, f"block {block} is not in quarantine"
            self._quarantined.remove(block)
            self._free.append(block)

    def clear(self) -> None:
        """Free all cached blocks. Blocks in use stay published."""
        while self._cached:
            self._free.append(self._evict())

    def _shelve(self, block: int) -> None:
        name, parent = self._hash[block], self._parent[block]
        assert name is not None
        self._used_at[block] = self._clock
        self._cached += 1
        self._children[parent] = self._children.get(parent, 0) + 1
        if name not in self._children:
            self._add_leaf(block)
        if self._tiers is not None:
            self._tiers.unused(name, block, parent, self._number[block])

    def _unshelve(self, block: int) -> None:
        parent = self._parent[block]
        self._cached -= 1
        self._children[parent] -= 1
        if self._children[parent]:
            return
        del self._children[parent]
        above = self._by_hash.get(parent)
        if above is not None and not self._users[above]:
            self._add_leaf(above)

    def _evict(self) -> int:
        block = self._next_leaf() if self._tiers is None else self._next_clean_leaf(self._tiers)
        name = self._hash[block]
        assert name is not None
        self._unshelve(block)
        del self._by_hash[name]
        self._hash[block] = None
        if self._on_evicted is not None:
            self._on_evicted(name)
        if self._tiers is not None:
            self._tiers.evicted(name)
        return block

    def _next_leaf(self) -> int:
        while True:
            used_at, block = heapq.heappop(self._leaves)
            if self._is_leaf(used_at, block):
                return block

    def _next_clean_leaf(self, tiers: PoolTiers) -> int:
        """The least recently used leaf, or rather one of the next ones that a tier has."""
        passed: list[tuple[int, int]] = []
        chosen = None
        while chosen is None and self._leaves and len(passed) < CLEAN_LEAVES:
            entry = heapq.heappop(self._leaves)
            name = self._hash[entry[1]]
            if name is None or not self._is_leaf(*entry):
                continue
            if tiers.has(name):
                chosen = entry[1]
            else:
                passed.append(entry)
        if chosen is None:
            chosen = passed.pop(0)[1]
        for entry in passed:
            heapq.heappush(self._leaves, entry)
        return chosen

    def _is_leaf(self, used_at: int, block: int) -> bool:
        name = self._hash[block]
        return (
            name is not None
            and not self._users[block]
            and self._used_at[block] == used_at
            and name not in self._children
        )

    def _add_leaf(self, block: int) -> None:
        if len(self._leaves) > 2 * self.capacity + 64:  # limits the number of stale entries
            self._leaves = sorted({entry for entry in self._leaves if self._is_leaf(*entry)})
        heapq.heappush(self._leaves, (self._used_at[block], block))
