"""The kernels of experts against the plain operations. All values have NaN before and behind them."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from baton_engine.ops.accelerator import AcceleratorOps
from baton_engine.ops.kernels.experts import FEW_PAIRS
from baton_engine.ops.plain import PlainOps
from tests.engine.kernels.cases import DEVICE, guarded
from tests.engine.kernels.test_quantized_kernels import MATRICES, MEMORY
from tests.engine.random_weights import tiny_spec
from tests.seeds import seeds

OURS, PLAIN = AcceleratorOps(tiny_spec(), MEMORY), PlainOps(tiny_spec())

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
"""The interpreter has no products of bfloat16."""

QUANTIZED = ("Q8_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K", "MXFP4", "INT4 in groups of 64", "FP8 in groups of 48")


def random_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return guarded(torch.randn(shape, device=DEVICE).to(dtype))


def chosen_of(tokens: int, count: int, chosen: int) -> Tensor:
    """Return different experts for each token, of which some are chosen often and some never."""
    scores = torch.randn(tokens, count, device=DEVICE) + torch.linspace(0, 3, count, device=DEVICE)
    return scores.topk(chosen, dim=-1).indices


@pytest.mark.parametrize(
    ("tokens", "count", "chosen"), [(1, 1, 1), (1, 8, 2), (3, 4, 4), (200, 6, 3), (700, 5, 3)]
)
def test_pairs_are_grouped_as_by_plain_operations(tokens: int, count: int, chosen: int) -> None:
    """The last case has more pairs than a program compares at a time."""
    torch.manual_seed(tokens)
    numbers = chosen_of(tokens, count, chosen)
    ours, plain = (ops.group_by_expert(numbers, count) for ops in (OURS, PLAIN))
    assert ours.order.tolist() == plain.order.tolist()
    assert ours.starts.tolist() == plain.starts.tolist()
    assert plain.starts[-1] == tokens * chosen


def products(seed: int) -> None:
    """Assert that the kernels and plain operations give the same products and sums."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    tokens, count = chance.choice([1, 2, chance.randint(3, 90)]), chance.randint(1, 6)
    chosen = chance.randint(1, count)
    inputs, outputs = (
        chance.choice([16, 64, chance.randint(1, 150)]),
        chance.choice([64, chance.randint(1, 150)]),
    )
    dtype, biased, of_pairs = chance.choice(list(TOLERANCE)), chance.random() < 0.5, chance.random() < 0.3
    weights = random_of(count, outputs, inputs, dtype=dtype)
    biases = random_of(count, outputs, dtype=dtype) if biased else None
    x = random_of(tokens * chosen if of_pairs else tokens, inputs, dtype=dtype)
    numbers = chosen_of(tokens, count, chosen)
    shares = None if of_pairs else random_of(tokens, chosen)
    results = []
    for ops in (OURS, PLAIN):
        result = ops.prepare_experts(weights, biases, count)(x, ops.group_by_expert(numbers, count))
        results.append((result, ops.sum_experts(result.view(tokens, chosen, outputs), shares)))
    tolerance = TOLERANCE[dtype] * inputs**0.5
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("seed", seeds(24, quick=6))
def test_expert_products_of_any_shape(seed: int) -> None:
    products(seed)


@pytest.mark.parametrize("biased", [False, True])
def test_many_pairs_of_each_expert_are_multiplied_in_high_tiles(biased: bool) -> None:
    torch.manual_seed(8)
    weights, x = random_of(2, 70, 40, dtype=torch.float16), random_of(90, 40, dtype=torch.float16)
    biases = random_of(2, 70, dtype=torch.float16) if biased else None
    chosen = chosen_of(90, 2, 1)
    assert len(x) > FEW_PAIRS * 2
    ours, plain = (
        ops.prepare_experts(weights, biases, 2)(x, ops.group_by_expert(chosen, 2)) for ops in (OURS, PLAIN)
    )
    torch.testing.assert_close(ours, plain, atol=2e-2, rtol=4e-3)


def test_expert_product_of_a_row_is_the_same_in_any_batch() -> None:
    """Sums of small integers are exact, so the interpreter's order of additions does not matter."""
    torch.manual_seed(3)
    weights, x = (
        guarded(torch.randint(-8, 8, shape, device=DEVICE).float()) for shape in ((4, 70, 90), (80, 90))
    )
    numbers = chosen_of(80, 4, 2)
    linear = OURS.prepare_experts(weights, None, 4)
    whole = linear(x, OURS.group_by_expert(numbers, 4)).view(80, 2, -1)
    for rows in (slice(0, 1), slice(7, 10), slice(40, 77)):
        rows_only = linear(x[rows], OURS.group_by_expert(numbers[rows], 4)).view(-1, 2, 70)
        assert torch.equal(rows_only, whole[rows])


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_expert_products_are_those_of_expanded_ones(name: str) -> None:
    """Experts have 70 outputs: their tiles end within the next expert."""
    torch.manual_seed(5)
    count, outputs, inputs = 4, 70, 256
    matrix, values = MATRICES[name][0](count * outputs, inputs, torch.Generator().manual_seed(6))
    biases, x = random_of(count, outputs), random_of(45, inputs)
    numbers = chosen_of(45, count, 2)
    ours = OURS.prepare_experts(matrix.to(DEVICE), biases, count)(x, OURS.group_by_expert(numbers, count))
    expanded = values.to(DEVICE, torch.float32).view(count, outputs, inputs)
    plain = PLAIN.prepare_experts(expanded, biases, count)(x, PLAIN.group_by_expert(numbers, count))
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


def test_unchosen_experts_are_not_read() -> None:
    torch.manual_seed(4)
    weights, x = random_of(5, 16, 16), random_of(6, 16)
    numbers = torch.tensor([[1, 3]] * 6, device=DEVICE)
    weights[[0, 2, 4]] = torch.nan
    assert OURS.prepare_experts(weights, None, 5)(x, OURS.group_by_expert(numbers, 5)).isfinite().all()
