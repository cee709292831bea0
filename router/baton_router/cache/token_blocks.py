"""
Names of KV blocks by the tokens in them, for engines whose own names the router cannot compute.

vLLM and SGLang name blocks by hashes with a seed of their own in each process, but their events carry the
tokens. Here a block's name is a hash of its tokens and of its parent's name. Equal prompts then have equal
names on all workers, and the router can compute the name of a prompt's last block from its token ids.
"""

from __future__ import annotations

import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec
from xxhash import xxh3_64_intdigest as digest

from baton_api.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from baton_router.cache.block_map import LEFT_LIMIT, Tree
from baton_router.cache.kv_feed import BlockSink
from baton_router.cache.tiers import MEDIA, Tier, tier_of

ROOT = 0
"""Name of the parent of a prompt's first block."""

NAMES_LIMIT = 4_000_000
"""
Named blocks of one worker from which on its tiers' new blocks are ignored: a disk may never delete. The pool
has as many in each group of layers, whatever is in the tiers.
"""


def block_name(tokens: Sequence[int], parent: int, extra: Sequence[object] | None) -> int:
    """The name of a block; `extra` is what else the engine hashes with it: adapter, salt, images."""
    content = array.array("I", tokens).tobytes()
    return digest(content + msgspec.json.encode(extra) if extra else content, parent)


def prompt_tail(tokens: Sequence[int], block_size: int, salt: str = "", adapter: str = "") -> str:
    """
    The name of the last full block of a prompt, as 16 hexadecimal digits; empty without a full block.

    `salt` counts in the first block, `adapter` in all of them, as in vLLM.
    """
    name = ROOT
    full = len(tokens) // block_size * block_size
    others = [adapter] if adapter else None
    extra = [*(others or ()), salt] if salt else others
    for begin in range(0, full, block_size):
        name = block_name(tokens[begin : begin + block_size], name, extra)
        extra = others
    return f"{name:016x}" if full else ""


_Place = tuple[Tier | None, int | None]
"""A tier, None for the pool, and the group of layers."""


class TokenBlocks:
    """
    Translates the events of one worker from its own names to names by tokens.

    A block keeps its name while it is in the pool or in any tier, and for some time after it has left the
    last of them: events of a tier follow those of the pool late. Events of vLLM's tiers lack what it hashes
    besides tokens, such as a salt, so the name that the pool's event gave a block wins.

    In a tier, a block is counted: vLLM stores several blocks as one chunk, and names a block again with each
    chunk that it is in.
    """

    def __init__(self, cleared: Collection[Tier] = (), limit: int = NAMES_LIMIT) -> None:
        """`cleared`: the tiers that an AllBlocksCleared means, besides the pool; `limit`: `NAMES_LIMIT`."""
        self._limit = limit
        self._cleared = (None, *cleared)
        self._names: dict[int | bytes, int] = {}
        """Worker's name -> name by tokens, of the blocks that are anywhere."""
        self._left: OrderedDict[int | bytes, int] = OrderedDict()
        """The same of blocks that were."""
        self._places: dict[_Place, dict[int | bytes, int]] = {}
        """Where the blocks are, and how often."""

    def __len__(self) -> int:
        return len(self._names)

    def translate(self, events: Iterable[Event]) -> list[Event]:
        """
        The events by names of tokens: what comes to the pool or a tier, and what leaves it.

        Blocks whose parent is unknown, because its event was lost, are left out, and so are blocks without
        tokens.
        """
        translated: list[Event] = []
        for event in events:
            if isinstance(event, BlockStored):
                translated += self._stored(event)
            elif isinstance(event, BlockRemoved):
                translated += self._removed(event)
            else:
                translated += self._clear()
        return translated

    def forget_places(self) -> None:
        """Forget where the blocks are."""
        for blocks in self._places.values():
            blocks.clear()
        self._retire(list(self._names))

    def _stored(self, event: BlockStored) -> list[Event]:
        size, tier = event.block_size, tier_of(event)
        parent = ROOT if event.parent_block_hash is None else self._name(event.parent_block_hash)
        if parent is None or not size or len(event.token_ids) < size * len(event.block_hashes):
            return []
        there = self._places.setdefault((tier, _group(event)), {})
        if len(there if tier is None else self._names) >= self._limit:
            return []
        adapter: list[object] | None = [event.lora_name] if event.lora_name else None
        extras = event.extra_keys or [adapter] * len(event.block_hashes)
        events: list[Event] = []
        stored = BlockStored([], parent or None, [], size, medium=event.medium, locality=event.locality)
        for number, (block, extra) in enumerate(zip(event.block_hashes, extras, strict=False)):
            known = name = self._name(block)
            if name is None or tier is None:
                name = block_name(event.token_ids[number * size : (number + 1) * size], parent, extra)
            if known is not None and known != name:
                events += self._renamed(block, known, name, parent, size)
            if self._is_in(tier, block):
                stored = BlockStored([], name, [], size, medium=event.medium, locality=event.locality)
            else:
                if not stored.block_hashes:
                    events.append(stored)
                stored.block_hashes.append(name)
            there[block] = 1 if tier is None else there.get(block, 0) + 1
            self._left.pop(block, None)
            self._names[block] = parent = name
        return events

    def _renamed(self, block: int | bytes, old: int, new: int, parent: int, size: int) -> Iterator[Event]:
        """The pool's event names a block that tiers have by another name."""
        for tier in Tier:
            if self._is_in(tier, block):
                yield BlockRemoved([old], MEDIA[tier])
                yield BlockStored([new], parent or None, [], size, medium=MEDIA[tier])

    def _removed(self, event: BlockRemoved) -> list[Event]:
        tier = tier_of(event)
        there = self._places.get((tier, _group(event)), {})
        gone = []
        for block in event.block_hashes:
            count = there.get(block, 0)
            if count > 1:
                there[block] = count - 1
            elif count:
                del there[block]
                if not self._is_in(tier, block):
                    gone.append(block)
        return self._went(gone, event)

    def _clear(self) -> list[Event]:
        """Clear the pool and its tiers. Returns the events; that of the pool comes last, for all blocks."""
        cleared: list[Event] = []
        for tier in reversed(self._cleared):
            gone: dict[int | bytes, None] = {}
            for place, blocks in self._places.items():
                if place[0] is tier:
                    gone |= dict.fromkeys(blocks)
                    blocks.clear()
            if tier is None:
                self._retire(gone)
            else:
                cleared += self._went(list(gone), BlockRemoved([], medium=MEDIA[tier]))
        return [*cleared, AllBlocksCleared()]

    def _went(self, blocks: Sequence[int | bytes], event: BlockRemoved) -> list[Event]:
        if not blocks:
            return []
        names = [self._names[block] for block in blocks]
        self._retire(blocks)
        return [BlockRemoved(names, event.medium, locality=event.locality)]

    def _is_in(self, tier: Tier | None, block: int | bytes) -> bool:
        return any(block in blocks for place, blocks in self._places.items() if place[0] is tier)

    def _name(self, block: int | bytes) -> int | None:
        name = self._names.get(block)
        return self._left.get(block) if name is None else name

    def _retire(self, blocks: Iterable[int | bytes]) -> None:
        """These have left a place; those that are nowhere now keep their names for some time."""
        for block in blocks:
            if not any(block in there for there in self._places.values()):
                self._left[block] = self._names.pop(block)
        while len(self._left) > LEFT_LIMIT:
            self._left.popitem(last=False)


def _group(event: BlockStored | BlockRemoved) -> int | None:
    return None if event.group_idx is msgspec.UNSET else event.group_idx


class TokenBlockSink:
    """A `BlockSink` that translates for another one."""

    def __init__(self, blocks: BlockSink, cleared_tiers: tuple[Tier, ...] = ()) -> None:
        """`cleared_tiers` are cleared with the pool."""
        self._blocks = blocks
        self._names = TokenBlocks(cleared_tiers)

    def apply(self, events: Sequence[Event]) -> None:
        self._blocks.apply(self._names.translate(events))

    def replace(self, tree: Tree) -> None:
        self._names.forget_places()
        self._blocks.replace(tree)
