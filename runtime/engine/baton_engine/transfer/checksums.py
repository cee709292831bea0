"""
Checksums of blocks: what tells a block that arrived damaged from one that did not.

xxh3-64 runs faster than memory is read, over the block's own bytes, nothing copied. It finds
accidents, not forgery: whoever could forge blocks could as well forge what is written about them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from baton_engine.cache import KVCache


def block_checksum(cache: KVCache, block: int) -> int:
    """xxh3-64 of the bytes of `block`. Big blocks are hashed with the GIL released."""
    return block_checksums(cache, (block,))[0]


def block_checksums(cache: KVCache, blocks: Sequence[int]) -> list[int]:
    """xxh3-64 of each of `blocks`; from a GPU they come over in one copy."""
    if cache.kv.device.type == "cpu":
        pool = cache.kv.view(torch.uint8).numpy().reshape(cache.blocks, -1)
        return [xxhash.xxh3_64_intdigest(pool[block].data) for block in blocks]
    chosen = torch.tensor(list(blocks), device=cache.kv.device)
    copies = cache.kv.index_select(0, chosen).cpu().view(torch.uint8).numpy().reshape(len(blocks), -1)
    return [xxhash.xxh3_64_intdigest(copy.data) for copy in copies]
