"""The kernels of attention against the plain operations."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_engine.batch import Batch, BatchRow, StaticBatch
from baton_engine.kv.cache import FLOAT8_CACHE, KVCache
from baton_engine.model.head_loading import WHOLE
from baton_engine.ops.accelerator import AcceleratorOps
from baton_engine.ops.kernels.attention import attention as launch
from baton_engine.ops.kernels.attention import tile_rows
from baton_engine.ops.kernels.plans import LARGE_TILE_ROWS, SPLIT, TILE_ROWS, plan, plan_on_device
from baton_engine.ops.plain import PlainOps
from baton_engine.spec import ModelSpec
from tests.engine.kernels.cases import DEVICE, batch_of, caches, crossed, guarded
from tests.engine.random_weights import tiny_spec
from tests.seeds import seeds

SHAPES: dict[str, list[tuple[int, int]]] = {
    "one token alone": [(0, 1)],
    "one token on a full block": [(15, 1)],
    "one token that opens a block": [(16, 1)],
    "one token that ends a split": [(SPLIT - 1, 1)],
    "one token that opens a split": [(SPLIT, 1)],
    "one token of many splits": [(3 * SPLIT + 7, 1)],
    "a whole prompt": [(0, 37)],
    "a later chunk": [(21, 13)],
    "a chunk over the border of splits": [(SPLIT - 9, 20)],
    "rows of one token with other lengths": [(30, 1), (2 * SPLIT, 1), (0, 1)],
    "prefill and decode mixed": [(40, 1), (0, 20), (17, 5), (SPLIT + 1, 1)],
}

MODELS: dict[str, dict[str, Any]] = {
    "two heads per key head": {},
    "no groups": {"heads": 2, "kv_heads": 2},
    "three heads per key head": {"heads": 6},
    "eight heads per key head": {"heads": 8, "kv_heads": 1, "head_dim": 64},
    "heads of 80 dimensions": {"head_dim": 80},
    "heads of 256 dimensions": {"heads": 2, "kv_heads": 1, "head_dim": 256},
    "a window of one": {"sliding_window": 1},
    "a window below a block": {"sliding_window": 9},
    "a window over splits": {"sliding_window": SPLIT + 30},
    "chunked windows": {"sliding_window": 24, "window_chunks": True},
    "all positions but the first": {"sliding_window": WHOLE, "window_rest": True},
    "a window without the first position": {"sliding_window": 20, "window_rest": True},
    "sinks": {"sinks": True},
    "sinks and a window": {"sinks": True, "sliding_window": 20},
    "a scale and a cap of scores": {"attention_scale": 0.4, "attention_cap": 2.5},
}


def both(spec: ModelSpec, batch: Batch, dtype: torch.dtype, float8: bool = False) -> tuple[Tensor, Tensor]:
    """
    Attention by the kernels, over a cache with NaN behind the rows, and by the plain operations.

    With `float8`, the cache of the kernels is in float8, and the other one has the numbers of it.
    """
    clean, stale = caches(spec, batch, dtype)
    if float8:
        octets = KVCache(spec, clean.blocks, FLOAT8_CACHE, DEVICE, batch.block_size)
        octets.kv = stale.kv.to(torch.float8_e4m3fn).view(torch.uint8)
        clean.kv = clean.kv.to(torch.float8_e4m3fn).to(dtype)
        stale = octets
    q = guarded(torch.randn(batch.size, spec.heads, spec.head_dim, dtype=dtype, device=DEVICE))
    sinks = guarded(torch.randn(spec.heads, device=DEVICE)) if spec.sinks else None
    results = []
    ops: PlainOps
    for ops, cache in ((AcceleratorOps(spec), stale), (PlainOps(spec), clean)):
        ops.begin(batch)
        results.append(ops.attention(q, cache, 1, batch, spec.sliding_window, sinks))
    return results[0], results[1]


@pytest.mark.parametrize(("shapes", "model"), crossed(SHAPES, MODELS, quick="two heads per key head"))
def test_attention_kernels_give_the_plain_result(shapes: str, model: str) -> None:
    torch.manual_seed(3)
    spec = tiny_spec(**MODELS[model])
    result, expected = both(spec, batch_of(SHAPES[shapes], random.Random(5)), torch.float32)
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("block_size", [4, 16, 48])
def test_attention_kernels_in_half_precision(block_size: int) -> None:
    """The interpreter has no products of bfloat16."""
    torch.manual_seed(4)
    batch = batch_of(SHAPES["prefill and decode mixed"], random.Random(6), block_size)
    result, expected = both(tiny_spec(), batch, torch.float16)
    assert result.dtype == torch.float16
    torch.testing.assert_close(result, expected, atol=4e-3, rtol=4e-3)


def near_a_border(chance: random.Random, size: int) -> int:
    return max(0, size * chance.randint(0, 3) + chance.randint(-2, 2))


def model_by_chance(chance: random.Random, seed: int) -> ModelSpec:
    """9 seeds have each pair of a group, a size of heads, a window, and an option (an orthogonal array)."""
    first, second = seed // 3 % 3, seed % 3
    option = (first + 2 * second) % 3
    group, kv_heads = (1, chance.randint(2, 7), 8)[first], chance.randint(1, 2)
    return tiny_spec(
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=(64, chance.choice([72, 96, 128]), chance.choice([192, 256]))[second],
        sliding_window=(None, chance.randint(1, 80), SPLIT + chance.choice([-1, 0, 1]))[(first + second) % 3],
        sinks=option == 1,
        window_chunks=option == 2,
        attention_cap=None if option == 1 else chance.choice([None, 2.5]),  # no family has sinks and a cap
    )


@pytest.mark.parametrize("seed", seeds(9, quick=1))
def test_attention_kernels_give_it_for_any_shapes(seed: int) -> None:
    """Rows 1 to 64, lengths around the borders of blocks and splits, and any model that the kernels run."""
    chance = random.Random(f"shapes {seed}")
    torch.manual_seed(seed)
    spec = model_by_chance(chance, seed)
    rows = chance.choice([1, chance.randint(2, 9), chance.randint(10, 63), 64])
    starts = [near_a_border(chance, chance.choice([16, 16, 64, SPLIT])) for _ in range(rows)]
    shapes = [(start, chance.choice([1, 1, 1, 1, 2, near_a_border(chance, 16) or 1])) for start in starts]
    batch = batch_of(shapes, chance, chance.choice([4, 16, 16, 48]))
    result, expected = both(spec, batch, torch.float32, float8=chance.random() < 0.3)
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("model", ["two heads per key head", "a window below a block", "sinks"])
def test_attention_bits_do_not_depend_on_the_batch(model: str) -> None:
    torch.manual_seed(7)
    spec = tiny_spec(**MODELS[model])
    batch = batch_of([(2 * SPLIT + 3, 1), (0, 40), (17, 1), (SPLIT - 5, 30)], random.Random(8))
    cache, _ = caches(spec, batch, torch.float32)
    q = torch.randn(batch.size, spec.heads, spec.head_dim, device=DEVICE)
    sinks = torch.randn(spec.heads, device=DEVICE) if spec.sinks else None
    together = attention(spec, q, cache, batch, sinks)
    for row, start, stop in zip(batch.rows, batch.starts, batch.starts[1:], strict=False):
        single = Batch([row], batch.block_size, DEVICE)
        result = attention(spec, q[start:stop].clone(), cache, single, sinks)
        assert torch.equal(result, together[start:stop])


def attention(spec: ModelSpec, q: Tensor, cache: KVCache, batch: Batch, sinks: Tensor | None) -> Tensor:
    ops = AcceleratorOps(spec)
    ops.begin(batch)
    return ops.attention(q, cache, 1, batch, spec.sliding_window, sinks)


@pytest.mark.parametrize(
    "model", ["two heads per key head", "a window over splits", "chunked windows", "sinks"]
)
@pytest.mark.parametrize("programs", [1, 3, 50])
def test_attention_of_static_rows_has_the_same_bits(model: str, programs: int) -> None:
    """The device makes the plan, in which rows without a token have no splits, and programs share splits."""
    torch.manual_seed(9)
    spec = tiny_spec(**MODELS[model])
    batch = batch_of([(2 * SPLIT + 3, 1), (0, 1), (SPLIT, 1), (17, 1), (SPLIT - 1, 1)], random.Random(9))
    cache, _ = caches(spec, batch, torch.float32)
    q = torch.randn(7, spec.heads, spec.head_dim, device=DEVICE)
    sinks = torch.randn(spec.heads, device=DEVICE) if spec.sinks else None
    static = StaticBatch(7, 40, 5 * SPLIT, batch.block_size, DEVICE)
    static.load(batch.values, batch.tables)
    work = plan_on_device(static, spec, spec.sliding_window)._replace(programs=programs)
    result = launch(q, cache, 1, static, work, spec.sliding_window, sinks, spec)
    assert torch.equal(result[:5], attention(spec, q[:5], cache, batch, sinks))
    assert not result[5:].any()


@pytest.mark.parametrize(
    "model", ["two heads per key head", "a window over splits", "chunked windows", "sinks"]
)
def test_attention_in_large_tiles_gives_the_plain_result(model: str) -> None:
    """Rows from the first token on, deep in the context, and over several tiles, masked and not."""
    torch.manual_seed(11)
    spec = tiny_spec(heads=4, kv_heads=2, **MODELS[model] | {"head_dim": 128})
    batch = batch_of([(0, 40), (LARGE_TILE_ROWS - 1, 70), (300, 130)], random.Random(11))
    clean, stale = caches(spec, batch, torch.float32)
    q = torch.randn(batch.size, spec.heads, spec.head_dim, device=DEVICE)
    sinks = torch.randn(spec.heads, device=DEVICE) if spec.sinks else None
    work = plan(batch, spec, spec.sliding_window, tile_rows=LARGE_TILE_ROWS)
    result = launch(q, stale, 1, batch, work, spec.sliding_window, sinks, spec)
    expected = PlainOps(spec)
    expected.begin(batch)
    torch.testing.assert_close(
        result, expected.attention(q, clean, 1, batch, spec.sliding_window, sinks), atol=2e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "itemsize", "shared_memory", "large"),
    [
        pytest.param({"head_dim": 128}, 2, 227 * 1024, True, id="hopper"),
        pytest.param({"head_dim": 128}, 4, 227 * 1024, False, id="float32 takes twice the memory"),
        pytest.param({"head_dim": 256}, 2, 227 * 1024, False, id="so do wide heads"),
        pytest.param({"head_dim": 128}, 2, 163 * 1024, False, id="ampere"),
        pytest.param({"head_dim": 128}, 2, 0, False, id="not known"),
        pytest.param(
            {"heads": 200, "kv_heads": 1, "head_dim": 80}, 2, 227 * 1024, False, id="one token is larger"
        ),
    ],
)
def test_tiles_are_as_large_as_the_shared_memory_allows(
    changes: dict[str, Any], itemsize: int, shared_memory: int, large: bool
) -> None:
    rows = tile_rows(tiny_spec(**changes), itemsize, shared_memory)
    assert rows == (LARGE_TILE_ROWS if large else TILE_ROWS)


def test_static_rows_without_a_token_store_nothing() -> None:
    spec = tiny_spec()
    batch = batch_of([(5, 1), (20, 1)], random.Random(10))
    width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    static = StaticBatch(4, 8, 100, batch.block_size, DEVICE)
    static.load(batch.values, batch.tables)
    caches_of = []
    for rows in (batch, static):
        cache, _ = caches(spec, batch, torch.float32)
        cache.kv.zero_()
        qkv = torch.arange(1, 1 + rows.size * width, device=DEVICE).view(rows.size, width) / 100
        AcceleratorOps(spec).rope_and_store(qkv, None, None, None, cache, 0, rows)
        caches_of.append(cache.kv)
    assert torch.equal(*caches_of)


@pytest.mark.parametrize("count", [20, 1])
def test_blocks_beyond_32_bits_are_stored_and_read(count: int) -> None:
    """Pools of GPUs have more numbers than 2**31. Only the used pages of this one are in memory."""
    spec = tiny_spec(layers=32, heads=8, kv_heads=8, head_dim=128)
    cache, ops = KVCache(spec, 2050, FLOAT8_CACHE, DEVICE), AcceleratorOps(spec)
    assert cache.kv.numel() > 2**31
    qkv = torch.randn(count, 3 * 8 * 128, device=DEVICE)
    results = []
    for blocks in ([1, 2], [2048, 2049]):
        batch = Batch([BatchRow([0] * count, 20 - count, blocks, 1)], cache.block_size, DEVICE)
        ops.begin(batch)
        q = ops.rope_and_store(qkv.clone(), None, None, None, cache, 31, batch)
        results.append(ops.attention(q, cache, 31, batch, None))
    assert torch.equal(*results)
    assert torch.equal(cache.kv[[1, 2], 31], cache.kv[[2048, 2049], 31])
    assert cache.kv[1:3, 31].any()
