"""
Names of KV blocks by the tokens in them, for engines whose own names the router cannot compute.

vLLM and SGLang name blocks by hashes with a seed of their own in each process, but their events carry the
tokens. Here a block's name is a hash of its tokens and of its parent's name. Equal prompts then have equal
names on all workers, and the router can compute the name of a prompt's last block from its token ids.
"""

from __future__ import annotations

import array
from collections.abc import Iterable, Sequence

import msgspec
from xxhash import xxh3_64_intdigest as digest

from baton_api.kv_events import IN_USE, AllBlocksCleared, BlockRemoved, BlockStored, Event
from baton_router.cache.block_map import Tree
from baton_router.cache.kv_feed import BlockSink

ROOT = 0
"""Name of the parent of a prompt's first block."""

NAMES_LIMIT = 4_000_000
"""Blocks of one worker that are named; further ones are ignored."""


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


class TokenBlocks:
    """Translates the events of one worker from its own names to names by tokens."""

    def __init__(self) -> None:
        self._names: dict[int | bytes, int] = {}
        """Worker's name -> name by tokens."""

    def __len__(self) -> int:
        return len(self._names)

    def translate(self, events: Iterable[Event]) -> list[Event]:
        """
        The events by names of tokens.

        Blocks whose parent is unknown, because its event was lost, are left out, and so are blocks without
        tokens and those of other memory than the accelerator's.
        """
        translated: list[Event] = []
        for event in events:
            if not isinstance(event, AllBlocksCleared) and event.medium not in (None, IN_USE):
                continue
            if isinstance(event, BlockStored):
                translated += self._stored(event)
            elif isinstance(event, BlockRemoved):
                names = [self._names.pop(block) for block in event.block_hashes if block in self._names]
                if names:
                    translated.append(BlockRemoved(names))
            else:
                self._names.clear()
                translated.append(event)
        return translated

    def _stored(self, event: BlockStored) -> list[Event]:
        size, names = event.block_size, self._names
        parent = ROOT if event.parent_block_hash is None else names.get(event.parent_block_hash)
        if parent is None or not size or len(event.token_ids) < size * len(event.block_hashes):
            return []
        if len(names) >= NAMES_LIMIT:
            return []
        extras = event.extra_keys or [None] * len(event.block_hashes)
        first, stored = parent, []
        for number, (block, extra) in enumerate(zip(event.block_hashes, extras, strict=False)):
            tokens = event.token_ids[number * size : (number + 1) * size]
            names[block] = parent = block_name(tokens, parent, extra)
            stored.append(parent)
        return [BlockStored(stored, first or None, [], size)]


class TokenBlockSink:
    """A `BlockSink` that translates for another one."""

    def __init__(self, blocks: BlockSink) -> None:
        self._blocks = blocks
        self._names = TokenBlocks()

    def apply(self, events: Sequence[Event]) -> None:
        self._blocks.apply(self._names.translate(events))

    def replace(self, tree: Tree) -> None:
        self._blocks.replace(tree)
