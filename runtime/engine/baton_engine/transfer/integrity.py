"""
Integrity of transfers: checksums of blocks, and sealed metadata of peers.

xxh3-64 runs faster than memory is read, over the block's own bytes without a copy. It detects accidents, not
forgery. NIXL parses metadata in C++ and has hung on mutated bytes, so metadata travels with a version, a
checksum, and the settings that both ends must share: truncated, mixed or foreign metadata never
reaches NIXL. The control connection decides whom to trust.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from baton_api.errors import IncompatiblePeer, TransferFailed
from baton_engine.kv.cache import KVCache


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


MAGIC = b"baton-nixl-1\n"
CHECKSUM_BYTES = 16
LIMIT = 1024 * 1024
"""Bytes. One agent has about 500, and some hundreds more for each device."""


def seal(metadata: bytes, wire: str, place: str) -> bytes:
    """`metadata` as it is sent."""
    body = f"{wire}\n{place}\n".encode() + metadata
    return MAGIC + xxhash.xxh3_128_digest(body) + body


def unseal(sealed: bytes, wire: str) -> tuple[bytes, str]:
    """
    What was sealed, and its place.

    Raises TransferFailed if it is not whole, IncompatiblePeer for another `wire`.
    """
    if len(sealed) > LIMIT:
        raise TransferFailed(f"The peer's metadata of {len(sealed)} bytes is over the limit of {LIMIT}.")
    if not sealed.startswith(MAGIC):
        raise TransferFailed(
            "The peer's metadata is not of this version: start both workers with --transfer nixl."
        )
    begin = len(MAGIC) + CHECKSUM_BYTES
    body = sealed[begin:]
    parts = body.split(b"\n", 2)
    if xxhash.xxh3_128_digest(body) != sealed[len(MAGIC) : begin] or len(parts) < 3:
        raise TransferFailed("The peer's metadata was damaged on its way.")
    theirs, place, metadata = parts
    if theirs != wire.encode():
        raise IncompatiblePeer(
            f"The peer runs UCX with {theirs.decode(errors='replace')} and this worker with {wire}: "
            "set them alike on all workers, or nowhere."
        )
    return metadata, place.decode(errors="replace")
