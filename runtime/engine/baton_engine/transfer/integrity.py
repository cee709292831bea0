"""
Integrity of transfers: checksums of blocks, and sealed metadata of peers.

xxh3-64 is faster than a host's memory and reads the block's bytes without a copy. On a device, and between
several ranks, a sum of mixed words replaces it: many programs can compute it, and each rank sums its own part
(ADR 37). Both detect accidental damage, not forgery.

NIXL parses metadata in C++ and has hung on modified bytes. Metadata therefore contains a version, a checksum,
and the settings that both ends must share, so that damaged or foreign metadata never reaches NIXL. The
control connection authenticates peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from baton_api.errors import IncompatiblePeer, TransferFailed
from baton_api.messages import PoolLayout
from baton_engine.kv.cache import KVCache
from baton_engine.ops.choice import runs_kernels
from baton_engine.streams import copied
from baton_engine.transfer.parts import VRAM


def by_sums(announced: Sequence[PoolLayout], readers: int) -> bool:
    """
    Return whether checksums are sums of words. Both workers decide it by the same rule.

    `announced` are the pools of the worker that announces blocks. `readers` is the number of ranks that read.
    """
    return announced[0].memory == VRAM or len(announced) > 1 or readers > 1


def block_checksums(cache: KVCache, blocks: Sequence[int], sums: bool = False) -> list[int]:
    """
    Return a checksum of each of `blocks`. The device must have written them.

    It is xxh3-64 of the bytes. With `sums`, it is `word_sums`, which a device computes at the speed of its
    memory. `joined_checksums` adds those of the parts of all ranks.
    """
    if sums:
        return _word_checksums(cache, blocks)
    return [xxhash.xxh3_64_intdigest(content.data) for content in _contents(cache, blocks)]


def joined_checksums(ranks: Sequence[Sequence[int]], replicas: int) -> list[int]:
    """
    Return the checksum of each whole block from those of the parts of all ranks.

    `replicas` adjacent ranks have the same key heads, which count once. If the checksum of one of them
    differs from that of the first one, the result changes.
    """
    return [sum(_counted(parts, replicas)) % 2**64 for parts in zip(*ranks, strict=True)]


def _counted(parts: Sequence[int], replicas: int) -> Iterator[int]:
    for rank, part in enumerate(parts):
        first = parts[rank - rank % replicas]
        # An odd factor: the difference alone would cancel out if only the first one were damaged.
        yield part if rank % replicas == 0 else (part - first) * KEYS[0]


def _contents(cache: KVCache, blocks: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of each block on the host. Those of a device are copied together."""
    if cache.kv.device.type != "cpu":
        with cache.streams.side_stream():
            chosen = torch.tensor(list(blocks), device=cache.kv.device)
            copies = cache.kv.index_select(0, chosen).cpu()
        yield from copies.view(torch.uint8).numpy().reshape(len(blocks), -1)
        return
    for block in blocks:
        yield np.frombuffer(cache.block(block), dtype=np.uint8)


def _word_checksums(cache: KVCache, blocks: Sequence[int]) -> list[int]:
    with cache.streams.side_stream():
        words = cache.kv.view(cache.blocks, -1).view(torch.int64)
        total, start = words.new_zeros(len(blocks)), 0
        for section in cache.sections:
            of_plane, end = section.plane_bytes // 8, start + section.bytes // 8
            layout = of_plane, of_plane * cache.parts, start * cache.parts + of_plane * cache.part
            total += _sums_of(words[:, start:end], blocks, layout)
            start = end
        sums = total.tolist()
    return [value % 2**64 for value in sums]


def _sums_of(words: Tensor, blocks: Sequence[int], layout: WordLayout) -> Tensor:
    """Return `word_sums`, computed by a kernel on a device with Triton."""
    if words.device.type != "cpu" and runs_kernels(words.device.type):
        from baton_engine.ops.kernels.checksums import mixed_sums

        return mixed_sums(words, copied(np.array(blocks, dtype=np.int64), words.device), KEYS, layout)
    return word_sums(words, blocks, layout)


KEYS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Signed forms of the constants of SplitMix64: the golden ratio, and the factors of its finalizer."""


WordLayout = tuple[int, int, int]
"""
Positions of the words of a rank's part in the whole block.

They are: words of the part in a plane, words of the whole block in a plane, and position of the first word.
"""


def word_sums(words: Tensor, blocks: Sequence[int], layout: WordLayout) -> Tensor:
    """
    Return sums [B] int64, modulo 2**64, for rows `blocks` [B] of `words` [blocks, W] int64.

    A row's sum is that of a mix of each word and of its position. The mix is the finalizer of SplitMix64
    (Steele, Lea and Flood, 2014), a bijection. So one wrong word always changes the sum. Several wrong words
    keep it with a probability of about 2**-64.
    """
    key, first, second = KEYS
    run, stride, start = layout
    size, device = words.shape[1], words.device
    planes = torch.arange(-(-size // run), device=device) * stride + start + 1
    keyed = (planes[:, None] + torch.arange(run, device=device)).reshape(-1)[:size] * key
    sums = []
    for block in blocks:
        x = words[block] ^ keyed
        for shift, factor in ((30, first), (27, second)):
            x ^= _shifted(x, shift)
            x *= factor
        sums.append((x ^ _shifted(x, 31)).sum())
    return torch.stack(sums) if sums else words.new_empty(0)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right as if it were unsigned."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


MAGIC = b"baton-nixl-1\n"
CHECKSUM_BYTES = 16
LIMIT = 1024 * 1024
"""Maximum bytes. An agent has about 500, and several hundred more per device."""


def seal(metadata: bytes, wire: str, host_id: str) -> bytes:
    """Add version, checksum and shared settings to `metadata`."""
    body = f"{wire}\n{host_id}\n".encode() + metadata
    return MAGIC + xxhash.xxh3_128_digest(body) + body


def unseal(sealed: bytes, wire: str) -> tuple[bytes, str]:
    """
    Return the metadata and the host id of the peer.

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
    theirs, host_id, metadata = parts
    if theirs != wire.encode():
        raise IncompatiblePeer(
            f"The peer runs UCX with {theirs.decode(errors='replace')} and this worker with {wire}. Set the "
            "same values on all workers, or remove them."
        )
    return metadata, host_id.decode(errors="replace")


def join_sealed(sealed: Sequence[bytes]) -> bytes:
    """Return the sealed metadata of all ranks' agents as one string. That of a single rank is unchanged."""
    if len(sealed) == 1:
        return sealed[0]
    return b"".join(len(part).to_bytes(4) + part for part in sealed)


def split_sealed(joined: bytes, ranks: int) -> list[bytes]:
    """Return the sealed metadata of each of `ranks` agents. Raises TransferFailed for another number."""
    if ranks == 1:
        return [joined]
    sealed: list[bytes] = []
    rest = joined
    while rest and len(sealed) < ranks:
        end = 4 + int.from_bytes(rest[:4])
        sealed.append(rest[4:end])
        rest = rest[end:]
    if rest or len(sealed) != ranks:
        raise TransferFailed(f"The peer's metadata is not that of {ranks} ranks.")
    return sealed
