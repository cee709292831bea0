"""KV pools for the tests of the transfer: small ones, and the bytes that a peer's blocks hold."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_engine.kv.cache import KVCache
from baton_engine.spec import ModelSpec


def pool(blocks: int, layers: int = 1, rank: int = 0, ranks: int = 1) -> KVCache:
    """Blocks of 8 KiB per layer with 4 key heads, zeroed, or the part of one of several ranks."""
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        vocab=32,
        hidden=128,
        layers=layers,
        heads=4,
        kv_heads=4 // ranks,
        head_dim=32,
        intermediate=128,
        context=1024,
        norm_epsilon=1e-5,
        rope_theta=10000.0,
    )
    return KVCache(spec, blocks, torch.bfloat16, torch.device("cpu"), rank=rank, ranks=ranks)


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
    kv = torch.cat([part.kv for part in parts], 3) if len(parts) > 1 else parts[0].kv
    return kv.view(torch.uint8).reshape(parts[0].blocks, -1)


def fill(cache: KVCache, content: Tensor) -> None:
    """Write this rank's part of `content`, one row of bytes per block of all ranks."""
    whole = pool(cache.blocks, cache.spec.layers)
    rows(whole).copy_(content)
    cache.kv.copy_(whole.kv.chunk(cache.ranks, 3)[cache.rank])
