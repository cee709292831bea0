"""
Products of FP8 weights with inputs that are rounded to FP8 too, by the vendor's library.

Only for checkpoints that declare it: their outputs were checked with such inputs. Each row of inputs has a
scale for all of them, or for 128 where the weights have groups of 128. torch has these products for:

| recipe | scales of | devices |
|---|---|---|
| rows | rows of inputs, outputs | compute capability 8.9 and later; CPUs |
| groups | 128 inputs of a row and of an output | compute capability 9.x |

ROCm has another float8 on gfx942, and is left out. A device must also pass a trial when the model is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from baton_engine.ops.kernels import float8
from baton_engine.quantized import QuantizedPart

log = logging.getLogger(__name__)

Recipe = Literal["rows", "groups"]

GROUP = 128
"""Inputs of a group. Inputs are padded to a multiple of it."""

MULTIPLE = 16
"""The library's rows and outputs are a multiple of it."""

GROUPS_AT_ONCE = 8
"""Groups that a program reads at once."""

SCALING: dict[Recipe, str] = {"rows": "RowWise", "groups": "BlockWise1x128"}
"""Names of `torch.nn.functional.ScalingType`, which torch has since 2.10, as its product."""


def recipe_of(
    part: QuantizedPart, inputs: int, capability: tuple[int, int] | None, *, rocm: bool
) -> Recipe | None:
    """
    Return how torch multiplies `part` with inputs in FP8; None: not, or the checkpoint does not declare it.

    `capability`: of a GPU's computing, None for a CPU.
    """
    if not part.rounds_inputs or rocm or len(part.rows) % MULTIPLE:
        return None
    if part.group >= inputs:
        return "rows" if capability is None or capability >= (8, 9) else None
    return "groups" if part.group == GROUP and capability is not None and capability[0] == 9 else None


@triton.jit(do_not_specialize=["rows", "padded_rows"])
def _round_rows(
    x, numbers, scales, rows, padded_rows, x_stride, inputs, width, factor,
    BY_GROUP: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Write the float8 numbers of a row, and its scale, or those of its groups, times `factor`."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    end = tl.where(row < rows, inputs, 0)
    largest = tl.zeros([GROUPS, GROUP], tl.float32)
    if not BY_GROUP:
        for start in range(0, width, GROUPS * GROUP):
            k = start + at
            values = tl.load(x + row * x_stride + k, mask=k < end, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(values))
    # The smallest scale, about 2 ** -100, has a finite inverse.
    scale = tl.maximum(tl.max(largest, axis=1) / 448, 7.9e-31)
    if not BY_GROUP:
        scale = tl.zeros([GROUPS], tl.float32) + tl.max(scale, axis=0)
        tl.store(scales + row + group * 0, scale * factor, mask=group == 0)
    for start in range(0, width, GROUPS * GROUP):
        k = start + at
        values = tl.load(x + row * x_stride + k, mask=k < end, other=0.0).to(tl.float32)
        if BY_GROUP:
            scale = tl.maximum(tl.max(tl.abs(values), axis=1) / 448, 7.9e-31)
            number = start // GROUP + group
            tl.store(scales + number * padded_rows + row, scale * factor, mask=number * GROUP < width)
        rounded = float8.narrow(values * (1 / scale)[:, None])
        tl.store(numbers + row * width + k, rounded, mask=k < width)


def round_rows(x: Tensor, width: int, recipe: Recipe, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """
    Round x [T, inputs] to float8, padded with zeros to [a multiple of `MULTIPLE`, width].

    Returns the numbers and their scales times `factor`, [rows, 1] or [rows, groups] of which the rows are
    adjacent in memory. The number of a value that is not finite is NaN.
    """
    rows = triton.cdiv(len(x), MULTIPLE) * MULTIPLE
    numbers = torch.empty((rows, width), dtype=torch.uint8, device=x.device)
    groups = 1 if recipe == "rows" else width // GROUP
    scales = torch.empty((groups, rows), dtype=torch.float32, device=x.device)
    _round_rows[(rows,)](
        x,
        numbers,
        scales,
        len(x),
        rows,
        x.stride(0),
        x.shape[1],
        width,
        factor,
        BY_GROUP=recipe == "groups",
        GROUP=GROUP,
        GROUPS=GROUPS_AT_ONCE,
        enable_fp_fusion=True,
    )
    return numbers.view(torch.float8_e4m3fn), scales.view(rows, 1) if recipe == "rows" else scales.T


def multiply(
    x: Tensor,
    numbers: Tensor,
    scales: Tensor,
    recipe: Recipe,
    factor: float = 1.0,
    product: Callable[..., Tensor] | None = None,
) -> Tensor:
    """
    Return the product [T, outputs] of x [T, inputs] with weights, both in float8.

    `numbers` [outputs, width] uint8 and `scales` [groups, outputs], times 1 / `factor`. `product`:
    one with the contract of torch's. None: torch's.
    """
    product, scaling = product or functional.scaled_mm, getattr(functional.ScalingType, SCALING[recipe])
    inputs, of_inputs = round_rows(x, numbers.shape[1], recipe, factor)
    result = product(
        inputs,
        numbers.view(torch.float8_e4m3fn).T,
        of_inputs,
        scaling,
        scales if recipe == "rows" else scales.T,
        scaling,
        output_dtype=x.dtype,
    )
    return result[: len(x)]


@cache
def works(device: torch.device, recipe: Recipe, product: Callable[..., Tensor] | None = None) -> bool:
    """Return whether `product` computes a small product on `device`. Logs the result."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current device of the thread
    x = (torch.arange(5 * 300, device=device).view(5, 300) % 37 - 18).to(torch.bfloat16)
    numbers = torch.zeros(32, 3 * GROUP, device=device)
    numbers[:, :300] = torch.arange(32 * 300, device=device).view(32, 300) % 23 - 11
    groups = 1 if recipe == "rows" else 3
    scales = (1 + torch.arange(groups * 32, device=device).view(groups, 32)) / 64
    exact = x.float() @ (numbers * scales.repeat_interleave(3 * GROUP // groups, 0).T)[:, :300].T
    try:
        got = multiply(x, numbers.to(torch.float8_e4m3fn).view(torch.uint8), scales, recipe, 1.0, product)
        error = float(((got.float() - exact).abs() - exact.abs().mean() / 4).max())
    except (RuntimeError, ValueError, AttributeError) as failure:
        log.warning("torch does not multiply in FP8 here, so matrices are expanded: %s", failure)
        return False
    if not error <= 0:
        log.warning("torch's products in FP8 are wrong here, so matrices are expanded")
        return False
    scaled = "all" if recipe == "rows" else f"each {GROUP}"
    log.info("Passes of many rows multiply in FP8, with a scale for %s inputs of a row", scaled)
    return True
