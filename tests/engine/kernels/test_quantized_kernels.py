"""Products of accelerators' kernels with quantized matrices, against the expanded ones."""

from __future__ import annotations

import random
from collections.abc import Callable

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from baton_engine.devices import shared_memory
from baton_engine.ops.accelerator import AcceleratorOps
from baton_engine.ops.kernels.quantized import (
    EXPANDED_ROWS,
    FEW_ROWS,
    LARGE_TILE_MEMORY,
    SPLIT,
    QuantizedLinear,
)
from baton_engine.quantized import Format, Quantized, QuantizedPart, pack
from tests.engine.kernels.cases import DEVICE, guarded
from tests.engine.random_weights import tiny_spec
from tests.engine.test_quantized import OF_GGUF, random_blocks
from tests.seeds import seeds

Example = tuple[Quantized, Tensor]
"""A matrix, and its values by another implementation."""


def stored(form: Format) -> Callable[[int, int, torch.Generator], Example]:
    """A format of GGUF with random bytes, expanded by the gguf package."""

    def example(outputs: int, inputs: int, generator: torch.Generator) -> Example:
        matrix = random_blocks(outputs, inputs, form, generator)
        rows = matrix.parts[0].rows.numpy()
        return matrix, torch.from_numpy(gguf.quants.dequantize(rows, GGMLQuantizationType(form)))

    return example


def grouped(form: Format, group: int) -> Callable[[int, int, torch.Generator], Example]:
    """A format of GPTQ, AWQ and compressed-tensors, whose groups are several blocks."""

    def example(outputs: int, inputs: int, generator: torch.Generator) -> Example:
        size = group or inputs
        low, high = (-128, 128) if form is Format.Q8_0 else (0, 16)
        numbers = torch.randint(low, high, (outputs, inputs), generator=generator)
        scales = (
            torch.rand(outputs, inputs // size, generator=generator).to(torch.float16) / high / inputs**0.5
        )
        zeros = torch.full(scales.shape, 0 if form is Format.Q8_0 else 8)
        if form is Format.INT4:
            zeros = torch.randint(0, 16, scales.shape, generator=generator)
        wide = [each.repeat_interleave(size, 1) for each in (zeros, scales.float())]
        blocks = [each.repeat_interleave(size // 32, 1) for each in (zeros, scales)]
        matrix = pack(form, numbers, blocks[1], blocks[0] if form is Format.INT4 else None)
        return matrix, (numbers - wide[0]) * wide[1]

    return example


def float8(group: int) -> Callable[[int, int, torch.Generator], Example]:
    def example(outputs: int, inputs: int, generator: torch.Generator) -> Example:
        size = group or inputs
        octets = torch.randint(0, 256, (outputs, inputs), generator=generator, dtype=torch.uint8)
        octets[octets & 0x7F == 0x7F] = 0x81  # no NaN, and numbers below the smallest normal one
        scales = torch.rand(outputs, -(-inputs // size), generator=generator) / 200 / inputs**0.5
        values = octets.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(size, 1)[:, :inputs]
        rows = torch.cat((octets, scales.view(torch.uint8)), dim=1)
        return Quantized((QuantizedPart(Format.FP8, rows, size),), inputs), values

    return example


MATRICES: dict[str, tuple[Callable[[int, int, torch.Generator], Example], int]] = {
    **{form.name: (stored(form), form.block) for form in OF_GGUF},
    **{
        f"{form.name} in groups of {group or 'a row'}": (grouped(form, group), group or 32)
        for form in (Format.INT4, Format.Q4_0, Format.Q8_0)
        for group in (32, 64, 128, 0)
    },
    **{f"FP8 in groups of {group or 'a row'}": (float8(group), 1) for group in (16, 48, 128, 0)},
}
"""Matrices, and the number that divides their inputs."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
if DEVICE.type != "cpu":
    TOLERANCE[torch.bfloat16] = 3e-2  # the interpreter has no products of bfloat16

MEMORY = shared_memory(DEVICE) or LARGE_TILE_MEMORY


def product(matrix: Quantized, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return AcceleratorOps(tiny_spec(), MEMORY).prepare(matrix.to(DEVICE), bias)(x)


def assert_product(
    name: str, rows: int, outputs: int, blocks: int, dtype: torch.dtype, biased: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    make, multiple = MATRICES[name]
    inputs = -(-blocks * 32 // multiple) * multiple + (7 if multiple == 1 else 0)
    matrix, values = make(outputs, inputs, generator)
    x = guarded(torch.randn(rows, inputs, generator=generator).to(DEVICE, dtype))
    bias = guarded(torch.randn(outputs, generator=generator).to(DEVICE, dtype)) if biased else None
    expected = x.double().cpu() @ values.double().T
    if bias is not None:
        expected += bias.double().cpu()
    result = product(matrix, x, bias)
    assert result.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(result.double().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MATRICES)
def test_quantized_product_is_that_of_expanded(name: str, dtype: torch.dtype) -> None:
    assert_product(name, rows=3, outputs=70, blocks=9, dtype=dtype, biased=True, seed=1)


@pytest.mark.parametrize("rows", [1, FEW_ROWS + 1, EXPANDED_ROWS + 1], ids=["one", "more", "many"])
@pytest.mark.parametrize("name", MATRICES)
def test_quantized_product_with_other_numbers_of_rows(name: str, rows: int) -> None:
    """One row has a kernel of its own; more are multiplied by rounded weights, many by an expanded matrix."""
    assert_product(name, rows, outputs=70, blocks=9, dtype=torch.float16, biased=True, seed=2)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "name",
    (
        "Q8_0 in groups of 32",
        "IQ4_NL",
        "Q4_0 in groups of 64",
        "INT4 in groups of 128",
        "MXFP4",
        "FP8 in groups of 128",
    ),
)
def test_quantized_numbers_are_widened_exactly(name: str, dtype: torch.dtype) -> None:
    """A row of inputs that is 1 once gives the weights of that input, which are rounded once."""
    matrix, values = MATRICES[name][0](40, 256, torch.Generator().manual_seed(3))
    linear, x = QuantizedLinear(matrix.to(DEVICE), None, MEMORY), torch.eye(256, dtype=dtype, device=DEVICE)
    expected = values.to(dtype).T
    for rows in (slice(77, 78), slice(100, 100 + FEW_ROWS), slice(256 - FEW_ROWS - 1, 256)):
        assert torch.equal(linear(x[rows]).cpu(), expected[rows])


@pytest.mark.parametrize("seed", seeds(24, quick=1))
def test_quantized_product_of_any_shape(seed: int) -> None:
    """Rows 1 to 64, outputs and inputs with tails, and inputs of several splits."""
    chance = random.Random(seed)
    assert_product(
        chance.choice(list(MATRICES)),
        rows=chance.choice([1, FEW_ROWS, FEW_ROWS + 1, EXPANDED_ROWS + 1, chance.randint(1, 64)]),
        outputs=chance.choice([1, 64, chance.randint(1, 200)]),
        blocks=chance.choice([1, SPLIT // 32, SPLIT // 32 + 1, chance.randint(1, 2 * SPLIT // 32 + 9)]),
        dtype=chance.choice(list(TOLERANCE)),
        biased=chance.random() < 0.5,
        seed=seed,
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param("Q4_K", marks=pytest.mark.slow), "INT4 in groups of 128", "Q8_0 in groups of a row"],
)
def test_quantized_row_has_the_same_bits_beside_any(name: str) -> None:
    """
    A few rows are computed in splits, and more than a tile of rows in one program.

    The sum of a step is exact here: the interpreter's products round otherwise at another place of a tile.
    """
    generator = torch.Generator().manual_seed(5)
    inputs = SPLIT + 256
    matrix, _ = MATRICES[name][0](67, inputs, generator)
    x = (torch.randint(-64, 65, (FEW_ROWS + 5, inputs), generator=generator) / 64).to(DEVICE)
    linear = QuantizedLinear(matrix.to(DEVICE))
    together = linear(x)
    for first, last in ((0, 2), (FEW_ROWS + 2, FEW_ROWS + 4), (4, 4 + FEW_ROWS)):
        assert torch.equal(linear(x[first:last]), together[first:last])


def test_quantized_parts_in_several_formats_are_stacked() -> None:
    generator = torch.Generator().manual_seed(6)
    examples = [MATRICES[name][0](outputs, 256, generator) for name, outputs in (("Q4_K", 65), ("Q6_K", 3))]
    same = MATRICES["Q6_K"][0](40, 256, generator)
    matrix = Quantized(tuple(part for each, _ in (*examples, same) for part in each.parts), 256)
    x = torch.randn(5, 256, generator=generator)
    expected = x @ torch.cat([values for _, values in (*examples, same)]).T
    torch.testing.assert_close(product(matrix, x.to(DEVICE)).cpu(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", MATRICES)
def test_quantized_table_has_the_rows_of_the_matrix(name: str) -> None:
    """Only the product of a scale's two parts is rounded."""
    matrix, values = MATRICES[name][0](50, 256, torch.Generator().manual_seed(7))
    rows = torch.tensor([3, 49, 3, 0])
    table = AcceleratorOps(tiny_spec()).prepare_table(matrix.to(DEVICE), None)
    torch.testing.assert_close(table[rows.to(DEVICE)].cpu(), values[rows].float(), rtol=1e-6, atol=1e-9)


def test_quantized_table_without_padding_is_contiguous() -> None:
    """Kernels add to the rows of a table. The last step of these rows is padded to 128 inputs."""
    matrix, values = MATRICES["Q8_0 in groups of a row"][0](9, 96, torch.Generator().manual_seed(8))
    table = AcceleratorOps(tiny_spec()).prepare_table(matrix.to(DEVICE), None)
    rows = table[torch.tensor([3, 5], device=DEVICE)]
    assert rows.is_contiguous()
    torch.testing.assert_close(rows.cpu(), values[[3, 5]].float(), rtol=1e-6, atol=1e-9)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of numpy
def test_quantized_invalid_activation_stays_in_its_row() -> None:
    matrix, _ = MATRICES["Q4_0"][0](9, 64, torch.Generator().manual_seed(8))
    x = torch.ones(3, 64, device=DEVICE)
    x[1, 5] = torch.inf
    assert product(matrix, x).isfinite().all(dim=1).tolist() == [True, False, True]


def test_quantized_matrix_takes_the_memory_of_its_format() -> None:
    """Equal scales of adjacent blocks are stored once."""
    matrix, _ = MATRICES["INT4 in groups of 128"][0](64, 1024, torch.Generator().manual_seed(9))
    linear = QuantizedLinear(matrix)
    assert linear.nbytes == 64 * 1024 // 2 + 64 * 8 * (2 + 1)
