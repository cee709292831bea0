"""KV pools for the tests of the transfer: small ones, and the bytes that a peer's blocks hold."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_engine.kv.cache import KVCache
from baton_engine.spec import ModelSpec

HEADS = 4


def pool(blocks: int, layers: int = 1, rank: int = 0, ranks: int = 1) -> KVCache:
    """
    Blocks of 8 KiB per layer with 4 key heads, zeroed, or the part of one of several ranks.

    Above 4 ranks, several have the same head.
    """
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        vocab=32,
        hidden=128,
        layers=layers,
        heads=4,
        kv_heads=max(1, HEADS // ranks),
        head_dim=32,
        intermediate=128,
        context=1024,
        norm_epsilon=1e-5,
        rope_theta=10000.0,
    )
    replicas = max(1, ranks // HEADS)
    cpu = torch.device("cpu")
    return KVCache(spec, blocks, torch.bfloat16, cpu, rank=rank, ranks=ranks, replicas=replicas)


def pools_of(ranks: int, blocks: int, layers: int = 1) -> list[KVCache]:
    """The parts of all ranks of a worker."""
    return [pool(blocks, layers, rank, ranks) for rank in range(ranks)]


def pattern(blocks: int, layers: int, seed: int) -> Tensor:
    """Return the bytes of a peer with that seed, one row per block, no two rows alike."""
    generator = torch.Generator().manual_seed(seed)
    size = pool(1, layers).block_bytes
    return torch.randint(0, 256, (blocks, size), dtype=torch.uint8, generator=generator)


def rows(*parts: KVCache) -> Tensor:
    """The bytes of a worker's blocks, one row per block. Not copied, unless ranks divide them."""
    replicas = parts[0].replicas
    for rank, part in enumerate(parts):
        own, first = (one.kv.view(torch.uint8) for one in (part, parts[rank - rank % replicas]))
        assert own.equal(first), f"rank {rank} has other bytes of its heads than the first one"
    kv = torch.cat([part.kv for part in parts[::replicas]], 3) if len(parts) > 1 else parts[0].kv
    return kv.view(torch.uint8).reshape(parts[0].blocks, -1)


def fill(cache: KVCache, content: Tensor) -> None:
    """Write this rank's part of `content`, one row of bytes per block of all ranks."""
    whole = pool(cache.blocks, cache.spec.layers)
    rows(whole).copy_(content)
    cache.kv.copy_(whole.kv.chunk(cache.parts, 3)[cache.part])
