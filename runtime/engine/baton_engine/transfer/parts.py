"""
How ranks divide the KV blocks of a worker, and the pieces in which workers of another degree read them.

Each rank has an equal range of the key heads. Its part of a block is `[plane, head, slot, dim]`. A plane has
the keys or the values of a layer. Workers with as many ranks exchange whole parts. Otherwise a piece is a
range of heads in one plane, small enough to be in one pool on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton_api.messages import PoolLayout
from baton_engine.kv.cache import KVCache

DRAM, VRAM = "DRAM", "VRAM"


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """A piece of each block: `size` bytes, `offset` bytes after the block's start in the rank's pool."""

    rank: int
    offset: int
    size: int


def block_pieces(pools: Sequence[PoolLayout], peers: int, planes: int) -> list[BlockPiece]:
    """
    Return where the pieces of a block are in the pools of all ranks, in the same order for both workers.

    `peers` is the number of ranks of the other worker. The heads must be divisible by the least common
    multiple.
    """
    ranges = math.lcm(len(pools), peers)
    held = ranges // len(pools)
    size = pools[0].block_bytes // (planes * held)
    return [
        BlockPiece(number // held, (plane * held + number % held) * size, size)
        for plane in range(planes)
        for number in range(ranges)
    ]


def whole_bytes(pools: Sequence[PoolLayout]) -> int:
    """Return the bytes of a block on all ranks together."""
    return sum(pool.block_bytes for pool in pools)


def pool_layouts(cache: KVCache) -> tuple[PoolLayout, ...]:
    """Return the pools of all ranks of a worker, as `Welcome` announces them."""
    return tuple(
        PoolLayout(
            address=part.kv.data_ptr(),
            block_bytes=part.block_bytes,
            blocks=part.blocks,
            device=part.kv.device.index or 0,
            memory=memory_of(part.kv.device),
        )
        for part in cache.parts
    )


def memory_of(device: torch.device) -> str:
    """Return `PoolLayout.memory` of a pool on `device`."""
    return DRAM if device.type == "cpu" else VRAM
