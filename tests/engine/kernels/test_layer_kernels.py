"""
The kernels of norms, activations, rotation and storage of keys against the plain operations.

All values have NaN before and behind them, which spoils the result of a kernel that reads too much.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from baton_engine.model.rope import Rotary
from baton_engine.ops.accelerator import AcceleratorOps
from baton_engine.ops.plain import PlainOps
from baton_engine.spec import ModelSpec
from tests.engine.kernels.cases import DEVICE, batch_of, caches, guarded
from tests.engine.random_weights import tiny_spec
from tests.seeds import seeds

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative: twice the distance of two numbers. The interpreter truncates to bfloat16, devices round."""

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of numpy

ACTIVATIONS = ("silu", "gelu_tanh")

DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def random_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return guarded(torch.randn(shape, device=DEVICE).to(dtype))


def assert_near(result: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 2048), (7, 64), (64, 100)])
def test_norm_kernels_give_the_plain_result(rows: int, size: int, dtype: torch.dtype) -> None:
    norms(rows, size, dtype)


def norms(rows: int, size: int, dtype: torch.dtype) -> None:
    """Assert that kernels and plain operations give the same norms."""
    torch.manual_seed(rows)
    spec = tiny_spec()
    x, residual, weight = (random_of(*shape, dtype=dtype) for shape in ((rows, size), (rows, size), (size,)))
    ours, plain = AcceleratorOps(spec), PlainOps(spec)
    assert_near(ours.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5))
    expected, expected_sum = plain.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    result, result_sum = ours.add_rms_norm(guarded(x), guarded(residual), weight, 1e-5)
    assert_near(result, expected)
    assert_near(result_sum, expected_sum)


@pytest.mark.parametrize("seed", seeds(8, quick=1))
def test_norm_and_activation_of_any_shape(seed: int) -> None:
    chance = random.Random(seed)
    rows, dtype = chance.randint(1, 64), chance.choice(list(TOLERANCE))
    norms(rows, chance.choice([chance.randint(1, 3000), 1024, 1025]), dtype)
    gates(rows, chance.choice([chance.randint(1, 3000), 1024, 1025]), chance.choice(ACTIVATIONS), dtype)


def test_norm_kernel_takes_a_part_of_wider_rows() -> None:
    """Latent attention normalizes columns of a product, with weights of another dtype."""
    torch.manual_seed(1)
    x, weight = torch.full((5, 48), torch.nan, dtype=torch.bfloat16, device=DEVICE)[:, 8:40], random_of(32)
    x.copy_(random_of(5, 32))
    spec = tiny_spec()
    assert_near(AcceleratorOps(spec).rms_norm(x, weight, 1e-6), PlainOps(spec).rms_norm(x, weight, 1e-6))


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (7, 1, 24), (9, 3, 128)])
def test_joint_norm_kernels_give_the_plain_result(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    """Also if the means are not of these heads alone. Values are left as they are."""
    torch.manual_seed(heads)
    spec = tiny_spec(heads=heads, kv_heads=kv_heads, head_dim=dim, qk_norm=True, qk_norm_joint=True)
    qkv = random_of(5, (heads + 2 * kv_heads) * dim, dtype=dtype)
    weights = [random_of(count * dim, dtype=dtype) for count in (heads, kv_heads)]
    queries, keys, values = torch.split(qkv, [heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    for ops in (AcceleratorOps(spec), PlainOps(spec)):
        means = ops.mean_squares(qkv)
        assert means.dtype is torch.float32
        expected = torch.stack([part.float().square().mean(-1) for part in (queries, keys)], dim=-1)
        torch.testing.assert_close(means, expected, rtol=2e-6, atol=0)
        for factor in (1, 4):
            normed = guarded(qkv)
            ops.norm_jointly(normed, means * factor, *weights)
            whole = [
                functional.rms_norm(part.float(), part.shape[-1:], None, spec.norm_epsilon / factor) * weight
                for part, weight in zip((queries, keys), weights, strict=True)
            ]
            assert_near(normed, torch.cat([*(part / factor**0.5 for part in whole), values], -1).to(dtype))


@DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (64, 33), (2, 2500)])
def test_activation_kernel_gives_the_plain_result(
    rows: int, size: int, activation: str, dtype: torch.dtype
) -> None:
    gates(rows, size, activation, dtype)


def gates(rows: int, size: int, activation: str, dtype: torch.dtype) -> None:
    """Assert that the kernel and plain operations give the same activations."""
    torch.manual_seed(size)
    spec = tiny_spec(activation=activation)
    gate_up = random_of(rows, 2 * size, dtype=dtype).mul_(4)
    assert_near(AcceleratorOps(spec).gated(gate_up), PlainOps(spec).gated(gate_up))


def test_activation_kernel_is_finite_for_large_values() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -90.0, 90.0, 1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    for activation in ACTIVATIONS:
        spec = tiny_spec(activation=activation)
        assert_near(AcceleratorOps(spec).gated(gate_up), PlainOps(spec).gated(gate_up))


MODELS: dict[str, dict[str, Any]] = {
    "rotation alone": {},
    "norms of heads": {"qk_norm": True},
    "a part of a head is rotated": {"rotary_dim": 10, "qk_norm": True},
    "no rotation": {"unrotated_layers": (True, True)},
    "no rotation, but a temperature": {"unrotated_layers": (True, True), "temperature": (0.1, 8)},
    "a norm after the rotation": {"qk_norm_after": True},
    "three heads per key head": {"heads": 6},
    "one key head": {"heads": 7, "kv_heads": 1, "head_dim": 64},
    "heads of 80 dimensions": {"head_dim": 80, "qk_norm": True},
    "heads of 256 dimensions": {"heads": 1, "kv_heads": 1, "head_dim": 256},
}


def stored(spec: ModelSpec, seed: int, dtype: torch.dtype, block_size: int = 16) -> None:
    """Assert that kernels and plain operations give the same queries and write the same slots."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    shapes = [(0, 1), (15, 1), (16, 3), (chance.randrange(90), chance.randint(1, 40))]
    batch = batch_of(shapes, chance, block_size)
    qkv = random_of(batch.size, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, dtype=dtype)
    norms = [random_of(spec.head_dim, dtype=dtype) if spec.qk_norm else None for _ in range(2)]
    cos, sin = Rotary.of_layers(spec, DEVICE)["full"].at(batch.positions)
    rotation = guarded(cos), guarded(sin)
    results = []
    for ops in (AcceleratorOps(spec), PlainOps(spec)):
        _, cache = caches(spec, batch, dtype)
        cache.kv.fill_(torch.nan)
        ops.begin(batch)
        turning = None if spec.rotation(1) == "none" else rotation
        q = ops.rope_and_store(guarded(qkv), turning, norms[0], norms[1], cache, 1, batch)
        results.append((q, cache.kv))
    (q, kv), (expected_q, expected_kv) = results
    assert_near(q, expected_q)
    assert torch.equal(kv.isnan(), expected_kv.isnan())
    assert_near(kv.nan_to_num(), expected_kv.nan_to_num())


STORED = [
    pytest.param(
        model,
        dtype,
        id=f"{model}, {dtype}",
        marks=() if dtype is torch.bfloat16 or model == "norms of heads" else pytest.mark.slow,
    )
    for model, dtype in itertools.product(MODELS, TOLERANCE)
]
"""The interpreter takes long. Each model in `make test` has the dtype that most checkpoints have."""


@pytest.mark.parametrize(("model", "dtype"), STORED)
def test_storing_kernel_gives_the_plain_result(model: str, dtype: torch.dtype) -> None:
    stored(tiny_spec(**MODELS[model]), 2, dtype)


@pytest.mark.parametrize("block_size", [1, 4, 48])
def test_storing_kernel_writes_blocks_of_any_size(block_size: int) -> None:
    stored(tiny_spec(), 3, torch.float32, block_size)


@pytest.mark.parametrize("seed", seeds(10, quick=1))
def test_storing_kernel_gives_it_for_any_heads(seed: int) -> None:
    chance = random.Random(seed)
    kv_heads, dim = chance.randint(1, 4), chance.choice([64, 72, 128, 192, 256])
    spec = tiny_spec(
        heads=kv_heads * chance.randint(1, 8),
        kv_heads=kv_heads,
        head_dim=dim,
        rotary_dim=chance.choice([0, dim // 2]),
        qk_norm=chance.random() < 0.5,
        qk_norm_after=chance.random() < 0.2,
    )
    stored(spec, seed, torch.float32)
