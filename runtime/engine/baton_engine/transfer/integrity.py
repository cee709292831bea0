"""
Integrity of transfers: checksums of blocks, and sealed metadata of peers.

xxh3-64 is faster than a host's memory and reads the block's bytes without a copy. On a device, a sum of mixed
words replaces it, because many programs can compute it (ADR 37). Both detect accidental damage, not forgery.

NIXL parses metadata in C++ and has hung on modified bytes. Metadata therefore contains a version, a checksum,
and the settings that both ends must share, so that damaged or foreign metadata never reaches NIXL. The
control connection authenticates peers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from baton_api.errors import IncompatiblePeer, TransferFailed
from baton_engine.kv.cache import KVCache
from baton_engine.ops.native.library import disabled
from baton_engine.transfer.parts import DRAM, VRAM


def block_checksum(cache: KVCache, block: int) -> int:
    """Return the checksum of `block` in host memory. Releases the interpreter lock for large blocks."""
    return block_checksums(cache, (block,))[0]


def block_checksums(cache: KVCache, blocks: Sequence[int], memory: str = DRAM) -> list[int]:
    """
    Return a checksum of each of `blocks`, which does not depend on the number of ranks that divide them.

    `memory` is that of the pools of the worker that announces the blocks. For DRAM it is xxh3-64 of the
    bytes, for VRAM `word_sums`, which a device computes at the speed of its memory. Parts of several ranks
    are joined. The device must have written the blocks.
    """
    if memory == VRAM:
        return _device_checksums(cache, blocks)
    return [xxhash.xxh3_64_intdigest(content.data) for content in _contents(cache, blocks)]


def _contents(cache: KVCache, blocks: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of each block on the host. Those of a device are copied together."""
    if cache.kv.device.type != "cpu":
        with cache.streams.aside():
            chosen = torch.tensor(list(blocks), device=cache.kv.device)
            copies = cache.kv.index_select(0, chosen).cpu()
        yield from copies.view(torch.uint8).numpy().reshape(len(blocks), -1)
        return
    pools = [
        part.kv.view(torch.uint8).numpy().reshape(cache.blocks, cache.planes, -1) for part in cache.parts
    ]
    for block in blocks:
        parts = [pool[block] for pool in pools]
        yield parts[0].reshape(-1) if len(parts) == 1 else np.concatenate(parts, axis=1).reshape(-1)


def _device_checksums(cache: KVCache, blocks: Sequence[int]) -> list[int]:
    if cache.kv.device.type == "cpu":  # the announcing worker has a GPU, and this one does not
        contents = (torch.from_numpy(content).view(torch.int64) for content in _contents(cache, blocks))
        sums = [int(word_sums(words[None])) for words in contents]
    else:
        with cache.streams.aside():
            words = cache.kv.view(cache.blocks, -1).view(torch.int64)
            sums = _sums_of(words, torch.tensor(list(blocks), device=words.device)).tolist()
    return [value % 2**64 for value in sums]


def _sums_of(words: Tensor, blocks: Tensor) -> Tensor:
    """Return `word_sums` of rows `blocks` [B] of `words` [blocks, W]: by a kernel, if there is Triton."""
    if not disabled(os.environ):
        with contextlib.suppress(ImportError):
            from baton_engine.ops.kernels.checksums import mixed_sums

            return mixed_sums(words, blocks, KEYS)
    return torch.cat([word_sums(words[block : block + 1]) for block in blocks.tolist()] or [blocks])


KEYS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Signed forms of the constants of SplitMix64: the golden ratio, and the factors of its finalizer."""


def word_sums(words: Tensor) -> Tensor:
    """
    Return the sum [B] int64, modulo 2**64, of a mix of each word of `words` [B, W] int64 and of its position.

    The mix is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014), a bijection. So one wrong word
    always changes the sum. Several wrong words keep it with a probability of about 2**-64.
    """
    key, first, second = KEYS
    x = words ^ (torch.arange(1, words.shape[1] + 1, device=words.device) * key)
    for shift, factor in ((30, first), (27, second)):
        x = (x ^ _shifted(x, shift)) * factor
    return (x ^ _shifted(x, 31)).sum(1)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right as if it were unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


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
