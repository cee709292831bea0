"""The kernels of latent attention against the plain operations."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from baton_engine.batch import Batch, BatchRow, StaticBatch
from baton_engine.kv.cache import FLOAT8_CACHE, KVCache
from baton_engine.model.head_loading import WHOLE
from baton_engine.model.rope import Rotary
from baton_engine.ops.accelerator import AcceleratorOps
from baton_engine.ops.kernels import latent
from baton_engine.ops.kernels.plans import SPLIT, plan_on_device, split_of
from baton_engine.ops.plain import PlainOps
from baton_engine.spec import LatentSpec, ModelSpec
from tests.engine.kernels.cases import DEVICE, batch_of, caches, crossed, guarded
from tests.engine.kernels.test_attention_kernels import SHAPES
from tests.engine.random_weights import tiny_spec
from tests.seeds import seeds

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of numpy


def latent_spec(
    heads: int = 4, rank: int = 28, rotated: int = 8, plain: int = 12, value: int = 10
) -> ModelSpec:
    return tiny_spec(
        heads=heads,
        kv_heads=1,
        head_dim=rank + rotated,
        rotary_dim=rotated,
        attention_scale=(plain + rotated) ** -0.5,
        latent=LatentSpec(q_rank=0, kv_rank=rank, plain=plain, value=value),
    )


MODELS = {
    "four heads": latent_spec(),
    "as many heads as a tile of a token has": latent_spec(16, 32, 16),
    "heads in two tiles of 16": latent_spec(17, 33, 6),
    "heads in two tiles of 32": latent_spec(35),
    "all but the first token, as a draft head": replace(
        latent_spec(), sliding_window=WHOLE, window_rest=True
    ),
    "a window over splits": replace(latent_spec(), sliding_window=SPLIT + 30),
    "the sizes of DeepSeek-V2-Lite": latent_spec(16, 512, 64),
}


def both(spec: ModelSpec, batch: Batch, dtype: torch.dtype, float8: bool = False) -> tuple[Tensor, Tensor]:
    """Attention by the kernels, over a cache with NaN behind the rows, and by the plain operations."""
    clean, stale = caches(spec, batch, dtype)
    if float8:
        octets = KVCache(spec, clean.blocks, FLOAT8_CACHE, DEVICE, batch.block_size)
        octets.kv = stale.kv.to(torch.float8_e4m3fn).view(torch.uint8)
        clean.kv = clean.kv.to(torch.float8_e4m3fn).to(dtype)
        stale = octets
    q = guarded(torch.randn(batch.size, spec.heads, spec.head_dim, dtype=dtype, device=DEVICE))
    results = [
        attention(ops, q, cache, batch)
        for ops, cache in ((AcceleratorOps(spec), stale), (PlainOps(spec), clean))
    ]
    return results[0], results[1]


def attention(ops: PlainOps, q: Tensor, cache: KVCache, batch: Batch) -> Tensor:
    ops.begin(batch)
    return ops.attention(q, cache, 1, batch, ops.spec.sliding_window)


@pytest.mark.parametrize(("shapes", "model"), crossed(SHAPES, MODELS, quick="four heads"))
def test_latent_kernels_give_the_plain_result(shapes: str, model: str) -> None:
    torch.manual_seed(3)
    result, expected = both(MODELS[model], batch_of(SHAPES[shapes], random.Random(5)), torch.float32)
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("block_size", [4, 16, 48])
def test_latent_kernels_in_half_precision(block_size: int) -> None:
    """The interpreter has no products of bfloat16."""
    torch.manual_seed(4)
    batch = batch_of(SHAPES["prefill and decode mixed"], random.Random(6), block_size)
    result, expected = both(MODELS["heads in two tiles of 32"], batch, torch.float16)
    assert result.dtype == torch.float16
    torch.testing.assert_close(result, expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_latent_attention_over_float8_is_that_over_its_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    batch = batch_of(SHAPES["prefill and decode mixed"], random.Random(5))
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    result, expected = both(MODELS["four heads"], batch, dtype, float8=True)
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("seed", seeds(6, quick=1))
def test_latent_kernels_give_it_for_any_shapes(seed: int) -> None:
    """Lengths around the borders of blocks and splits, and any sizes."""
    chance = random.Random(f"latents {seed}")
    torch.manual_seed(seed)
    heads = chance.choice([1, chance.randint(2, 9), 17, 35])
    spec = latent_spec(heads, chance.choice([5, 16, 31, 32, 96]), 2 * chance.randint(1, 16))
    borders = (0, 15, 16, 64, SPLIT - 1, SPLIT, 2 * SPLIT + 5)
    starts = [chance.choice(borders) for _ in range(chance.randint(1, 4))]
    shapes = [(start, chance.choice([1, 1, 1, 2, chance.randint(3, 40)])) for start in starts]
    batch = batch_of(shapes, chance, chance.choice([4, 16, 48]))
    result, expected = both(spec, batch, torch.float32, float8=chance.random() < 0.3)
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("shared", [0, 99 * 1024, 227 * 1024])
def test_latent_kernels_give_it_in_the_tiles_of_any_device(shared: int) -> None:
    torch.manual_seed(6)
    spec = MODELS["heads in two tiles of 32"]
    batch = batch_of([(130, 1), (70, 3), (0, 40)], random.Random(6))
    clean, stale = caches(spec, batch, torch.float16)
    q = torch.randn(batch.size, spec.heads, spec.head_dim, dtype=torch.float16, device=DEVICE)
    result = attention(AcceleratorOps(spec, shared), q, stale, batch)
    torch.testing.assert_close(result, attention(PlainOps(spec), q, clean, batch), atol=4e-3, rtol=4e-3)


def test_latent_attention_bits_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(7)
    spec = MODELS["four heads"]
    batch = batch_of([(2 * SPLIT + 3, 1), (0, 40), (17, 1), (SPLIT - 5, 30)], random.Random(8))
    cache, _ = caches(spec, batch, torch.float32)
    q = torch.randn(batch.size, spec.heads, spec.head_dim, device=DEVICE)
    together = attention(AcceleratorOps(spec), q, cache, batch)
    for row, start, stop in zip(batch.rows, batch.starts, batch.starts[1:], strict=False):
        single = Batch([row], batch.block_size, DEVICE)
        assert torch.equal(
            attention(AcceleratorOps(spec), q[start:stop].clone(), cache, single), together[start:stop]
        )


def test_latent_attention_bits_do_not_depend_on_the_chunks_of_a_prompt() -> None:
    rows = np.random.default_rng(7).standard_normal((16, 64), np.float32)
    if DEVICE.type == "cpu" and not np.array_equal((rows[::-1] @ rows.T)[::-1], rows @ rows.T):
        pytest.skip("numpy's products of the interpreter depend on a row's place, with this processor's BLAS")
    torch.manual_seed(7)
    spec = MODELS["four heads"]
    batch = batch_of([(0, 40)], random.Random(8))
    cache, _ = caches(spec, batch, torch.float32)
    q = torch.randn(batch.size, spec.heads, spec.head_dim, device=DEVICE)
    whole, (row,) = attention(AcceleratorOps(spec), q, cache, batch), batch.rows
    for first, stop in ((0, 7), (7, 24), (24, 40)):
        chunk = Batch([BatchRow(row.tokens[first:stop], first, row.blocks, 1)], batch.block_size, DEVICE)
        result = attention(AcceleratorOps(spec), q[first:stop].clone(), cache, chunk)
        assert torch.equal(result, whole[first:stop])


@pytest.mark.parametrize(
    ("model", "programs"),
    [
        ("four heads", 1),
        ("all but the first token, as a draft head", 50),
        ("heads in two tiles of 16", 3),
    ],
)
def test_latent_attention_of_static_rows_has_the_same_bits(model: str, programs: int) -> None:
    """The device makes the plan, in which rows without a token have no splits, and programs share splits."""
    torch.manual_seed(9)
    spec = MODELS[model]
    batch = batch_of([(2 * SPLIT + 3, 1), (0, 1), (SPLIT, 1), (17, 1), (SPLIT - 1, 1)], random.Random(9))
    cache, _ = caches(spec, batch, torch.float32)
    q = torch.randn(7, spec.heads, spec.head_dim, device=DEVICE)
    static = StaticBatch(7, 40, 5 * SPLIT, batch.block_size, DEVICE)
    static.load(batch.values, batch.tables)
    window = spec.sliding_window
    work = plan_on_device(static, spec, window)._replace(programs=programs)
    result = latent.attention(q, cache, 1, static, work, window, spec, 0)
    assert torch.equal(result[:5], attention(AcceleratorOps(spec), q[:5], cache, batch))
    assert not result[5:].any()


def test_splits_of_latents_grow_with_the_heads() -> None:
    """The sums of a split are at most a quarter of the bytes of its latents, whatever the heads."""
    sizes = {heads: split_of(latent_spec(heads, 512, 64)) for heads in (16, 32, 40, 63, 64, 128)}
    assert sizes == {16: 256, 32: 256, 40: 512, 63: 512, 64: 512, 128: 1024}
    assert all(heads * 512 * 4 / (split * 576 * 2) < 0.25 for heads, split in sizes.items())


def test_tiles_on_amd_are_the_smallest_whatever_the_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """gfx950 has 160 KiB of it, but larger tiles spill registers there."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for (kind, rows), shapes in latent.SHAPES.items():
        assert latent.shape_of(kind, rows, 160 * 1024) == shapes[-1][1]


# --- Storage ---


def stored(spec: ModelSpec, dtype: torch.dtype, block_size: int = 16, float8: bool = False) -> None:
    """Assert that kernels and plain operations give the same queries and write the same slots."""
    torch.manual_seed(2)
    assert spec.latent is not None
    batch = batch_of([(0, 1), (15, 1), (16, 3), (40, 21)], random.Random(2), block_size)
    plain, rank, width = spec.latent.plain, spec.latent.kv_rank, spec.latent.plain + spec.rotated
    # Queries and latents are columns of one product, as without a latent of queries.
    projected = guarded(torch.randn(batch.size, spec.heads * width + spec.head_dim, device=DEVICE).to(dtype))
    q, latents = projected[:, : -spec.head_dim], projected[:, -spec.head_dim :]
    keys, norm = (
        guarded(torch.randn(*shape, device=DEVICE).to(dtype))
        for shape in ((spec.heads, plain, rank), (rank,))
    )
    cos, sin = Rotary.of_layers(spec, DEVICE)["full"].at(batch.positions)
    results = []
    for ops, kept in ((AcceleratorOps(spec), FLOAT8_CACHE if float8 else dtype), (PlainOps(spec), dtype)):
        cache = KVCache(spec, 1 + max(max(row.blocks) for row in batch.rows), kept, DEVICE, block_size)
        cache.kv.fill_(0x7F if kept == FLOAT8_CACHE else torch.nan)
        ops.begin(batch)
        heads = q.view(batch.size, spec.heads, width)
        queries = ops.store_latents(heads, latents, (guarded(cos), guarded(sin)), norm, keys, cache, 1, batch)
        results.append((queries, cache.kv))
    (queries, kv), (expected_queries, expected_kv) = results
    if float8:
        kv, expected_kv = kv.view(torch.float8_e4m3fn).float(), expected_kv.to(torch.float8_e4m3fn).float()
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3}[dtype]
    assert torch.equal(kv.isnan(), expected_kv.isnan())
    coarse = 0.13 if float8 else tolerance  # neighbours in float8
    torch.testing.assert_close(kv.nan_to_num(), expected_kv.nan_to_num(), rtol=coarse, atol=tolerance)
    torch.testing.assert_close(queries, expected_queries, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("model", MODELS)
def test_latents_are_stored_as_by_plain_operations(model: str) -> None:
    stored(MODELS[model], torch.float32)


@pytest.mark.parametrize("block_size", [1, 4, 48])
def test_latents_are_stored_in_blocks_of_any_size(block_size: int) -> None:
    stored(MODELS["four heads"], torch.float16, block_size)


def test_latents_are_stored_in_float8() -> None:
    stored(MODELS["four heads"], torch.float32, float8=True)


def test_static_rows_without_a_token_store_no_latents() -> None:
    spec = MODELS["four heads"]
    batch = batch_of([(5, 1), (20, 1)], random.Random(10))
    static = StaticBatch(4, 8, 100, batch.block_size, DEVICE)
    static.load(batch.values, batch.tables)
    generator = torch.Generator().manual_seed(10)
    q, latents, keys = (
        torch.randn(shape, generator=generator).to(DEVICE) for shape in ((4, 4, 20), (4, 36), (4, 12, 28))
    )
    kept = []
    for rows in (batch, static):
        cache = KVCache(spec, 1 + max(max(row.blocks) for row in batch.rows), torch.float32, DEVICE)
        rotation = Rotary.of_layers(spec, DEVICE)["full"].at(rows.positions)
        AcceleratorOps(spec).store_latents(
            q[: rows.size],
            latents[: rows.size],
            rotation,
            torch.ones(28, device=DEVICE),
            keys,
            cache,
            1,
            rows,
        )
        kept.append(cache.kv)
    assert torch.equal(*kept)


@pytest.mark.parametrize("count", [20, 1])
def test_latents_beyond_32_bits_are_stored_and_read(count: int) -> None:
    """Only the used pages of this pool are in memory."""
    spec = latent_spec(4, 512, 64)
    cache, ops = KVCache(spec, 130_000, FLOAT8_CACHE, DEVICE), AcceleratorOps(spec)
    assert cache.kv.numel() > 2**31
    q, latents = torch.randn(count, 4, 76, device=DEVICE), torch.randn(count, 576, device=DEVICE)
    keys, norm = torch.randn(4, 12, 512, device=DEVICE), torch.ones(512, device=DEVICE)
    results = []
    for blocks in ([1, 2], [129_000, 129_001]):
        batch = Batch([BatchRow([0] * count, 20 - count, blocks, 1)], cache.block_size, DEVICE)
        ops.begin(batch)
        rotation = Rotary.of_layers(spec, DEVICE)["full"].at(batch.positions)
        queries = ops.store_latents(q, latents, rotation, norm, keys, cache, 1, batch)
        results.append(ops.attention(queries, cache, 1, batch, None))
    assert torch.equal(*results)
    assert torch.equal(cache.kv[[1, 2], 1], cache.kv[[129_000, 129_001], 1])
    assert cache.kv[1:3, 1].any()


# --- Memory ---


class _Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of all results that are not views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.bytes += result.nbytes
        return result


def allocated(ops: PlainOps, start: int) -> int:
    """Return the bytes that attention of a chunk allocates behind a context of `start` tokens."""
    spec = ops.spec
    batch = Batch([BatchRow([0] * 8, start, [1] * -(-(start + 8) // 16), 1)], 16, DEVICE)
    cache = KVCache(spec, 2, torch.float32, DEVICE)
    q = torch.randn(batch.size, spec.heads, spec.head_dim, device=DEVICE)
    with _Allocated() as mode:
        attention(ops, q, cache, batch)
    return int(mode.bytes)


def test_latent_kernels_do_not_gather_the_context_of_a_prompt() -> None:
    """Plain operations do. So the pass that measures a worker's memory could need more than there is."""
    spec = MODELS["four heads"]
    grown = [allocated(ops, 1600) - allocated(ops, 160) for ops in (AcceleratorOps(spec), PlainOps(spec))]
    assert grown[1] >= (1600 - 160) * spec.head_dim * 4
    assert grown[0] <= 4 * (1600 - 160) // 16 * 4  # block ids, and their copies
