"""
Products with quantized matrices, whose numbers become floats in registers.

The number of rows decides, because it decides what the time is spent on:

- One row, the step of a single stream: each program reads a few outputs from end to end, without tensor
  cores.
- Up to `FEW_ROWS`: numbers of 4 bits, 8 bits and float8 are exact in bfloat16 and float16, so they are
  multiplied as they are, and the sum of a group is multiplied by its scale in fp32.
- Up to `EXPANDED_ROWS`, where shared memory suffices and inputs have 2 bytes per number: weights are rounded
  to the type of the inputs while they are read. Tiles are higher, so each weight is widened once or twice.
- More rows, of inputs of 2 bytes: the matrix is expanded to a copy, which the vendor's library multiplies. Or
  it is multiplied in FP8 (`scaled`), if the checkpoint declares that inputs are rounded to it.

So the last bits of a row depend on which of these its batch has. Within one of the first three they do not
depend on the batch: the steps of tiles and the splits depend on the matrix only.

Inputs are divided at fixed positions into splits, whose sums are added in order. Where tiles are few, each
split is a program of its own, and a second kernel adds them: otherwise small matrices would occupy few
multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from baton_engine.ops.kernels import scaled
from baton_engine.ops.kernels.packed import (
    PackedMatrix,
    merged,
    repack,
    scale_of,
    step_offset,
    weights_of,
    widened,
)
from baton_engine.quantized import FLOAT8_FACTOR, Quantized, QuantizedPart, unpack

FEW_ROWS = 32
"""Rows up to which numbers are multiplied as they are."""

EXPANDED_ROWS = 256
"""Rows above which the matrix is expanded. By default, captured passes have no more, so that graphs need no
such copy."""

PROGRAMS = 256
"""Tiles from which all splits of a tile are added by one program. Large devices have about 130
multiprocessors."""

ROW_OUTPUTS = 4
"""Outputs of a program for one row."""

ROW_BYTES = 8192
"""Bytes of numbers that a program for one row reads at once, or for the expanded matrix."""

EXPANDED_OUTPUTS = 64
"""Outputs of a program for the expanded matrix."""

SUMMED = 64
"""Outputs of a program that adds splits."""

SPLIT = 1024
"""Inputs that are added before they are added to others. A multiple of all steps."""

STAGES, FEW_STAGES = 3, 4
"""Steps in shared memory: others are loaded while one is multiplied. Few rows have short steps."""

LARGE_TILE_MEMORY = 224 * 1024
"""Bytes of shared memory per program from which a device has larger tiles: H100, B200 and later."""

LEAST_ROWS = 8
"""Rows of a tile on devices with large tiles."""


class QuantizedLinear:
    """A quantized matrix on an accelerator: implementation of `Linear` and of `Table`."""

    def __init__(self, matrix: Quantized, bias: Tensor | None = None, shared_memory: int = 0) -> None:
        """`matrix` is on the device. Its memory is not used any more. `shared_memory`: as for `tile_of`."""
        self._shared_memory = shared_memory
        self.outputs, self._inputs = matrix.shape
        self._bias = bias
        self._parts = [
            repack(unpack(part, matrix.inputs), _recipe(part, matrix.inputs)) for part in merged(matrix.parts)
        ]
        self._scaled = all(part.recipe is not None for part in self._parts)

    def __call__(self, x: Tensor) -> Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        if len(x) > EXPANDED_ROWS and x.element_size() == 2:
            return self._multiply_scaled(x) if self._scaled else self._multiply_expanded(x)
        result = torch.empty((len(x), self.outputs), dtype=x.dtype, device=x.device)
        for part, rows in self._rows_of_parts() if len(x) else ():
            bias = None if self._bias is None else self._bias[rows]
            if len(x) == 1:
                _launch_row(part, x, bias, result[:, rows])
            else:
                _launch_tiles(part, x, bias, result[:, rows], self._shared_memory)
        return result

    def _multiply_scaled(self, x: Tensor) -> Tensor:
        products = [multiply_scaled(part, x) for part in self._parts]
        result = products[0] if len(products) == 1 else torch.cat(products, dim=1)
        return result if self._bias is None else result.add_(self._bias)

    def _multiply_expanded(self, x: Tensor) -> Tensor:
        weights = torch.empty((self.outputs, self._inputs), dtype=x.dtype, device=x.device)
        for part, rows in self._rows_of_parts():
            _launch_expand(part, weights[rows])
        return functional.linear(x, weights, self._bias)

    def _rows_of_parts(self) -> Iterator[tuple[PackedMatrix, slice]]:
        """Yield each part with its rows of the matrix."""
        start = 0
        for part in self._parts:
            yield part, slice(start, start := start + part.outputs)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return the rows [T] of the matrix: [T, inputs] fp32. The matrix has one format."""
        (part,) = self._parts
        return part.values(rows)


def _recipe(part: QuantizedPart, inputs: int) -> scaled.Recipe | None:
    device = part.rows.device
    capability = None if device.type == "cpu" else torch.cuda.get_device_capability(device)
    recipe = scaled.recipe_of(part, inputs, capability, rocm=torch.version.hip is not None)
    return recipe if recipe is not None and scaled.works(device, recipe) else None


def _launch_row(matrix: PackedMatrix, x: Tensor, bias: Tensor | None, result: Tensor) -> None:
    _multiply_row[(triton.cdiv(matrix.outputs, ROW_OUTPUTS),)](
        x,
        *matrix.tensors,
        x if bias is None else bias,
        result,
        matrix.outputs,
        matrix.inputs,
        matrix.steps,
        BIAS=bias is not None,
        LAYOUT=matrix.layout,
        OUTPUTS=ROW_OUTPUTS,
        STEPS=max(1, ROW_BYTES // ROW_OUTPUTS // matrix.step_bytes),
        enable_fp_fusion=True,
    )


@triton.jit
def _multiply_row(
    x, numbers, scales, offsets, factors, bias, result, outputs, inputs, steps,
    BIAS: tl.constexpr, LAYOUT: tl.constexpr, OUTPUTS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Compute OUTPUTS numbers of the product with one row, STEPS steps at a time."""
    PARTS: tl.constexpr = LAYOUT.parts
    TOGETHER: tl.constexpr = 8 if PARTS > 1 else 16
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    inner = tl.arange(0, LAYOUT.width)
    # Outputs come first, so that each thread has all of them, and reads an input once for all.
    total = tl.zeros([OUTPUTS, STEPS, LAYOUT.part // TOGETHER], tl.float32)
    for begin in range(0, steps, STEPS):
        step = begin + tl.arange(0, STEPS)
        valid = (output < outputs)[:, None] & (step < steps)[None, :]
        at = step_offset(step.to(tl.int64)[None, :], output[:, None], steps, outputs, LAYOUT)
        packed = tl.load(numbers + at[:, :, None] + inner[None, None, :], mask=valid[:, :, None], other=0)
        for part in tl.static_range(PARTS):
            k = step[:, None] * LAYOUT.step + part * LAYOUT.part + tl.arange(0, LAYOUT.part)[None, :]
            values = tl.load(x + k, mask=k < inputs, other=0.0)[None, :, :].to(tl.float32)
            if part % LAYOUT.run == 0:
                scale, offset = scale_of(
                    scales, offsets, factors, output[:, None], outputs, valid, step[None, :], part, LAYOUT
                )
                scale, offset = scale[:, :, None], offset[:, :, None]
            weighted = widened(packed, offset, part, LAYOUT, tl.float32) * values
            if part % LAYOUT.run == 0:
                products = weighted
            else:
                products += weighted
            if part % LAYOUT.run == LAYOUT.run - 1:
                total += _sums(products, TOGETHER) * scale
            if LAYOUT.offset == "minima":
                total += _sums(tl.broadcast_to(values, products.shape), TOGETHER) * offset
    product = tl.sum(tl.sum(total, axis=2), axis=1)
    used = output < outputs
    if BIAS:
        product += tl.load(bias + output, mask=used, other=0.0).to(tl.float32)
    tl.store(result + output, product.to(result.dtype.element_ty), mask=used)


@triton.jit
def _sums(values, COUNT: tl.constexpr):
    """Add COUNT numbers that are one behind the other: [..., n] to [..., n / COUNT]."""
    apart = tl.reshape(values, (values.shape[0], values.shape[1], values.shape[2] // COUNT, COUNT))
    return tl.sum(apart, axis=3)


def _launch_tiles(
    matrix: PackedMatrix, x: Tensor, bias: Tensor | None, result: Tensor, shared_memory: int
) -> None:
    """Write the product of x [T, inputs] to `result` [T, outputs], whose rows may be apart."""
    rows, outputs = len(x), matrix.outputs
    shape = tile_of(rows, x.element_size(), shared_memory)
    split_steps = SPLIT // matrix.layout.step
    splits = triton.cdiv(matrix.steps, split_steps)
    row_tiles, tiles = triton.cdiv(rows, shape["ROWS"]), triton.cdiv(outputs, shape["COLUMNS"])
    partial = row_tiles * tiles < PROGRAMS and splits > 1
    sums = x.new_empty((splits, rows, outputs), dtype=torch.float32) if partial else result
    _multiply[(row_tiles, tiles, splits if partial else 1)](
        x,
        *matrix.tensors,
        x if bias is None else bias,
        result,
        sums,
        rows,
        x.stride(0),
        result.stride(0),
        outputs,
        matrix.inputs,
        matrix.steps,
        PARTIAL=partial,
        BIAS=bias is not None,
        SPLIT_STEPS=split_steps,
        LAYOUT=matrix.layout,
        enable_fp_fusion=True,
        **shape,
    )
    if partial:
        _add_splits[(rows, triton.cdiv(outputs, SUMMED))](
            sums,
            x if bias is None else bias,
            result,
            rows,
            result.stride(0),
            outputs,
            splits,
            BIAS=bias is not None,
            ROWS=1,
            COLUMNS=SUMMED,
            enable_fp_fusion=True,
        )


def tile_of(rows: int, itemsize: int, shared_memory: int) -> dict[str, Any]:
    """
    Return the shape of a tile for so many rows.

    `itemsize`: bytes of an input. `shared_memory`: bytes that the device has for a program, 0 if they are not
    known. Chosen by counting instructions, see benchmarks/LOG.md.
    """
    large = shared_memory >= LARGE_TILE_MEMORY and itemsize == 2
    rounded = rows > FEW_ROWS and large
    if rounded:
        shape = (64, 128, 4) if rows <= 64 else (128, 128, 8)
    else:
        least = LEAST_ROWS if large else 16
        # With two warps, Hopper multiplies by instructions that do not wait for other warps.
        shape = (max(least, min(FEW_ROWS, triton.next_power_of_2(rows))), 64, 2 if itemsize == 2 else 4)
    return {
        "ROWS": shape[0],
        "COLUMNS": shape[1],
        "num_warps": shape[2],
        "num_stages": FEW_STAGES if shape[0] < FEW_ROWS else STAGES,
        "ROUNDED": rounded,
    }


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x, numbers, scales, offsets, factors, bias, result, sums, rows, x_stride, result_stride, outputs, inputs,
    steps,
    PARTIAL: tl.constexpr, BIAS: tl.constexpr, SPLIT_STEPS: tl.constexpr, LAYOUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows with a tile of outputs; with PARTIAL, one split of the inputs."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    output = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    first = tl.program_id(2)
    last = first + 1 if PARTIAL else tl.cdiv(steps, SPLIT_STEPS)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for split in range(first, last):
        total += sum_split(
            x, numbers, scales, offsets, factors, row, rows, x_stride, output, outputs, inputs, steps,
            split * SPLIT_STEPS, tl.minimum(steps, (split + 1) * SPLIT_STEPS), LAYOUT, ROUNDED,
        )  # fmt: skip
    total = tl.trans(total)
    if PARTIAL:
        at = (first * rows + row)[:, None] * outputs + output[None, :]
        tl.store(sums + at, total, mask=(row < rows)[:, None] & (output < outputs)[None, :])
    else:
        _store(total, bias, result, row, rows, output, outputs, result_stride, BIAS)


@triton.jit
def sum_split(
    x, numbers, scales, offsets, factors, row, rows, x_stride, output, outputs, inputs, steps, begin, end,
    LAYOUT: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """
    Return the sums [outputs, rows] of the steps begin to end; with ROUNDED of weights in the type of x.

    Weights are the first operand: tensor cores take it from registers, where it is computed.
    """
    PARTS: tl.constexpr = LAYOUT.parts
    inner = tl.arange(0, LAYOUT.width)
    k = tl.arange(0, LAYOUT.part)
    # Instead of masks, rows and outputs beyond the last ones are computed again, and not stored.
    row = tl.minimum(row, rows - 1)
    output = tl.minimum(output, outputs - 1)
    total = tl.zeros([output.shape[0], row.shape[0]], tl.float32)
    for step in range(begin, end):
        packed = tl.load(
            numbers + step_offset(step, output, steps, outputs, LAYOUT)[:, None] + inner[None, :]
        )
        for part in tl.static_range(PARTS):
            at = step * LAYOUT.step + part * LAYOUT.part + k
            if LAYOUT.even:
                values = tl.load(x + row[None, :] * x_stride + at[:, None])
            else:
                inside = (at < inputs)[:, None]
                values = tl.load(x + row[None, :] * x_stride + at[:, None], mask=inside, other=0.0)
            if part % LAYOUT.run == 0:
                scale, offset = scale_of(scales, offsets, factors, output, outputs, True, step, part, LAYOUT)
            if ROUNDED:
                weights = weights_of(packed, scale[:, None], offset[:, None], part, LAYOUT, values.dtype)
                total = tl.dot(weights, values, total)
            else:
                weights = widened(packed, offset[:, None], part, LAYOUT, values.dtype)
                if part % LAYOUT.run == 0:
                    products = tl.dot(weights, values, input_precision="ieee")
                else:
                    products = tl.dot(weights, values, products, input_precision="ieee")
                if LAYOUT.offset == "minima":
                    # The sums of inputs, once for each output: moving them to all threads takes longer.
                    ones = tl.full([output.shape[0], LAYOUT.part], 1.0, values.dtype)
                    total += tl.dot(ones, values, input_precision="ieee") * offset[:, None]
                if part % LAYOUT.run == LAYOUT.run - 1:
                    total += products * scale[:, None]
    return total


@triton.jit(do_not_specialize=["rows"])
def _add_splits(
    sums, bias, result, rows, result_stride, outputs, splits,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the splits of a row in order."""
    row = (tl.program_id(0) + tl.arange(0, ROWS)).to(tl.int64)
    output = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for split in range(splits):
        at = (split * rows + row)[:, None] * outputs + output[None, :]
        total += tl.load(sums + at, mask=(output < outputs)[None, :], other=0.0)
    _store(total, bias, result, row, rows, output, outputs, result_stride, BIAS)


@triton.jit
def _store(total, bias, result, row, rows, output, outputs, result_stride, BIAS: tl.constexpr):
    valid = output < outputs
    if BIAS:
        total += tl.load(bias + output, mask=valid, other=0.0).to(tl.float32)[None, :]
    mask = (row < rows)[:, None] & valid[None, :]
    at = row[:, None] * result_stride + output[None, :]
    tl.store(result + at, total.to(result.dtype.element_ty), mask=mask)


def _launch_expand(matrix: PackedMatrix, weights: Tensor) -> None:
    """Write the matrix to `weights` [outputs, inputs], contiguous, of 2 bytes per number."""
    at_once = max(1, ROW_BYTES // EXPANDED_OUTPUTS // matrix.step_bytes)
    _expand[(triton.cdiv(matrix.outputs, EXPANDED_OUTPUTS), triton.cdiv(matrix.steps, at_once))](
        *matrix.tensors,
        weights,
        matrix.outputs,
        matrix.inputs,
        matrix.steps,
        LAYOUT=matrix.layout,
        OUTPUTS=EXPANDED_OUTPUTS,
        STEPS=at_once,
        enable_fp_fusion=True,
    )


@triton.jit
def _expand(
    numbers, scales, offsets, factors, weights, outputs, inputs, steps,
    LAYOUT: tl.constexpr, OUTPUTS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write OUTPUTS rows of STEPS steps to weights [outputs, inputs]."""
    PARTS: tl.constexpr = LAYOUT.parts
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    inner = tl.arange(0, LAYOUT.width)
    step = tl.program_id(1) * STEPS + tl.arange(0, STEPS)
    valid = (step < steps)[:, None] & (output < outputs)[None, :]
    at = step_offset(step.to(tl.int64)[:, None], output[None, :], steps, outputs, LAYOUT)
    packed = tl.load(numbers + at[:, :, None] + inner[None, None, :], mask=valid[:, :, None], other=0)
    for part in tl.static_range(PARTS):
        scale, offset = scale_of(
            scales, offsets, factors, output[None, :], outputs, valid, step[:, None], part, LAYOUT
        )
        k = (step[:, None] * LAYOUT.step + part * LAYOUT.part + tl.arange(0, LAYOUT.part)[None, :])[
            :, None, :
        ]
        expanded = weights_of(
            packed, scale[:, :, None], offset[:, :, None], part, LAYOUT, weights.dtype.element_ty
        )
        tl.store(
            weights + output[None, :, None] * inputs + k, expanded, mask=valid[:, :, None] & (k < inputs)
        )


def multiply_scaled(matrix: PackedMatrix, x: Tensor) -> Tensor:
    """Return the product of x [T, inputs], rounded to FP8: [T, outputs]. Only with a `recipe`."""
    assert matrix.recipe is not None
    # Numbers that no instruction converts have scales times `FLOAT8_FACTOR`.
    factor = 1 / FLOAT8_FACTOR if matrix.layout.kind == "float8" else 1.0
    return scaled.multiply(x, matrix.in_memory.flatten(1), matrix.scales, matrix.recipe, factor)
