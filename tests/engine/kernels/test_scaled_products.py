"""Products of FP8 weights with inputs that are rounded to FP8, where a checkpoint declares it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from baton_engine.ops.kernels import scaled
from baton_engine.ops.kernels.packed import repack
from baton_engine.ops.kernels.quantized import LARGE_TILE_MEMORY, QuantizedLinear, multiply_scaled
from baton_engine.quantized import Format, Quantized, QuantizedPart, pack_float8, unpack
from tests.engine.kernels.cases import DEVICE, guarded

LEAST_STEP = 2.0**-10
"""Half of the smallest float8 number: what rounding changes near zero."""
HALF_STEP = 2.0**-4
"""What rounding to three bits of mantissa changes, relative to a value."""
MANY = 9


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes seconds for as many rows as a device has in a prompt."""
    monkeypatch.setattr("baton_engine.ops.kernels.quantized.EXPANDED_ROWS", MANY - 1)


FP8 = QuantizedPart(Format.FP8, torch.zeros(64, 256, dtype=torch.uint8), 128, rounds_inputs=True)
HOPPER, BLACKWELL, ADA, AMPERE = (9, 0), (10, 0), (8, 9), (8, 0)
RECIPES: dict[str, tuple[dict[str, Any], int, Any, bool, scaled.Recipe | None]] = {
    "by row, Hopper": ({"group": 256}, 256, HOPPER, False, "rows"),
    "by row, Ada": ({"group": 256}, 256, ADA, False, "rows"),
    "by row, Blackwell": ({"group": 256}, 256, BLACKWELL, False, "rows"),
    "by row, the consumers' Blackwell": ({"group": 256}, 256, (12, 0), False, "rows"),
    "by row, Ampere": ({"group": 256}, 256, AMPERE, False, None),
    "by row, a CPU": ({"group": 256}, 256, None, False, "rows"),
    "by row, gfx942": ({"group": 256}, 256, (9, 4), True, None),
    "groups of 128, Hopper": ({}, 256, HOPPER, False, "groups"),
    "groups of 128, Blackwell": ({}, 256, BLACKWELL, False, None),
    "groups of 128, Ada": ({}, 256, ADA, False, None),
    "groups of 128, a CPU": ({}, 256, None, False, None),
    "one group of 128": ({}, 128, ADA, False, "rows"),
    "groups of 64": ({"group": 64}, 256, HOPPER, False, None),
    "not declared": ({"group": 256, "rounds_inputs": False}, 256, HOPPER, False, None),
    "outputs of no multiple": ({"rows": FP8.rows[:60]}, 256, HOPPER, False, None),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_follows_from_declaration_scales_and_device(name: str) -> None:
    changes, inputs, capability, rocm, expected = RECIPES[name]
    assert scaled.recipe_of(replace(FP8, **changes), inputs, capability, rocm=rocm) == expected


def float8_matrix(outputs: int, inputs: int, group: int, seed: int, declared: bool = True) -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    numbers = (2 * torch.randn(outputs, inputs, generator=generator)).to(torch.float8_e4m3fn)
    scales = 0.01 + torch.rand(outputs, -(-inputs // group), generator=generator) / 100
    matrix = pack_float8(numbers.view(torch.uint8), scales, group)
    return Quantized(tuple(replace(part, rounds_inputs=declared) for part in matrix.parts), inputs)


def values_of(matrix: Quantized) -> Tensor:
    """Return the exact values of one part in float64."""
    (part,) = matrix.parts
    numbers = part.rows[:, : matrix.inputs].contiguous().view(torch.float8_e4m3fn).double()
    scales = part.rows[:, matrix.inputs :].clone().view(torch.float32).double()
    return numbers * scales.repeat_interleave(part.group, 1)[:, : matrix.inputs]


def bound(x: Tensor, weights: Tensor, group: int, itemsize: int = 2) -> Tensor:
    """Return how far a product may be from the exact one: each input and the result are rounded once."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % group))
    largest = padded.view(len(x), -1, group).abs().amax(2).repeat_interleave(group, 1)[:, : x.shape[1]]
    of_inputs = torch.maximum(x.abs() * HALF_STEP, largest / 448 * LEAST_STEP) * (1 + 1e-5)
    return of_inputs @ weights.abs().T + (x @ weights.T).abs() * 2.0**-8 + 1e-6


def inputs_of(rows: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of several magnitudes, and one of zeros."""
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    x[0], x[1], x[2] = 0.0, x[1] * 2.0**-14, x[2] * 2.0**9
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 256), (48, 300), (16, 2100)])
def test_product_is_within_the_rounding_of_inputs(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    matrix, x = float8_matrix(outputs, inputs, inputs, seed=1), inputs_of(7, inputs, dtype)
    (part,) = matrix.to(DEVICE).parts
    product = multiply_scaled(repack(unpack(part, inputs), "rows"), guarded(x))
    assert (product.shape, product.dtype) == ((7, outputs), dtype)
    weights, x = values_of(matrix), x.double().cpu()
    assert ((product.double().cpu() - x @ weights.T).abs() <= bound(x, weights, inputs)).all()


@pytest.mark.usefixtures("few_are_many")
def test_many_rows_are_rounded_where_it_is_declared() -> None:
    """With a bias. Otherwise the matrix is expanded, which is much closer to the exact product."""
    x, bias = inputs_of(MANY, 128), torch.linspace(-1, 1, 32).to(DEVICE, torch.bfloat16)
    errors = {}
    for declared in (True, False):
        matrix = float8_matrix(32, 128, 128, 3, declared)
        result = QuantizedLinear(matrix.to(DEVICE), bias)(x).double().cpu()
        exact = x.double().cpu() @ values_of(matrix).T + bias.double().cpu()
        errors[declared] = (result - exact).abs()[3:].mean()
    assert 0 < 4 * errors[False] < errors[True] < exact[3:].abs().mean() / 10


@pytest.mark.parametrize(("rows", "inputs"), [(1, 2100), (3, 2100), (40, 300)])
def test_fewer_rows_have_the_bits_of_a_checkpoint_that_declares_nothing(rows: int, inputs: int) -> None:
    """Although the order of the weights in memory differs."""
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(4)).to(DEVICE, torch.float16)
    declared, other = (
        QuantizedLinear(float8_matrix(80, inputs, inputs, 5, declared).to(DEVICE), None, LARGE_TILE_MEMORY)
        for declared in (True, False)
    )
    assert torch.equal(declared(x), other(x))
    some = torch.tensor([3, 79, 0], device=DEVICE)
    assert torch.equal(declared[some], other[some])
    assert declared.nbytes == other.nbytes


@pytest.mark.usefixtures("few_are_many")
def test_device_that_fails_the_trial_expands_as_if_nothing_were_declared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scaled, "works", lambda device, recipe: False)
    x = inputs_of(MANY, 64)
    declared, other = (
        QuantizedLinear(float8_matrix(32, 64, 64, 4, declared).to(DEVICE)) for declared in (True, False)
    )
    assert torch.equal(declared(x), other(x))


@pytest.mark.usefixtures("few_are_many")
def test_parts_that_differ_in_their_declaration_are_expanded() -> None:
    first, second = (float8_matrix(32, 64, 64, seed, declared) for seed, declared in ((6, True), (7, False)))
    both = QuantizedLinear(Quantized((*first.parts, *second.parts), 64).to(DEVICE))
    x = torch.randn(MANY, 64, generator=torch.Generator().manual_seed(8)).to(DEVICE, torch.float16)
    exact = x.double().cpu() @ torch.cat([values_of(first), values_of(second)]).T
    assert (both(x).double().cpu() - exact).abs().max() < 4e-3


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of numpy
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_input_that_is_not_finite_stays_in_its_row(value: float) -> None:
    x = torch.ones(3, 256, dtype=torch.float16, device=DEVICE)
    x[1, 5] = value
    (part,) = float8_matrix(32, 256, 256, seed=9).to(DEVICE).parts
    result = multiply_scaled(repack(unpack(part, 256), "rows"), x)
    assert result.isnan().all(dim=1).tolist() == [False, True, False]
    assert result.isfinite().all(dim=1).tolist() == [True, False, True]


def test_rows_are_rounded_to_the_nearest_float8() -> None:
    """The largest of a row or group becomes 448, and what is padded is zero."""
    x = torch.randn(11, 300, generator=torch.Generator().manual_seed(10)).to(DEVICE, torch.bfloat16)
    x[4], x[5, 128:256] = 0.0, 2.0**-120
    recipes: tuple[tuple[scaled.Recipe, int], ...] = (("rows", 384), ("groups", 128))
    for recipe, size in recipes:
        numbers, scales = scaled.round_rows(x, 384, recipe)
        assert (numbers.shape, scales.shape) == ((16, 384), (16, 384 // size))
        padded = torch.nn.functional.pad(x.float(), (0, 84, 0, 5))
        blocks = padded.view(16, -1, size)
        assert (scales / (blocks.abs().amax(2) / 448).clamp(min=7.9e-31) - 1).abs().max() < 1e-6
        expected = (blocks / scales[:, :, None]).to(torch.float8_e4m3fn).float().view(16, 384)
        # A value in the middle of two numbers may go to either one.
        assert ((numbers.float() - expected).abs() <= expected.abs() / 8 + 2.0**-9).all()
        assert (numbers.float() != expected).float().mean() < 1e-3
        assert numbers.float().abs().max() == 448
        assert not numbers.float()[11:].any() and not numbers.float()[:, 300:].any()


def by_groups(
    a: Tensor, b: Tensor, scale_a: Tensor, recipe_a: Any, scale_b: Tensor, recipe_b: Any, output_dtype: Any
) -> Tensor:
    """As torch's, with what it checks for groups of 128 on a GPU (`_scaled_block1x128_block1x128`)."""
    assert recipe_a is recipe_b is ScalingType.BlockWise1x128
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    (m, k), n = a.shape, b.shape[1]
    assert (a.stride(1), b.stride(0), b.stride(1)) == (1, 1, k)
    assert m % 16 == n % 16 == k % 16 == 0
    assert (scale_a.dtype, scale_a.shape, scale_a.stride()) == (torch.float32, (m, k // 128), (1, m))
    assert (scale_b.dtype, scale_b.shape, scale_b.stride()) == (torch.float32, (n, k // 128), (1, n))
    wide = a.float() * scale_a.repeat_interleave(128, 1)
    return (wide @ (b.float() * scale_b.T.repeat_interleave(128, 0))).to(output_dtype)


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 256), (48, 300)])
def test_groups_are_multiplied_within_the_rounding_of_inputs(outputs: int, inputs: int) -> None:
    matrix = float8_matrix(outputs, inputs, 128, seed=11)
    weights = values_of(matrix)
    x = torch.randn(13, inputs, generator=torch.Generator().manual_seed(12)).to(DEVICE, torch.bfloat16)
    x[:, 128:] *= 100
    width, rows = -(-inputs // 128) * 128, matrix.parts[0].rows.to(DEVICE)
    numbers = torch.nn.functional.pad(rows[:, :inputs], (0, width - inputs))
    scales = rows[:, inputs:].clone().view(torch.float32).T.contiguous()
    product = scaled.multiply(x, numbers, scales, "groups", product=by_groups)
    exact = x.double().cpu() @ weights.T
    assert ((product.double().cpu() - exact).abs() <= bound(x.double().cpu(), weights, 128)).all()


def refused(*arguments: Any, **options: Any) -> Tensor:
    raise NotImplementedError("only on Hopper")


def lacking(*arguments: Any, **options: Any) -> Tensor:
    raise AttributeError("module 'torch.nn.functional' has no attribute 'scaled_mm'")


def zeros(*arguments: Any, **options: Any) -> Tensor:
    return 0 * scaled_mm(*arguments, **options)


TRIALS: dict[str, tuple[scaled.Recipe, Callable[..., Tensor], bool, str]] = {
    "rows": ("rows", scaled_mm, True, "a scale for all inputs"),
    "groups": ("groups", by_groups, True, "a scale for each 128 inputs"),
    "refused": ("rows", refused, False, "only on Hopper"),
    "a torch without it": ("rows", lacking, False, "no attribute"),
    "wrong": ("rows", zeros, False, "are wrong here"),
}


@pytest.mark.parametrize("name", TRIALS)
def test_trial_tells_whether_a_device_multiplies(name: str, caplog: pytest.LogCaptureFixture) -> None:
    recipe, product, expected, message = TRIALS[name]
    scaled.works.cache_clear()
    with caplog.at_level(logging.INFO):
        assert scaled.works(DEVICE, recipe, product) is expected
    assert message in caplog.text
    scaled.works.cache_clear()
