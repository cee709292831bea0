"""
Integrity of transfers: checksums of blocks, and sealed metadata of peers.

xxh3-64 is faster than memory and reads the block's bytes without a copy. It detects accidental damage, not
forgery. NIXL parses metadata in C++ and has hung on modified bytes. Metadata therefore contains a version, a
checksum, and the settings that both ends must share, so that damaged or foreign metadata never reaches NIXL.
The control connection authenticates peers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from baton_api.errors import IncompatiblePeer, TransferFailed
from baton_engine.kv.cache import KVCache


def block_checksum(cache: KVCache, block: int) -> int:
    """Return xxh3-64 of the bytes of `block`. Releases the interpreter lock for large blocks."""
    return block_checksums(cache, (block,))[0]


def block_checksums(cache: KVCache, blocks: Sequence[int]) -> list[int]:
    """
    Return xxh3-64 of each of `blocks`, which does not depend on the number of ranks that divide them.

    Blocks of a GPU are copied together. Parts of several ranks are joined.
    """
    if cache.others:
        pools = [
            part.kv.view(torch.uint8).numpy().reshape(cache.blocks, cache.planes, -1) for part in cache.parts
        ]
        joined = (np.concatenate([pool[block] for pool in pools], axis=1) for block in blocks)
        return [xxhash.xxh3_64_intdigest(block.data) for block in joined]
    if cache.kv.device.type == "cpu":
        pool = cache.kv.view(torch.uint8).numpy().reshape(cache.blocks, -1)
        return [xxhash.xxh3_64_intdigest(pool[block].data) for block in blocks]
    chosen = torch.tensor(list(blocks), device=cache.kv.device)
    copies = cache.kv.index_select(0, chosen).cpu().view(torch.uint8).numpy().reshape(len(blocks), -1)
    return [xxhash.xxh3_64_intdigest(copy.data) for copy in copies]


MAGIC = b"baton-nixl-1\n"
CHECKSUM_BYTES = 16
LIMIT = 1024 * 1024
"""Maximum bytes. An agent has about 500, and several hundred more per device."""


def seal(metadata: bytes, wire: str, place: str) -> bytes:
    """Add version, checksum and shared settings to `metadata`."""
    body = f"{wire}\n{place}\n".encode() + metadata
    return MAGIC + xxhash.xxh3_128_digest(body) + body


def unseal(sealed: bytes, wire: str) -> tuple[bytes, str]:
    """
    Return the metadata and the place of the peer.

    Raises TransferFailed for damaged metadata, IncompatiblePeer for another `wire`.
    """
    if len(sealed) > LIMIT:
        raise TransferFailed(f"The peer's metadata of {len(sealed)} bytes exceeds the limit of {LIMIT}.")
    if not sealed.startswith(MAGIC):
        raise TransferFailed(
            "The peer's metadata is of another version or transfer. Start both workers with --transfer nixl."
        )
    begin = len(MAGIC) + CHECKSUM_BYTES
    body = sealed[begin:]
    parts = body.split(b"\n", 2)
    if xxhash.xxh3_128_digest(body) != sealed[len(MAGIC) : begin] or len(parts) < 3:
        raise TransferFailed("The peer's metadata was damaged in transit.")
    theirs, place, metadata = parts
    if theirs != wire.encode():
        raise IncompatiblePeer(
            f"The peer runs UCX with {theirs.decode(errors='replace')} and this worker with {wire}. Set the "
            "same values on all workers, or remove them."
        )
    return metadata, place.decode(errors="replace")
