"""KV pools for the tests of the transfer: small ones, and the bytes that a peer's blocks hold."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from baton_engine.kv.cache import KVCache
from baton_engine.model.shards import Shard
from baton_engine.spec import HeadSpec, ModelSpec

HEADS = 4


def pool(blocks: int, layers: int = 1, rank: int = 0, ranks: int = 1) -> KVCache:
    """
    Blocks of 8 KiB per layer with 4 key heads, zeroed, or the part of one of several ranks.

    Above 4 ranks, several have the same head.
    """
    return _part(_spec(layers), blocks, torch.bfloat16, Shard(rank, ranks))


def head_pools(ranks: int, blocks: int, layers: int, dtype: torch.dtype) -> list[KVCache]:
    """The parts of all ranks of a worker whose model has a draft head with 8 key heads of 16 dimensions."""
    layer = replace(_spec(1), hidden=96, heads=8, kv_heads=8, head_dim=16)
    spec = replace(_spec(layers), draft_head=HeadSpec(kind="eagle3", layer=layer, inputs=(0,)))
    return [_part(spec, blocks, dtype, Shard(rank, ranks)) for rank in range(ranks)]


def divide(whole: KVCache, parts: list[KVCache]) -> None:
    """Write the keys, values and states of `whole`, which has a draft head, to the parts of all ranks."""
    layers, ranks = whole.spec.layers, len(parts)
    for part in parts:
        assert part.head is not None and whole.head is not None
        part.kv[:, :layers] = whole.kv[:, :layers].chunk(ranks, 3)[part.rank]
        part.head.kv.copy_(whole.head.kv.chunk(ranks, 3)[part.rank])
        part.head.states.copy_(whole.head.states.chunk(ranks, 1)[part.rank])


def _spec(layers: int) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab=32,
        hidden=128,
        layers=layers,
        heads=4,
        kv_heads=HEADS,
        head_dim=32,
        intermediate=128,
        context=1024,
        norm_epsilon=1e-5,
        rope_theta=10000.0,
    )


def _part(spec: ModelSpec, blocks: int, dtype: torch.dtype, shard: Shard) -> KVCache:
    """Return the blocks of one rank."""
    return KVCache(
        shard.spec(spec),
        blocks,
        dtype,
        torch.device("cpu"),
        rank=shard.rank,
        ranks=shard.size,
        replicas=shard.replicas(spec.kv_heads),
    )


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
