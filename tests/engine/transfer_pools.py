"""KV pools for the tests of the transfer: small ones, and the bytes that a peer's blocks hold."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_engine.kv.cache import KVCache
from baton_engine.model.spec import ModelSpec


def pool(blocks: int, layers: int = 1, ranks: int = 1) -> KVCache:
    """Blocks of 8 KiB per layer with 4 key heads, zeroed. `ranks` divide the heads."""
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
    first, *others = (KVCache(spec, blocks, torch.bfloat16, torch.device("cpu")) for _ in range(ranks))
    first.others = tuple(others)
    return first


def pattern(blocks: int, layers: int, seed: int) -> Tensor:
    """Return the bytes of a peer with that seed, one row per block, no two rows alike."""
    generator = torch.Generator().manual_seed(seed)
    size = pool(1, layers).block_bytes
    return torch.randint(0, 256, (blocks, size), dtype=torch.uint8, generator=generator)


def rows(cache: KVCache) -> Tensor:
    """The bytes of `cache`, one row per block. Not copied, unless ranks divide it."""
    kv = torch.cat([part.kv for part in cache.parts], 3) if cache.others else cache.kv
    return kv.view(torch.uint8).reshape(cache.blocks, -1)


def fill(cache: KVCache, content: Tensor) -> None:
    """Write `content`, one row of bytes per block of a cache that is not divided, to the parts of `cache`."""
    whole = pool(cache.blocks, cache.spec.layers)
    rows(whole).copy_(content)
    for part, heads in zip(cache.parts, whole.kv.chunk(len(cache.parts), 3), strict=True):
        part.kv.copy_(heads)
