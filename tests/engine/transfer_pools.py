"""KV pools for the tests of the transfer: small ones, and the bytes that a peer's blocks hold."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_engine.kv.cache import KVCache
from baton_engine.model.spec import ModelSpec


def pool(blocks: int, layers: int = 1) -> KVCache:
    """Blocks of 8 KiB per layer, zeroed."""
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        vocab=32,
        hidden=128,
        layers=layers,
        heads=2,
        kv_heads=2,
        head_dim=64,
        intermediate=128,
        context=1024,
        norm_epsilon=1e-5,
        rope_theta=10000.0,
    )
    return KVCache(spec, blocks, torch.bfloat16, torch.device("cpu"))


def pattern(blocks: int, layers: int, seed: int) -> Tensor:
    """Return the bytes of a peer with that seed, one row per block, no two rows alike."""
    generator = torch.Generator().manual_seed(seed)
    size = pool(1, layers).block_bytes
    return torch.randint(0, 256, (blocks, size), dtype=torch.uint8, generator=generator)


def rows(cache: KVCache) -> Tensor:
    """The bytes of `cache`, one row per block, not copied."""
    return cache.kv.view(torch.uint8).reshape(cache.blocks, -1)
