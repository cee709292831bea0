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
depend on the batch: the height of tiles, their steps and the splits depend on the matrix only.

Inputs are divided at fixed positions into splits, whose sums are added in order. Where tiles are few, each
split is a program of its own, and a second kernel adds them: otherwise small matrices would occupy few
multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from baton_engine.ops import ExpertGroups
from baton_engine.ops.kernels import float8, scaled
from baton_engine.quantized import FLOAT8_FACTOR, SUPERBLOCK, Quantized, QuantizedPart, Unpacked, unpack

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

MOST_STEP = 128
"""Inputs per step at most. A step is in one group."""

SPLIT = 2048
"""Inputs that are added before they are added to others. A multiple of all steps."""

STAGES = 3
"""Steps in shared memory: others are loaded while one is multiplied."""

LARGE_TILE_MEMORY = 224 * 1024
"""Bytes of shared memory per program from which a device has larger tiles: H100, B200 and later."""

WIDE_STEP = 128
"""Numbers of a step from which few outputs per tile suffice. Groups of 32 make shorter steps."""


@triton.jit
def _place(step, output, steps, outputs, BY_OUTPUT: tl.constexpr):
    """Return the place of a step of an output among all of them."""
    if BY_OUTPUT:
        return output * steps + step
    else:
        return step * outputs + output


@triton.jit
def _floats(numbers, KIND: tl.constexpr, ZERO: tl.constexpr, dtype: tl.constexpr):
    """Widen numbers, exactly. Those of float8 are divided by `FLOAT8_FACTOR`; those of e4m3 are not."""
    if KIND == "float8":
        return float8.widen(numbers, dtype)
    elif KIND == "e4m3":
        return numbers.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(dtype)
    elif KIND == "float4":
        # Bits of e2m1, moved to those of float16, are the number divided by 2**14.
        bits = numbers.to(tl.uint16)
        half = ((bits & 8) << 12 | (bits & 7) << 9).to(tl.uint16)
        return (half.to(tl.float16, bitcast=True).to(tl.float32) * 16384).to(dtype)
    else:
        return (numbers.to(tl.int8) - ZERO).to(dtype)


@triton.jit
def _scale_of(
    scales, offsets, factors, output, outputs, valid, step,
    STEP: tl.constexpr, GROUP_STEPS: tl.constexpr, OFFSET: tl.constexpr, FACTORS: tl.constexpr,
    SUPERBLOCK: tl.constexpr,
):  # fmt: skip
    """Return scale and offset of each output in a step, in fp32."""
    offset_of_group = step // GROUP_STEPS * outputs + output
    scale = tl.load(scales + offset_of_group, mask=valid, other=0).to(tl.float32)
    offset = scale * 0
    if OFFSET != "none":
        offset = tl.load(offsets + offset_of_group, mask=valid, other=0).to(tl.float32)
    if FACTORS:
        factor = factors + step * STEP // SUPERBLOCK * 2 * outputs + output
        scale *= tl.load(factor, mask=valid, other=0).to(tl.float32)
        offset *= tl.load(factor + outputs, mask=valid, other=0).to(tl.float32)
    if OFFSET == "zeros":
        offset = -offset * scale
    return scale, offset


@triton.jit
def _weights(
    numbers, scale, offset, KIND: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Return the weights of which `numbers` are the numbers, rounded once."""
    weights = _floats(numbers, KIND, ZERO, tl.float32) * scale
    if OFFSET != "none":
        weights += offset
    return weights.to(dtype)


@triton.jit
def sum_split(
    x, numbers, scales, offsets, factors, row, rows, x_stride, output, outputs, inputs, steps, begin, end,
    KIND: tl.constexpr, ZERO: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, BY_OUTPUT: tl.constexpr,
    GROUP_STEPS: tl.constexpr, OFFSET: tl.constexpr, FACTORS: tl.constexpr, SUPERBLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Return the sums [ROWS, COLUMNS] of the steps begin to end; with ROUNDED of weights in the type of x."""
    inner = tl.arange(0, WIDTH)
    valid = output < outputs
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(begin, end):
        offset_of_step = _place(step, output, steps, outputs, BY_OUTPUT) * WIDTH
        packed = tl.load(numbers + offset_of_step[:, None] + inner[None, :], mask=valid[:, None], other=0)
        k = step * STEP + inner[None, :]
        at = x + row[:, None] * x_stride + k
        first = tl.load(at, mask=(row < rows)[:, None] & (k < inputs), other=0.0)
        scale, offset = _scale_of(
            scales, offsets, factors, output, outputs, valid, step,
            STEP, GROUP_STEPS, OFFSET, FACTORS, SUPERBLOCK,
        )  # fmt: skip
        if WIDTH < STEP:
            # A byte has a number of the first half of the step, and one of the second half.
            second = tl.load(at + WIDTH, mask=(row < rows)[:, None] & (k + WIDTH < inputs), other=0.0)
        if ROUNDED:
            if WIDTH < STEP:
                low = _weights(packed & 15, scale[:, None], offset[:, None], KIND, ZERO, OFFSET, first.dtype)
                total = tl.dot(first, tl.trans(low), total)
                high = _weights(packed >> 4, scale[:, None], offset[:, None], KIND, ZERO, OFFSET, first.dtype)
                total = tl.dot(second, tl.trans(high), total)
            else:
                wide = _weights(packed, scale[:, None], offset[:, None], KIND, ZERO, OFFSET, first.dtype)
                total = tl.dot(first, tl.trans(wide), total)
        else:
            if WIDTH < STEP:
                low = _floats(packed & 15, KIND, ZERO, first.dtype)
                products = tl.dot(first, tl.trans(low), input_precision="ieee")
                high = _floats(packed >> 4, KIND, ZERO, first.dtype)
                products = tl.dot(second, tl.trans(high), products, input_precision="ieee")
            else:
                wide = _floats(packed, KIND, ZERO, first.dtype)
                products = tl.dot(first, tl.trans(wide), input_precision="ieee")
            total += products * scale[None, :]
        if OFFSET != "none" and not ROUNDED:
            inputs_sum = tl.sum(first.to(tl.float32), axis=1)
            if WIDTH < STEP:
                inputs_sum += tl.sum(second.to(tl.float32), axis=1)
            total += inputs_sum[:, None] * offset[None, :]
    return total


@triton.jit
def _store(total, bias, result, row, rows, output, outputs, result_stride, BIAS: tl.constexpr):
    valid = output < outputs
    if BIAS:
        total += tl.load(bias + output, mask=valid, other=0.0).to(tl.float32)[None, :]
    mask = (row < rows)[:, None] & valid[None, :]
    at = row[:, None] * result_stride + output[None, :]
    tl.store(result + at, total.to(result.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x, numbers, scales, offsets, factors, bias, result, sums, rows, x_stride, result_stride, outputs, inputs,
    steps,
    PARTIAL: tl.constexpr, BIAS: tl.constexpr, SPLIT_STEPS: tl.constexpr,
    KIND: tl.constexpr, ZERO: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    BY_OUTPUT: tl.constexpr, GROUP_STEPS: tl.constexpr, OFFSET: tl.constexpr, FACTORS: tl.constexpr,
    SUPERBLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows with a tile of outputs; with PARTIAL, one split of the inputs."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    output = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    first = tl.program_id(2)
    last = first + 1 if PARTIAL else tl.cdiv(steps, SPLIT_STEPS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for split in range(first, last):
        total += sum_split(
            x, numbers, scales, offsets, factors, row, rows, x_stride, output, outputs, inputs, steps,
            split * SPLIT_STEPS, tl.minimum(steps, (split + 1) * SPLIT_STEPS),
            KIND, ZERO, STEP, WIDTH, BY_OUTPUT, GROUP_STEPS, OFFSET, FACTORS, SUPERBLOCK, ROWS, COLUMNS,
            ROUNDED,
        )  # fmt: skip
    if PARTIAL:
        at = (first * rows + row)[:, None] * outputs + output[None, :]
        tl.store(sums + at, total, mask=(row < rows)[:, None] & (output < outputs)[None, :])
    else:
        _store(total, bias, result, row, rows, output, outputs, result_stride, BIAS)


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
def _multiply_row(
    x, numbers, scales, offsets, factors, bias, result, outputs, inputs, steps,
    BIAS: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    BY_OUTPUT: tl.constexpr, GROUP_STEPS: tl.constexpr, OFFSET: tl.constexpr, FACTORS: tl.constexpr,
    SUPERBLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Compute OUTPUTS numbers of the product with one row, STEPS steps at a time."""
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    inner = tl.arange(0, WIDTH)
    total = tl.zeros([STEPS, OUTPUTS], tl.float32)
    for begin in range(0, steps, STEPS):
        step = begin + tl.arange(0, STEPS)
        valid = (step < steps)[:, None] & (output < outputs)[None, :]
        at = _place(step.to(tl.int64)[:, None], output[None, :], steps, outputs, BY_OUTPUT) * WIDTH
        packed = tl.load(numbers + at[:, :, None] + inner[None, None, :], mask=valid[:, :, None], other=0)
        k = step[:, None] * STEP + inner[None, :]
        first = tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32)
        if WIDTH < STEP:
            second = tl.load(x + k + WIDTH, mask=k + WIDTH < inputs, other=0.0).to(tl.float32)
            products = _floats(packed & 15, KIND, ZERO, tl.float32) * first[:, None, :]
            products += _floats(packed >> 4, KIND, ZERO, tl.float32) * second[:, None, :]
        else:
            products = _floats(packed, KIND, ZERO, tl.float32) * first[:, None, :]
        scale, offset = _scale_of(
            scales, offsets, factors, output[None, :], outputs, valid, step[:, None],
            STEP, GROUP_STEPS, OFFSET, FACTORS, SUPERBLOCK,
        )  # fmt: skip
        total += tl.sum(products, axis=2) * scale
        if OFFSET != "none":
            inputs_sum = tl.sum(first, axis=1)
            if WIDTH < STEP:
                inputs_sum += tl.sum(second, axis=1)
            total += inputs_sum[:, None] * offset
    product = tl.sum(total, axis=0)
    used = output < outputs
    if BIAS:
        product += tl.load(bias + output, mask=used, other=0.0).to(tl.float32)
    tl.store(result + output, product.to(result.dtype.element_ty), mask=used)


@triton.jit
def _expand(
    numbers, scales, offsets, factors, weights, outputs, inputs, steps,
    KIND: tl.constexpr, ZERO: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    BY_OUTPUT: tl.constexpr, GROUP_STEPS: tl.constexpr, OFFSET: tl.constexpr, FACTORS: tl.constexpr,
    SUPERBLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write OUTPUTS rows of STEPS steps to weights [outputs, inputs]."""
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    inner = tl.arange(0, WIDTH)
    step = tl.program_id(1) * STEPS + tl.arange(0, STEPS)
    valid = (step < steps)[:, None] & (output < outputs)[None, :]
    at = _place(step.to(tl.int64)[:, None], output[None, :], steps, outputs, BY_OUTPUT) * WIDTH
    packed = tl.load(numbers + at[:, :, None] + inner[None, None, :], mask=valid[:, :, None], other=0)
    scale, offset = _scale_of(
        scales, offsets, factors, output[None, :], outputs, valid, step[:, None],
        STEP, GROUP_STEPS, OFFSET, FACTORS, SUPERBLOCK,
    )  # fmt: skip
    scale, offset = scale[:, :, None], offset[:, :, None]
    k = (step[:, None] * STEP + inner[None, :])[:, None, :]
    to = weights + output[None, :, None] * inputs + k
    dtype: tl.constexpr = weights.dtype.element_ty
    if WIDTH < STEP:
        low = _weights(packed & 15, scale, offset, KIND, ZERO, OFFSET, dtype)
        tl.store(to, low, mask=valid[:, :, None] & (k < inputs))
        high = _weights(packed >> 4, scale, offset, KIND, ZERO, OFFSET, dtype)
        tl.store(to + WIDTH, high, mask=valid[:, :, None] & (k + WIDTH < inputs))
    else:
        wide = _weights(packed, scale, offset, KIND, ZERO, OFFSET, dtype)
        tl.store(to, wide, mask=valid[:, :, None] & (k < inputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """Outputs in one format, in the order in which the kernel reads them."""

    numbers: Tensor
    """[steps, outputs, bytes of a step]; in memory [outputs, steps, bytes] with a `recipe`."""
    scales: Tensor
    """[groups, outputs]"""
    offsets: Tensor | None
    """[groups, outputs] zeros or minima."""
    factors: Tensor | None
    """[superblocks, 2, outputs]"""
    constants: dict[str, Any]
    inputs: int
    recipe: scaled.Recipe | None = None
    """How many rows are multiplied in FP8; None: they are not."""

    @property
    def outputs(self) -> int:
        return self.numbers.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What kernels read. They ignore the last two where a format lacks them."""
        offsets = self.scales if self.offsets is None else self.offsets
        factors = self.scales if self.factors is None else self.factors
        return self._in_memory, self.scales, offsets, factors

    @property
    def _in_memory(self) -> Tensor:
        return self.numbers if self.recipe is None else self.numbers.transpose(0, 1)

    def multiply(self, x: Tensor, bias: Tensor | None, result: Tensor, shared_memory: int) -> None:
        """Write the product of x [T, inputs] to `result` [T, outputs], whose rows may be apart."""
        if len(x) == 1:
            self._multiply_row(x, bias, result)
        else:
            self._multiply_tiles(x, bias, result, shared_memory)

    def _multiply_row(self, x: Tensor, bias: Tensor | None, result: Tensor) -> None:
        _multiply_row[(triton.cdiv(self.outputs, ROW_OUTPUTS),)](
            x,
            *self.tensors,
            x if bias is None else bias,
            result,
            self.outputs,
            self.inputs,
            len(self.numbers),
            BIAS=bias is not None,
            SUPERBLOCK=SUPERBLOCK,
            OUTPUTS=ROW_OUTPUTS,
            STEPS=max(1, ROW_BYTES // ROW_OUTPUTS // self.constants["WIDTH"]),
            enable_fp_fusion=True,
            **self.constants,
        )

    def _multiply_tiles(self, x: Tensor, bias: Tensor | None, result: Tensor, shared_memory: int) -> None:
        rows, steps = len(x), len(self.numbers)
        step, width = self.constants["STEP"], self.constants["WIDTH"]
        shape = tile_of(rows, x.element_size(), step, width, shared_memory)
        split_steps = SPLIT // self.constants["STEP"]
        splits = triton.cdiv(steps, split_steps)
        row_tiles, tiles = triton.cdiv(rows, shape["ROWS"]), triton.cdiv(self.outputs, shape["COLUMNS"])
        partial = row_tiles * tiles < PROGRAMS and splits > 1
        sums = x.new_empty((splits, rows, self.outputs), dtype=torch.float32) if partial else result
        _multiply[(row_tiles, tiles, splits if partial else 1)](
            x,
            *self.tensors,
            x if bias is None else bias,
            result,
            sums,
            rows,
            x.stride(0),
            result.stride(0),
            self.outputs,
            self.inputs,
            steps,
            PARTIAL=partial,
            BIAS=bias is not None,
            SPLIT_STEPS=split_steps,
            SUPERBLOCK=SUPERBLOCK,
            enable_fp_fusion=True,
            **shape,
            **self.constants,
        )
        if partial:
            _add_splits[(rows, triton.cdiv(self.outputs, SUMMED))](
                sums,
                x if bias is None else bias,
                result,
                rows,
                result.stride(0),
                self.outputs,
                splits,
                BIAS=bias is not None,
                ROWS=1,
                COLUMNS=SUMMED,
                enable_fp_fusion=True,
            )

    def multiply_scaled(self, x: Tensor) -> Tensor:
        """Return the product of x [T, inputs], rounded to FP8: [T, outputs]. Only with a `recipe`."""
        assert self.recipe is not None
        # Numbers that no instruction converts have scales times `FLOAT8_FACTOR`.
        factor = 1 / FLOAT8_FACTOR if self.constants["KIND"] == "float8" else 1.0
        return scaled.multiply(x, self._in_memory.flatten(1), self.scales, self.recipe, factor)

    def expand(self, weights: Tensor) -> None:
        """Write the matrix to `weights` [outputs, inputs], contiguous, of 2 bytes per number."""
        at_once = max(1, ROW_BYTES // EXPANDED_OUTPUTS // self.constants["WIDTH"])
        _expand[(triton.cdiv(self.outputs, EXPANDED_OUTPUTS), triton.cdiv(len(self.numbers), at_once))](
            *self.tensors,
            weights,
            self.outputs,
            self.inputs,
            len(self.numbers),
            SUPERBLOCK=SUPERBLOCK,
            OUTPUTS=EXPANDED_OUTPUTS,
            STEPS=at_once,
            enable_fp_fusion=True,
            **self.constants,
        )

    def values(self, outputs: Tensor) -> Tensor:
        """Return the values [T, inputs] fp32 of the rows `outputs` [T] of the matrix."""
        kind, step = self.constants["KIND"], self.constants["STEP"]
        numbers = self.numbers[:, outputs].transpose(0, 1)  # [T, steps, bytes]
        if self.constants["WIDTH"] < step:
            numbers = torch.cat((numbers & 15, numbers >> 4), dim=2)
        if kind == "float4":
            bits = numbers.to(torch.int16)
            numbers = ((bits & 8) << 12 | (bits & 7) << 9).view(torch.float16).to(torch.float32) * 2**14
        if kind == "e4m3":
            numbers = numbers.view(torch.float8_e4m3fn)
        if kind == "float8":
            bits = numbers.to(torch.int16)
            numbers = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).view(torch.float16)
        numbers = numbers.to(torch.float32) - self.constants["ZERO"]
        number = torch.arange(numbers.shape[1], device=outputs.device)
        group, block = number // self.constants["GROUP_STEPS"], number * step // SUPERBLOCK

        def of_steps(tensor: Tensor) -> Tensor:
            return tensor[:, outputs].T[:, group, None].to(torch.float32)

        scales = of_steps(self.scales)
        factors = None if self.factors is None else self.factors[:, :, outputs].to(torch.float32)
        if factors is not None:
            scales = scales * factors[block, 0].T[..., None]
        values: Tensor = numbers * scales
        if self.offsets is not None:
            offsets = of_steps(self.offsets)
            if self.constants["OFFSET"] == "zeros":
                offsets = -offsets * scales
            elif factors is not None:
                offsets = offsets * factors[block, 1].T[..., None]
            values += offsets
        return values.flatten(1)[:, : self.inputs].contiguous()  # without the padding of a row's last step


def tile_of(rows: int, itemsize: int, step: int, width: int, shared_memory: int) -> dict[str, Any]:
    """
    Return the shape of a tile for so many rows.

    `itemsize`: bytes of an input. `step`: numbers of a step, in `width` bytes. `shared_memory`: bytes that
    the device has for a program, 0 if they are not known. Larger tiles were chosen by measurements on an
    H200, see benchmarks/LOG.md.
    """
    large = shared_memory >= LARGE_TILE_MEMORY and itemsize == 2
    rounded = rows > FEW_ROWS and large
    if rows <= 16:
        shape = (16, 64, 4)
    elif not rounded:
        shape = (FEW_ROWS, 128 if large else 64, 4)
    elif rows <= 64 or step == width == WIDE_STEP:
        shape = (64, 128, 4)
    else:
        shape = (128, 64, 8) if step == WIDE_STEP else (128, 128, 8)
    return {
        "ROWS": shape[0],
        "COLUMNS": shape[1],
        "num_warps": shape[2],
        "num_stages": STAGES,
        "ROUNDED": rounded,
    }


class QuantizedLinear:
    """A quantized matrix on an accelerator: implementation of `Linear` and of `Table`."""

    def __init__(self, matrix: Quantized, bias: Tensor | None = None, shared_memory: int = 0) -> None:
        """`matrix` is on the device. Its memory is not used any more. `shared_memory`: as for `tile_of`."""
        self._shared_memory = shared_memory
        self.outputs, self._inputs = matrix.shape
        self._bias = bias
        self._parts = [
            arranged(unpack(part, matrix.inputs), _recipe(part, matrix.inputs))
            for part in merged(matrix.parts)
        ]
        self._scaled = all(part.recipe is not None for part in self._parts)

    def __call__(self, x: Tensor) -> Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        if len(x) > EXPANDED_ROWS and x.element_size() == 2:
            return self._multiply_scaled(x) if self._scaled else self._multiply_expanded(x)
        result = torch.empty((len(x), self.outputs), dtype=x.dtype, device=x.device)
        for part, rows in self._rows_of_parts() if len(x) else ():
            bias = None if self._bias is None else self._bias[rows]
            part.multiply(x, bias, result[:, rows], self._shared_memory)
        return result

    def _multiply_scaled(self, x: Tensor) -> Tensor:
        products = [part.multiply_scaled(x) for part in self._parts]
        result = products[0] if len(products) == 1 else torch.cat(products, dim=1)
        return result if self._bias is None else result.add_(self._bias)

    def _multiply_expanded(self, x: Tensor) -> Tensor:
        weights = torch.empty((self.outputs, self._inputs), dtype=x.dtype, device=x.device)
        for part, rows in self._rows_of_parts():
            part.expand(weights[rows])
        return functional.linear(x, weights, self._bias)

    def _rows_of_parts(self) -> Iterator[tuple[Arranged, slice]]:
        """Yield each part with its rows of the matrix."""
        start = 0
        for part in self._parts:
            yield part, slice(start, start := start + part.outputs)

    @property
    def nbytes(self) -> int:
        tensors = (t for part in self._parts for t in (part.numbers, part.scales, part.offsets, part.factors))
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return the rows [T] of the matrix: [T, inputs] fp32. The matrix has one format."""
        (part,) = self._parts
        return part.values(rows)


def merged(parts: Sequence[QuantizedPart]) -> list[QuantizedPart]:
    """Join adjacent parts in one format, so that one launch computes them."""
    return [
        QuantizedPart(form, torch.cat([part.rows for part in alike]), group, rounds_inputs)
        for (form, group, rounds_inputs), alike in groupby(
            parts, lambda part: (part.format, part.group, part.rounds_inputs)
        )
    ]


def _recipe(part: QuantizedPart, inputs: int) -> scaled.Recipe | None:
    device = part.rows.device
    capability = None if device.type == "cpu" else torch.cuda.get_device_capability(device)
    recipe = scaled.recipe_of(part, inputs, capability, rocm=torch.version.hip is not None)
    return recipe if recipe is not None and scaled.works(device, recipe) else None


def converts_float8(device: torch.device) -> bool:
    """Return whether a device has instructions that widen float8 (e4m3): Ada, Hopper and later."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def arranged(unpacked: Unpacked, recipe: scaled.Recipe | None = None) -> Arranged:
    """Lay out the rows of a matrix, on their device. Those with a `recipe` have groups of whole steps."""
    numbers = unpacked.numbers
    outputs, inputs = numbers.shape
    one_group = unpacked.group >= inputs
    step = MOST_STEP if one_group else min(MOST_STEP, unpacked.group & -unpacked.group)
    steps = -(-inputs // step)
    kind: str = unpacked.floats or ("int8" if numbers.dtype == torch.int8 else "int4")
    scales = unpacked.scales
    if kind == "float8" and converts_float8(numbers.device):
        kind, scales = "e4m3", scales / FLOAT8_FACTOR
    padded = functional.pad(numbers, (0, steps * step - inputs)).view(outputs, steps, step)
    padded = padded.transpose(0, 1) if recipe is None else padded
    if kind in ("int4", "float4"):
        padded = padded[..., : step // 2] | padded[..., step // 2 :] << 4
    offsets = unpacked.minima if unpacked.zeros is None else unpacked.zeros
    factors = unpacked.factors
    padded = padded.contiguous()
    return Arranged(
        numbers=padded if recipe is None else padded.transpose(0, 1),
        scales=scales.T.contiguous(),
        offsets=None if offsets is None else offsets.T.contiguous(),
        factors=None if factors is None else factors.permute(1, 2, 0).contiguous(),
        inputs=inputs,
        constants={
            "KIND": kind,
            "ZERO": unpacked.zero,
            "STEP": step,
            "WIDTH": padded.shape[2],
            "BY_OUTPUT": recipe is not None,
            "GROUP_STEPS": steps if one_group else unpacked.group // step,
            "OFFSET": "none" if offsets is None else "minima" if unpacked.zeros is None else "zeros",
            "FACTORS": factors is not None,
        },
        recipe=recipe,
    )


@triton.jit(do_not_specialize=["share", "rows"])
def _multiply_quantized(
    x, numbers, scales, offsets, factors, biases, result, order, starts, share, rows, x_stride, outputs,
    all_outputs, inputs, steps,
    BIAS: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    BY_OUTPUT: tl.constexpr, GROUP_STEPS: tl.constexpr, OFFSET: tl.constexpr, FACTORS: tl.constexpr,
    SUPERBLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Multiply all pairs of one expert with a tile of its outputs."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.program_id(1).to(tl.int64)
    # A tile at the end of an expert reads outputs of the next one, and does not store them.
    output = expert * outputs + column
    last = tl.load(starts + expert + 1)
    for first in range(tl.load(starts + expert), last, ROWS):
        position = first + tl.arange(0, ROWS)
        paired = position < last
        pair = tl.load(order + position, mask=paired, other=0).to(tl.int64)
        row = tl.where(paired, pair // share, rows)
        total = sum_split(
            x, numbers, scales, offsets, factors, row, rows, x_stride, output, all_outputs, inputs, steps,
            0, steps,
            KIND, ZERO, STEP, WIDTH, BY_OUTPUT, GROUP_STEPS, OFFSET, FACTORS, SUPERBLOCK, ROWS, COLUMNS,
            ROUNDED,
        )  # fmt: skip
        valid = column < outputs
        if BIAS:
            total += tl.load(biases + output, mask=valid, other=0.0).to(tl.float32)[None, :]
        at = result + pair[:, None] * outputs + column[None, :]
        tl.store(at, total.to(result.dtype.element_ty), mask=paired[:, None] & valid[None, :])


class QuantizedExperts:
    """The quantized weights of all experts: implementation of `ExpertLinear` in one launch."""

    def __init__(self, matrix: Quantized, biases: Tensor | None, count: int, shared_memory: int = 0) -> None:
        """
        `matrix` has the outputs of `count` experts one after the other, in one format. `shared_memory`: as
        for `tile_of`.
        """
        self._shared_memory = shared_memory
        (part,) = merged(matrix.parts)
        self._weights = arranged(unpack(part, matrix.inputs))
        self._biases = biases
        self._count = count

    def __call__(self, x: Tensor, groups: ExpertGroups) -> Tensor:
        weights, pairs = self._weights, len(groups.order)
        outputs = weights.outputs // self._count
        result = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
        if pairs:
            x = x if x.stride(1) == 1 else x.contiguous()
            constants = weights.constants
            step, width = constants["STEP"], constants["WIDTH"]
            tile = tile_of(pairs // self._count, x.element_size(), step, width, self._shared_memory)
            _multiply_quantized[(triton.cdiv(outputs, tile["COLUMNS"]), self._count)](
                x,
                *weights.tensors,
                x if self._biases is None else self._biases,
                result,
                groups.order,
                groups.starts,
                pairs // len(x),
                len(x),
                x.stride(0),
                outputs,
                weights.outputs,
                weights.inputs,
                len(weights.numbers),
                BIAS=self._biases is not None,
                SUPERBLOCK=SUPERBLOCK,
                enable_fp_fusion=True,
                **tile,
                **constants,
            )
        return result
