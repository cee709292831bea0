"""
How ranks divide the KV blocks of a worker, and the pieces in which workers of another degree read them.

Each rank has an equal range of the key heads. Its part of a block is `[plane, head, slot, dim]`. A plane has
the keys or the values of a layer, or its latents, which are one head. Workers with as many ranges exchange
whole parts. Otherwise a piece is a range of heads in one plane, small enough to be in one pool on both sides.
The state of a draft head is a plane of its own, and so is unused memory (`kv.cache.Section`).

If there are more ranks than key heads, adjacent ranks have the same range. A rank reads each range from one
of them: rank r from rank r, if both workers have as many ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton_api.messages import PoolLayout
from baton_engine.kv.cache import KVCache, Section

DRAM, VRAM = "DRAM", "VRAM"


@dataclass(frozen=True, slots=True)
class CommonPieces:
    """Parts of each block that a rank of this worker and one of a peer both have."""

    sizes: tuple[int, ...]
    """Bytes of each piece."""
    ours: tuple[int, ...]
    """Offsets of the pieces after the block's start in this worker's pool."""
    theirs: tuple[int, ...]
    """Offsets of the same pieces in the peer's pool."""

    @property
    def bytes(self) -> int:
        return sum(self.sizes)


def common_pieces(
    ours: PoolLayout, parts: int, theirs: PoolLayout, sections: Sequence[Section]
) -> CommonPieces:
    """
    Return the common pieces of two pools. The list is empty if their ranks have different key heads.

    `parts` is the number of ranges of key heads of this worker, and `sections` are those of a rank's blocks.
    The number of the peer follows from the size of its part. The heads must be divisible by the least common
    multiple of both.
    """
    peers = ours.block_bytes * parts // theirs.block_bytes
    ranges = math.lcm(parts, peers)
    our_count, their_count = ranges // parts, ranges // peers
    our_first = ours.rank // ours.replicas * our_count
    their_first = theirs.rank // theirs.replicas * their_count
    common = range(max(our_first, their_first), min(our_first + our_count, their_first + their_count))
    pieces: list[tuple[int, int, int]] = []
    start = 0  # of the section, in the whole block
    for section in sections:
        size = section.plane_bytes // our_count
        for plane in range(section.planes):
            our_start = start // parts + (plane * our_count - our_first) * size
            their_start = start // peers + (plane * their_count - their_first) * size
            pieces += [(size, our_start + heads * size, their_start + heads * size) for heads in common]
        start += section.bytes * parts
    sizes, our_offsets, their_offsets = zip(*pieces, strict=True) if pieces else ((), (), ())
    return CommonPieces(sizes, our_offsets, their_offsets)


def sources(ours: PoolLayout, ranks: int, theirs: Sequence[PoolLayout]) -> list[PoolLayout]:
    """
    Return the ranks of a peer from which one of `ranks` ranks reads: one for each range of its key heads.

    Of several ranks with the same range, each is read by as many ranks, or by one more than others.
    """
    replicas = theirs[0].replicas
    parts, their_parts = ranks // ours.replicas, len(theirs) // replicas
    chosen = []
    for part in _overlapping(ours.rank // ours.replicas, parts, their_parts):
        readers = _overlapping(part, their_parts, parts)
        number = ours.rank - readers.start * ours.replicas
        count = len(readers) * ours.replicas
        chosen.append(theirs[part * replicas + number * replicas // count])
    return chosen


def _overlapping(part: int, parts: int, others: int) -> range:
    """Return which of `others` equal ranges of the same heads have heads of range `part` of `parts`."""
    return range(part * others // parts, -(-(part + 1) * others // parts))


def whole_bytes(pools: Sequence[PoolLayout]) -> int:
    """Return the bytes of a block on all ranks together, in which each key head counts once."""
    return sum(pool.block_bytes for pool in pools if pool.rank % pool.replicas == 0)


def pool_layout(cache: KVCache) -> PoolLayout:
    """Return the pool of one rank, as `Welcome` announces it."""
    return PoolLayout(
        address=cache.kv.data_ptr(),
        block_bytes=cache.block_bytes,
        blocks=cache.blocks,
        device=cache.kv.device.index or 0,
        memory=DRAM if cache.kv.device.type == "cpu" else VRAM,
        rank=cache.rank,
        replicas=cache.replicas,
    )
