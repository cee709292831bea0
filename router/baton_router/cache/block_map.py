"""
KV blocks that workers report, and the prompt chunks in them.

Workers name blocks by tokens, the router names chunks by text, and it never tokenizes. A worker's report of
a prompt connects the two, because it names the prompt's last full block. The parents of that block lead
through the whole prompt. A chunk that ends at a given share of the prompt's bytes ends in the block at that
share of its blocks. From then on the index follows the blocks. A worker that drops a block no longer holds
the chunk; a worker that stores it does, whichever router sent the prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from baton_api.kv_events import BlockRemoved, BlockStored, Event
from baton_router.cache.prefix_index import PrefixIndex
from baton_router.cache.prompt_chunks import PromptChunks

PENDING_LIMIT = 1024
"""Maximum reports that wait for the events of their blocks."""

NAMES_LIMIT = 32
"""Chunks in one block: there are several if messages are short, or if a model has several names."""

Tree = dict[int, int | None]
"""Block -> its parent; None at the beginning of a prompt."""


class WorkerBlocks:
    """The blocks that one worker process has reported. Once closed, it ignores further reports."""

    def __init__(self, blocks: BlockMap, slot: int) -> None:
        self.closed = False
        self.tree: Tree = {}
        self._map = blocks
        self._slot = slot

    def apply(self, events: Iterable[Event]) -> None:
        """Apply the changes of one batch of events."""
        if self.closed:
            return
        for event in events:
            if isinstance(event, BlockStored):
                self._stored(event)
            elif isinstance(event, BlockRemoved):
                removed = [block for block in event.block_hashes if block in self.tree]
                for block in removed:
                    del self.tree[block]
                self._map.dropped(self._slot, removed)
            else:
                self.replace({})

    def replace(self, tree: Tree) -> None:
        """Replace the contents by a snapshot; blocks that it lacks count as dropped."""
        if self.closed:
            return
        before, self.tree = self.tree, tree
        self._map.replaced(self, self._slot, before)

    def _stored(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        for block in event.block_hashes:
            self.tree[block] = parent
            parent = block
        self._map.added(self, self._slot, event.block_hashes)


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
        self._index = index
        self._held: dict[int, WorkerBlocks] = {}
        self._chunks: dict[int, tuple[int, ...]] = {}
        """Block held by some worker -> the chunks that end in it, in the order of their discovery."""
        self._awaited: OrderedDict[int, _Placement] = OrderedDict()
        """By the last block of the prompt."""

    def __len__(self) -> int:
        """Blocks with chunks."""
        return len(self._chunks)

    def open(self, slot: int) -> WorkerBlocks:
        """Begin tracking a process that will report its blocks, without any so far."""
        self.close(slot)
        held = self._held[slot] = WorkerBlocks(self, slot)
        return held

    def close(self, slot: int) -> None:
        """Stop tracking the process of a slot: it is gone."""
        held = self._held.pop(slot, None)
        if held is not None:
            held.closed = True
            self._release([block for block in self._chunks if block in held.tree])

    def place(
        self, prompt: PromptChunks, tail: int, blocks: int, known_chunks: int, slots: Collection[int]
    ) -> None:
        """
        The prompt ends in `blocks` full blocks, the last of them `tail`, with the workers of `slots`.

        The blocks of the leading `known_chunks` chunks are known already.
        """
        if not blocks or known_chunks >= len(prompt.names) or not prompt.bytes:
            return
        reporting = [held for slot in slots if (held := self._held.get(slot)) is not None]
        placement = _Placement(prompt, blocks, known_chunks, slots)
        for held in reporting:
            if tail in held.tree:
                self._place(held.tree, tail, placement)
                return
        if reporting:
            self._awaited[tail] = placement
            if len(self._awaited) > PENDING_LIMIT:
                self._awaited.popitem(last=False)

    # --- Called by Tree ---

    def added(self, held: WorkerBlocks, slot: int, blocks: Sequence[int]) -> None:
        """The worker holds these blocks, parents before children."""
        chunks = [name for block in blocks for name in self._chunks.get(block, ())]
        if chunks:
            self._index.insert(slot, chunks)
        if self._awaited:
            for block in blocks:
                if (placement := self._awaited.pop(block, None)) is not None:
                    self._place(held.tree, block, placement)

    def dropped(self, slot: int, blocks: Collection[int]) -> None:
        """The worker does not hold these blocks any more."""
        for block in blocks:
            if block in self._chunks:
                self._index.remove(slot, self._chunks[block])
        self._release(blocks)

    def replaced(self, held: WorkerBlocks, slot: int, before: Tree) -> None:
        """The worker holds something else than `before`; most of it has no chunks, and is not looked at."""
        mapped, tree = list(self._chunks), held.tree
        self.dropped(slot, [block for block in mapped if block in before and block not in tree])
        added = [block for block in reversed(mapped) if block in tree and block not in before]
        added += [tail for tail in self._awaited if tail in tree]
        self.added(held, slot, added)

    def _release(self, blocks: Iterable[int]) -> None:
        """One worker fewer holds these blocks; chunks of blocks that no worker holds are removed."""
        for block in blocks:
            if block in self._chunks and not any(block in held.tree for held in self._held.values()):
                del self._chunks[block]

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
        """Others may hold the same blocks, from another router or from before this one began."""
        for slot, held in self._held.items():
            if slot in placement.slots:
                continue
            tree, count = held.tree, 0
            while count < len(end_blocks) and end_blocks[count] in tree:
                count += 1
            if count:
                self._index.insert(slot, placement.prompt.names[: placement.known_chunks + count])


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
