"""The kernels of adapters against the plain operations."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton_engine.batch import Batch, BatchRow, StaticBatch
from baton_engine.model.lora import LowRank, low_rank_linears
from baton_engine.ops import LowRankLinear, Ops
from baton_engine.ops.accelerator import AcceleratorOps
from baton_engine.ops.kernels.adapter_table import COLUMNS, SLOTS
from baton_engine.ops.kernels.low_rank import (
    FEW_TOKENS,
    GATED_COLUMNS,
    MANY_TOKENS,
    PROGRAMS,
    ROW_SPLIT,
    SPLIT,
)
from baton_engine.ops.plain import PlainLinear, PlainOps
from baton_engine.spec import ModelSpec
from tests.engine.kernels.cases import DEVICE
from tests.engine.random_weights import tiny_spec
from tests.seeds import seeds

SPEC = tiny_spec(hidden=96, heads=4, kv_heads=2, head_dim=24, intermediate=COLUMNS + 36)
"""No size is a multiple of a tile's."""

WIDE = tiny_spec(hidden=SPLIT + 40, heads=2, kv_heads=1, head_dim=16, intermediate=48)
"""Inputs of several splits."""

SIZES = {"qkv": ("q", "k", "v"), "output": ("output",), "gate_up": ("gate", "up"), "down": ("down",)}


def adapter(spec: ModelSpec, ranks: Mapping[str, int], seed: int) -> tuple[Mapping[str, LowRankLinear], ...]:
    """Return an adapter of all layers, with a rank for each adapted projection."""
    generator = torch.Generator().manual_seed(seed)
    d = spec.head_dim
    sizes = {
        "q": (spec.hidden, spec.heads * d), "k": (spec.hidden, spec.kv_heads * d),
        "v": (spec.hidden, spec.kv_heads * d), "output": (spec.heads * d, spec.hidden),
        "gate": (spec.hidden, spec.intermediate), "up": (spec.hidden, spec.intermediate),
        "down": (spec.intermediate, spec.hidden),
    }  # fmt: skip

    def random_of(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[1])

    layer = {
        part: LowRank(random_of(rank, sizes[part][0]), random_of(sizes[part][1], rank))
        for part, rank in ranks.items()
    }
    return tuple(low_rank_linears(spec, layer, torch.float32, DEVICE) for _ in range(spec.layers))


ADAPTERS: tuple[Mapping[str, int], ...] = (
    {"q": 8, "k": 8, "v": 8, "output": 8, "gate": 8, "up": 8, "down": 8},
    {"v": 3, "down": 70},
    {"q": 1, "v": 20, "up": 5},
)
"""Ranks of the projections: of all, above what is computed at once, and with gaps."""


def inputs_of(spec: ModelSpec, linear: str) -> tuple[int, int]:
    d, n, f = spec.head_dim, spec.hidden, spec.intermediate
    return {
        "qkv": (n, (spec.heads + 2 * spec.kv_heads) * d),
        "output": (spec.heads * d, n),
        "gate_up": (n, 2 * f),
        "down": (f, n),
    }[linear]


def batch_with(adapters: list[Any], counts: list[int], wanted: list[int] | None = None) -> Batch:
    rows = [
        BatchRow([0] * count, 0, list(range(1, 2 + count // 16)), want, adapter=one)
        for one, count, want in zip(adapters, counts, wanted or counts, strict=True)
    ]
    return Batch(rows, 16, DEVICE)


def assert_same(
    spec: ModelSpec, chosen: list[int | None], counts: list[int], *, wanted: bool = False
) -> None:
    """Assert that kernels and plain operations add the same to each linear of the second layer."""
    layers = [adapter(spec, ranks, seed) for seed, ranks in enumerate(ADAPTERS)]
    wants = [min(count, 2) for count in counts] if wanted else counts
    rows = []
    for ops in (AcceleratorOps(spec), PlainOps(spec)):
        placed = [ops.place_adapter(one) for one in layers]
        batch = batch_with([None if one is None else placed[one] for one in chosen], counts, wants)
        rows.append(ops.adapted(batch, wanted=wanted))
    tokens = sum(wants)
    generator = torch.Generator().manual_seed(7)
    for linear in SIZES:
        inputs, outputs = inputs_of(spec, linear)
        x = torch.randn((tokens, inputs), generator=generator).to(DEVICE)
        result = torch.randn((tokens, outputs), generator=generator).to(DEVICE)
        ours, plain = (one.add(result.clone(), x, 1, linear) for one in rows if one is not None)
        torch.testing.assert_close(ours, plain, atol=2e-5, rtol=2e-5)
        if linear == "qkv":  # every adapter has a part of it
            assert not torch.equal(plain, result)
    x = torch.randn((tokens, spec.hidden), generator=generator).to(DEVICE)
    gate_up = torch.randn((tokens, 2 * spec.intermediate), generator=generator).to(DEVICE)
    down = PlainLinear(
        torch.randn((spec.hidden, spec.intermediate), generator=generator).to(DEVICE) / 9, None
    )
    ours, plain = (one.mlp(gate_up.clone(), x, 1, down) for one in rows if one is not None)
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("chosen", "counts"),
    [
        pytest.param([0, None, 1, 2, 1], [1] * 5, id="rows of one token"),
        pytest.param([0], [1], id="one row"),
        pytest.param([1, None, 0], [FEW_TOKENS + 5, 3, 1], id="a prompt beside rows"),
        pytest.param([2, 0], [MANY_TOKENS + 9, 2 * MANY_TOKENS], id="long prompts"),
    ],
)
def test_adapters_add_what_plain_operations_add(chosen: list[int | None], counts: list[int]) -> None:
    assert_same(SPEC, chosen, counts)


@pytest.mark.parametrize("counts", [[1, 4, 2], [1, 1, 1]], ids=["tiles", "rows of one token"])
def test_adapters_of_inputs_in_several_splits(counts: list[int]) -> None:
    assert_same(WIDE, [1, 0, None], counts)


@pytest.mark.slow
def test_adapters_of_inputs_that_are_not_divided() -> None:
    assert_same(WIDE, [0, 1] * (PROGRAMS // 2), [2] * PROGRAMS)


def test_only_wanted_tokens_are_adapted_in_the_last_layer() -> None:
    assert_same(SPEC, [1, None, 0], [9, 4, 1], wanted=True)


@pytest.mark.parametrize("seed", seeds(12, quick=1))
def test_adapters_of_any_batch(seed: int) -> None:
    chance = random.Random(seed)
    rows = chance.randint(1, 9)
    chosen = [chance.choice([None, 0, 1, 2]) for _ in range(rows)]
    chosen[0] = chosen[0] or 0
    assert_same(SPEC, chosen, [chance.choice([1, 1, 2, chance.randint(1, 90)]) for _ in range(rows)])


def test_batch_without_adapters_launches_nothing() -> None:
    ops: Ops = AcceleratorOps(SPEC)
    assert ops.adapted(batch_with([None, None], [1, 5]), wanted=False) is None


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_mlp_of_captured_rows_equals_plain_operations(activation: Any) -> None:
    """Of inputs and results of several programs; one row has no adapter, and the last one no token."""
    sizes = {"hidden": ROW_SPLIT + 8, "intermediate": GATED_COLUMNS + 36}
    spec = tiny_spec(heads=2, kv_heads=1, head_dim=16, activation=activation, **sizes)
    layers = [adapter(spec, ranks, seed) for seed, ranks in enumerate(ADAPTERS)]
    chosen = [2, None, 0, 1]
    kernels, plain = AcceleratorOps(spec), PlainOps(spec)
    rows = []
    for ops in (kernels, plain):
        placed = [ops.place_adapter(one) for one in layers]
        rows.append(batch_with([None if one is None else placed[one] for one in chosen], [1] * 4))
    static = StaticBatch(5, 4, 256, 16, DEVICE, adapter_rank=70)
    static.load(rows[0].values, rows[0].token_tables, adapters=rows[0].token_adapters)
    ours, theirs = kernels.adapted(static, wanted=False), plain.adapted(rows[1], wanted=False)
    assert ours is not None and theirs is not None
    generator = torch.Generator().manual_seed(3)
    x, gate_up, weight = (
        torch.randn(shape, generator=generator).to(DEVICE) / 9
        for shape in ((5, spec.hidden), (5, 2 * spec.intermediate), (spec.hidden, spec.intermediate))
    )
    result = ours.mlp(gate_up.clone(), x, 1, PlainLinear(weight, None))
    expected = theirs.mlp(gate_up[:4].clone(), x[:4], 1, PlainLinear(weight, None))
    torch.testing.assert_close(result[:4], expected, atol=2e-5, rtol=2e-5)
    without = plain.gated(gate_up) @ weight.T
    torch.testing.assert_close(result[[1, 4]], without[[1, 4]], atol=2e-5, rtol=2e-5)


def test_static_rows_have_the_adapters_that_are_loaded_into_them() -> None:
    """The same tensors serve other adapters after the next load; rows without one keep their results."""
    ops = AcceleratorOps(SPEC)
    placed = [ops.place_adapter(adapter(SPEC, ranks, seed)) for seed, ranks in enumerate(ADAPTERS)]
    static = StaticBatch(4, 4, 256, 16, DEVICE, adapter_rank=70)
    inputs, outputs = inputs_of(SPEC, "down")
    x = torch.randn(4, inputs, device=DEVICE)
    for chosen in ([0, None, 1], [None, 1, 0]):
        batch = batch_with([None if one is None else placed[one] for one in chosen], [1] * 3)
        assert static.fits(batch)
        static.load(batch.values, batch.token_tables, adapters=batch.token_adapters)
        ours, theirs = ops.adapted(static, wanted=False), ops.adapted(batch, wanted=False)
        assert ours is not None and theirs is not None
        result = ours.add(torch.zeros(4, outputs, device=DEVICE), x, 0, "down")
        expected = theirs.add(torch.zeros(3, outputs, device=DEVICE), x[:3], 0, "down")
        torch.testing.assert_close(result[:3], expected)
        assert not result[3].any()
        assert [bool(row.any()) for row in result[:3]] == [one is not None for one in chosen]
    assert not static.fits(batch_with([None], [1]))
    assert not StaticBatch(4, 4, 256, 16, DEVICE).fits(batch_with([placed[0]], [1]))


def test_slots_are_used_again_when_no_request_has_their_adapter() -> None:
    ops = AcceleratorOps(SPEC)
    layers = adapter(SPEC, {"v": 2}, 1)
    placed = [ops.place_adapter(layers) for _ in range(SLOTS)]
    with pytest.raises(MemoryError, match=f"{SLOTS} adapters are loaded or still used by requests"):
        ops.place_adapter(layers)
    slot = placed.pop(5).slot
    gc.collect()
    assert ops.place_adapter(layers).slot == slot
    assert np.unique([one.slot for one in placed]).size == SLOTS - 1
