"""
KV blocks that workers report, and the prompt chunks in them.

Workers name blocks by tokens, the router names chunks by text, and it never tokenizes. A worker's report of
a prompt connects the two, because it names the prompt's last full block. The parents of that block lead
through the whole prompt. A chunk that ends at a given share of the prompt's bytes ends in the block at that
share of its blocks. From then on the index follows the blocks. A worker that drops a block no longer holds
the chunk; a worker that stores it does, whichever router sent the prompt.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton_api.kv_events import (
    AllBlocksCleared,
    BlockStored,
    Event,
)
from baton_router.cache.prefix_index import PrefixIndex, match_any
from baton_router.cache.prompt_chunks import PromptChunks
from baton_router.cache.tiers import Tier, tier_of

PENDING_LIMIT = 1024
"""Maximum reports that wait for the events of their blocks."""

NAMES_LIMIT = 32
"""Chunks in one block: there are several if messages are short, or if a model has several names."""

Tree = dict[int, int | None]
"""Block -> its parent; None at the beginning of a prompt."""


LEFT_LIMIT = 65_536
"""Maximum evicted blocks whose names and chunks stay known."""

TIER_CHUNKS = 262_144
"""Maximum chunks in a tier of one worker, or in storage that workers share: of prompts of 128 MiB."""

SHARED_BLOCKS = 2**20
"""Maximum blocks in storage that workers share: nobody says what a worker that is gone has stored there."""


class _Holding:
    """The blocks in one place: the pool of a worker, or a tier."""

    __slots__ = ("index", "slot", "tree")

    def __init__(self, index: PrefixIndex, slot: int) -> None:
        self.tree: Tree = {}
        self.index = index
        """Index of the places of this class."""
        self.slot = slot
        """Its slot there."""


class WorkerBlocks:
    """The blocks that one worker process has reported. Once closed, it ignores further reports."""

    def __init__(self, blocks: BlockMap, pool: _Holding, kind: str) -> None:
        """Workers of one `kind` can read one another's shared storage."""
        self.closed = False
        self.pool = pool
        self.tiers: dict[Tier, _Holding] = {}
        self._map = blocks
        self._kind = kind

    @property
    def tree(self) -> Tree:
        """The blocks of the pool."""
        return self.pool.tree

    def apply(self, events: Iterable[Event]) -> None:
        """Apply the changes of one batch of events."""
        if self.closed:
            return
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._map.replace(self.pool, {})
                continue
            tier = tier_of(event)
            holding = self.pool if tier is None else self._tier(tier)
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                for block in event.block_hashes:
                    if tier is Tier.SHARED:
                        holding.tree.pop(block, None)  # the last one stored is last
                    holding.tree[block] = parent
                    parent = block
                self._map.added(holding, event.block_hashes)
                while tier is Tier.SHARED and len(holding.tree) > SHARED_BLOCKS:
                    # Many at once: dictionaries pass over what was deleted at their beginning.
                    self._remove(holding, list(itertools.islice(holding.tree, max(1, SHARED_BLOCKS // 64))))
            else:
                self._remove(holding, [block for block in event.block_hashes if block in holding.tree])

    def replace(self, tree: Tree) -> None:
        """
        Replace the contents of the pool by a snapshot; blocks that it lacks count as dropped.

        Nothing is known of the worker's own tiers then. What others may have stored in shared storage stays.
        """
        if self.closed:
            return
        self._map.replace(self.pool, tree)
        for tier, holding in self.tiers.items():
            if tier is not Tier.SHARED:
                self._map.replace(holding, {})

    def _remove(self, holding: _Holding, blocks: Sequence[int]) -> None:
        for block in blocks:
            del holding.tree[block]
        self._map.dropped(holding, blocks)

    def _tier(self, tier: Tier) -> _Holding:
        holding = self.tiers.get(tier)
        if holding is None:
            holding = self.tiers[tier] = self._map.open_tier(tier, self.pool.slot, self._kind)
        return holding


@dataclass(frozen=True, slots=True)
class _Placement:
    """A prompt whose chunks will be located in blocks."""

    prompt: PromptChunks
    blocks: int
    """Number of full blocks."""
    known_chunks: int
    """Leading chunks whose blocks are known already."""
    slots: Collection[int]
    """Workers that are assumed to hold the whole prompt."""


class BlockMap:
    """Belongs to one thread. Workers are the slots of the index."""

    def __init__(self, index: PrefixIndex) -> None:
        """`index`: of the pools."""
        self._index = index
        self._workers: dict[int, WorkerBlocks] = {}
        self._tiers: dict[Tier, PrefixIndex] = {}
        """Indexes of the tiers in use. Slots of shared storage are its own, one for each kind of worker."""
        self._shared: dict[str, tuple[_Holding, set[int]]] = {}
        """By the kind of the workers: the storage that they share, and the slots of those that use it."""
        self._tiered = 0
        """Workers with a tier, as bits."""
        self._holdings: list[_Holding] = []
        self._chunks: dict[int, tuple[int, ...]] = {}
        """Block that is somewhere -> the chunks that end in it, in the order of their discovery."""
        self._left: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        """The same of blocks that were: a tier can report a block after the pool has dropped it."""
        self._awaited: OrderedDict[int, _Placement] = OrderedDict()
        """By the last block of the prompt."""

    def __len__(self) -> int:
        """Blocks with chunks."""
        return len(self._chunks)

    @property
    def tiers(self) -> Mapping[Tier, PrefixIndex]:
        """The indexes of the tiers in use."""
        return self._tiers

    def open(self, slot: int, kind: str = "") -> WorkerBlocks:
        """
        Begin tracking a process that will report its blocks, without any so far.

        Workers of one `kind` can read one another's shared storage.
        """
        self.close(slot)
        pool = _Holding(self._index, slot)
        self._holdings.append(pool)
        held = self._workers[slot] = WorkerBlocks(self, pool, kind)
        return held

    def close(self, slot: int) -> None:
        """Stop tracking the process of a slot: it is gone, and so are its tiers but shared storage."""
        held = self._workers.pop(slot, None)
        if held is None:
            return
        held.closed = True
        self._tiered &= ~(1 << slot)
        self._end(held.pool)
        for tier, holding in held.tiers.items():
            if tier is not Tier.SHARED:
                holding.index.forget(slot)
                self._end(holding)
        for kind, (holding, users) in list(self._shared.items()):
            users.discard(slot)
            if not users:
                del self._shared[kind]
                holding.index.forget(holding.slot)
                self._end(holding)

    def open_tier(self, tier: Tier, slot: int, kind: str) -> _Holding:
        """The blocks of a worker's tier, without any so far; shared storage as its other users know it."""
        self._tiered |= 1 << slot
        index = self._tiers.setdefault(tier, PrefixIndex())
        if tier is Tier.SHARED and kind in self._shared:
            holding, users = self._shared[kind]
            users.add(slot)
            return holding
        if tier is Tier.SHARED:
            taken = {holding.slot for holding, _ in self._shared.values()}
            holding = _Holding(index, next(one for one in itertools.count() if one not in taken))
            self._shared[kind] = holding, {slot}
        else:
            holding = _Holding(index, slot)
        index.register(holding.slot, TIER_CHUNKS)
        self._holdings.append(holding)
        return holding

    def reach(self, chunks: Sequence[int]) -> dict[int, list[tuple[Tier, int]]]:
        """
        Return how many of the leading `chunks` each worker can have without computing them.

        By slot, for workers with tiers: for each tier in use, how many are in the pool, in that tier or in
        those before it. Counts do not fall from one tier to the next.
        """
        reached: dict[int, list[tuple[Tier, int]]] = {}
        if not self._tiered:
            return reached
        places = [self._index.holders_of]
        for tier in Tier:
            if index := self._tiers.get(tier):
                places.append(self._users_of if tier is Tier.SHARED else index.holders_of)
                for slot, count in match_any(chunks, places, self._tiered).items():
                    reached.setdefault(slot, []).append((tier, count))
        return reached

    def _users_of(self, chunk: int) -> int:
        """The workers that can read a chunk from shared storage, as bits."""
        holders, users = self._tiers[Tier.SHARED].holders_of(chunk), 0
        if holders:
            for holding, slots in self._shared.values():
                if holders >> holding.slot & 1:
                    users |= sum(1 << slot for slot in slots)
        return users

    def place(
        self, prompt: PromptChunks, tail: int, blocks: int, known_chunks: int, slots: Collection[int]
    ) -> None:
        """
        The prompt ends in `blocks` full blocks, the last of them `tail`, with the workers of `slots`.

        The blocks of the leading `known_chunks` chunks are known already.
        """
        if not blocks or known_chunks >= len(prompt.names) or not prompt.bytes:
            return
        reporting = [held for slot in slots if (held := self._workers.get(slot)) is not None]
        placement = _Placement(prompt, blocks, known_chunks, slots)
        for held in reporting:
            for holding in (held.pool, *held.tiers.values()):
                if tail in holding.tree:
                    self._place(holding.tree, tail, placement)
                    return
        if reporting:
            self._awaited[tail] = placement
            if len(self._awaited) > PENDING_LIMIT:
                self._awaited.popitem(last=False)

    # --- Called by WorkerBlocks ---

    def added(self, holding: _Holding, blocks: Sequence[int]) -> None:
        """These blocks are there, parents before children."""
        if self._left:
            for block in blocks:
                if block in self._left:
                    self._chunks[block] = self._left.pop(block)
        chunks = [name for block in blocks for name in self._chunks.get(block, ())]
        if chunks:
            holding.index.insert(holding.slot, chunks)
        if self._awaited:
            for block in blocks:
                if (placement := self._awaited.pop(block, None)) is not None:
                    self._place(holding.tree, block, placement)

    def dropped(self, holding: _Holding, blocks: Collection[int]) -> None:
        """These blocks are not there any more."""
        for block in blocks:
            if block in self._chunks:
                holding.index.remove(holding.slot, self._chunks[block])
        self._release(blocks)

    def replace(self, holding: _Holding, tree: Tree) -> None:
        """Replace the tree of a holding, and update the chunks of changed blocks. Most have none."""
        before, holding.tree = holding.tree, tree
        mapped = [*self._chunks, *self._left]
        self.dropped(holding, [block for block in mapped if block in before and block not in tree])
        added = [block for block in reversed(mapped) if block in tree and block not in before]
        added += [tail for tail in self._awaited if tail in tree]
        self.added(holding, added)

    def _end(self, holding: _Holding) -> None:
        """Remove a holding, and release its blocks."""
        self._holdings.remove(holding)
        self._release([block for block in self._chunks if block in holding.tree])

    def _release(self, blocks: Iterable[int]) -> None:
        """Release blocks of a holding. Chunks of blocks that no holding has are kept for some time."""
        for block in blocks:
            if block in self._chunks and not any(block in holding.tree for holding in self._holdings):
                self._left[block] = self._chunks.pop(block)
        while len(self._left) > LEFT_LIMIT:
            self._left.popitem(last=False)

    def _place(self, tree: Tree, tail: int, placement: _Placement) -> None:
        names, chunks = placement.prompt.names[placement.known_chunks :], self._chunks
        end_blocks = _end_blocks(tree, tail, placement)
        for name, block in zip(reversed(names), end_blocks, strict=False):
            chunk_names = chunks.get(block)
            if chunk_names is None:
                chunks[block] = (name,)
            elif name not in chunk_names:
                chunks[block] = (*chunk_names[-NAMES_LIMIT + 1 :], name)
        if len(end_blocks) == len(names):
            self._share(placement, end_blocks[::-1])

    def _share(self, placement: _Placement, end_blocks: Sequence[int]) -> None:
        """
        The same blocks may be elsewhere: with others, from another router or from before this one began, and
        in tiers, also of the worker itself.
        """
        names, known = placement.prompt.names, placement.known_chunks
        for holding in self._holdings:
            tree, slot = holding.tree, holding.slot
            if holding.index is not self._index:  # what comes before may be in the pool
                chunks = [
                    name for name, block in zip(names[known:], end_blocks, strict=True) if block in tree
                ]
            elif slot in placement.slots:
                continue
            else:
                count = 0
                while count < len(end_blocks) and end_blocks[count] in tree:
                    count += 1
                chunks = list(names[: known + count]) if count else []
            if chunks:
                holding.index.insert(slot, chunks)


def _end_blocks(tree: Tree, tail: int, placement: _Placement) -> list[int]:
    """
    The blocks in which the prompt's chunks end, the last chunk's first, as far as they are held.

    The walk costs a dictionary lookup for each block of the prompt.
    """
    blocks, sizes, size = placement.blocks, placement.prompt.sizes, placement.prompt.bytes
    end_blocks: list[int] = []
    block: int | None = tail
    at = blocks
    for index in range(len(sizes) - 1, placement.known_chunks - 1, -1):
        wanted = -(-sizes[index] * blocks // size) or 1
        for _ in range(at - wanted):
            block = tree.get(block)  # type: ignore[arg-type]  # None, above a beginning, is in no tree
        if block not in tree:
            break
        at = wanted
        end_blocks.append(block)
    return end_blocks
