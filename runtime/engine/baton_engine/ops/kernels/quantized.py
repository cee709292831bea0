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

Instructions are the limit, where numbers have few bits: `benchmarks/kernel_code.py` counts them. So numbers
are stored in words, of which one shift and one mask take two, and a step has several groups.

Inputs are divided at fixed positions into splits, whose sums are added in order. Where tiles are few, each
split is a program of its own, and a second kernel adds them: otherwise small matrices would occupy few
multiprocessors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

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

SPLIT = 1024
"""Inputs that are added before they are added to others. A multiple of all steps."""

STAGES, FEW_STAGES = 3, 4
"""Steps in shared memory: others are loaded while one is multiplied. Few rows have short steps."""

LARGE_TILE_MEMORY = 224 * 1024
"""Bytes of shared memory per program from which a device has larger tiles: H100, B200 and later."""

LEAST_ROWS = 8
"""Rows of a tile on devices with large tiles."""


@triton.jit
def _place(step, output, steps, outputs, BY_OUTPUT: tl.constexpr):
    """Return the place of a step of an output among all of them."""
    if BY_OUTPUT:
        return output * steps + step
    else:
        return step * outputs + output


@triton.jit
def _halves(bits, dtype: tl.constexpr):
    """Return the two numbers of 16 bits in each of `bits` [..., n] uint32, the low one first: [..., 2n]."""
    low = (bits & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    high = (bits >> 16).to(tl.uint16).to(dtype, bitcast=True)
    both = tl.join(low, high)
    if len(bits.shape) == 3:
        return tl.reshape(both, (bits.shape[0], bits.shape[1], bits.shape[2] * 2))
    else:
        return tl.reshape(both, (bits.shape[0], bits.shape[1] * 2))


@triton.jit
def _floats(
    packed, offset, PART: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """
    Widen the numbers of one part of a step, less ZERO or zeros in `offset`, exactly.

    Those of float8 are divided by `FLOAT8_FACTOR`; those of e4m3 are not. Of others, two in a word are
    computed at once: or-ed to the bits of 128 (bfloat16) or 1024 (float16), a small integer is added to it.
    Devices convert integers at an eighth of that rate.
    """
    if KIND == "float8":
        return float8.widen(packed, dtype)
    elif KIND == "e4m3":
        # Devices convert float16 to bfloat16 at an eighth of the rate of the two conversions.
        return packed.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32).to(dtype)
    else:
        SHORT: tl.constexpr = dtype == tl.bfloat16  # 7 bits of mantissa
        half: tl.constexpr = tl.bfloat16 if SHORT else tl.float16
        ONE: tl.constexpr = 0x43004300 if SHORT else 0x64006400
        BASE: tl.constexpr = 128 if SHORT else 1024
        words = packed.to(tl.uint32, bitcast=True)
        if KIND == "float4":
            # Bits of e2m1, moved to those of a wider float, are the number divided by a power of 2.
            MOVED: tl.constexpr = (6 if SHORT else 9) - 4 * PART
            FACTOR: tl.constexpr = 2.0**126 if SHORT else 2.0**14
            sign = words << (12 - 4 * PART) & 0x80008000
            magnitude = words >> -MOVED if MOVED < 0 else words << MOVED
            magnitude = magnitude & (0x01C001C0 if SHORT else 0x0E000E00)
            return (_halves(sign | magnitude, half) * FACTOR).to(dtype)
        elif KIND == "int4":
            numbers = _halves(words >> 4 * PART & 0x000F000F | ONE, half)
            if OFFSET == "zeros":
                return (numbers - (offset + BASE).to(half)).to(dtype)
            else:
                return (numbers - (BASE + ZERO)).to(dtype)
        elif SHORT:
            octets = words >> 8 * PART
            numbers = _halves(octets & 0x007F007F | ONE, half)
            return numbers - _halves(octets & 0x00800080 | ONE, half)
        else:
            # The sign's bit is inverted, which adds 128.
            numbers = _halves((words >> 8 * PART & 0x00FF00FF) ^ (ONE | 0x00800080), half)
            return (numbers - (BASE + 128)).to(dtype)


@triton.jit
def _scale_of(
    scales, offsets, factors, output, outputs, valid, step, part,
    STEP: tl.constexpr, PARTS: tl.constexpr, GROUP_PARTS: tl.constexpr, OFFSET: tl.constexpr,
    FACTORS: tl.constexpr, SUPERBLOCK: tl.constexpr,
):  # fmt: skip
    """Return scale and offset, or zero, of each output in a part of a step, in fp32."""
    offset_of_group = (step * PARTS + part) // GROUP_PARTS * outputs + output
    scale = tl.load(scales + offset_of_group, mask=valid, other=0).to(tl.float32)
    offset = scale * 0
    if OFFSET != "none":
        offset = tl.load(offsets + offset_of_group, mask=valid, other=0).to(tl.float32)
    if FACTORS:
        factor = factors + step * STEP // SUPERBLOCK * 2 * outputs + output
        scale *= tl.load(factor, mask=valid, other=0).to(tl.float32)
        offset *= tl.load(factor + outputs, mask=valid, other=0).to(tl.float32)
    return scale, offset


@triton.jit
def _weights(
    packed, scale, offset, PART: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Return the weights of one part of a step, rounded once."""
    weights = _floats(packed, offset, PART, KIND, ZERO, OFFSET, tl.float32) * scale
    if OFFSET == "minima":
        weights += offset
    return weights.to(dtype)


@triton.jit
def sum_split(
    x, numbers, scales, offsets, factors, row, rows, x_stride, output, outputs, inputs, steps, begin, end,
    KIND: tl.constexpr, ZERO: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, BY_OUTPUT: tl.constexpr, PARTS: tl.constexpr, GROUP_PARTS: tl.constexpr,
    RUN: tl.constexpr, OFFSET: tl.constexpr, FACTORS: tl.constexpr, SUPERBLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """
    Return the sums [COLUMNS, ROWS] of the steps begin to end; with ROUNDED of weights in the type of x.

    Weights are the first operand: tensor cores take it from registers, where it is computed.
    """
    INPUTS: tl.constexpr = STEP // PARTS
    inner = tl.arange(0, WIDTH)
    k = tl.arange(0, INPUTS)
    # Instead of masks, rows and outputs beyond the last ones are computed again, and not stored.
    row = tl.minimum(row, rows - 1)
    output = tl.minimum(output, outputs - 1)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in range(begin, end):
        offset_of_step = _place(step, output, steps, outputs, BY_OUTPUT) * WIDTH
        packed = tl.load(numbers + offset_of_step[:, None] + inner[None, :])
        for part in tl.static_range(PARTS):
            at = step * STEP + part * INPUTS + k
            if EVEN:
                values = tl.load(x + row[None, :] * x_stride + at[:, None])
            else:
                inside = (at < inputs)[:, None]
                values = tl.load(x + row[None, :] * x_stride + at[:, None], mask=inside, other=0.0)
            if part % RUN == 0:
                scale, offset = _scale_of(
                    scales, offsets, factors, output, outputs, True, step, part,
                    STEP, PARTS, GROUP_PARTS, OFFSET, FACTORS, SUPERBLOCK,
                )  # fmt: skip
            if ROUNDED:
                weights = _weights(
                    packed, scale[:, None], offset[:, None], part, KIND, ZERO, OFFSET, values.dtype
                )
                total = tl.dot(weights, values, total)
            else:
                weights = _floats(packed, offset[:, None], part, KIND, ZERO, OFFSET, values.dtype)
                if part % RUN == 0:
                    products = tl.dot(weights, values, input_precision="ieee")
                else:
                    products = tl.dot(weights, values, products, input_precision="ieee")
                if OFFSET == "minima":
                    # The sums of inputs, once for each output: moving them to all threads takes longer.
                    ones = tl.full([COLUMNS, INPUTS], 1.0, values.dtype)
                    total += tl.dot(ones, values, input_precision="ieee") * offset[:, None]
                if part % RUN == RUN - 1:
                    total += products * scale[:, None]
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
    EVEN: tl.constexpr, BY_OUTPUT: tl.constexpr, PARTS: tl.constexpr, GROUP_PARTS: tl.constexpr,
    RUN: tl.constexpr, OFFSET: tl.constexpr, FACTORS: tl.constexpr, SUPERBLOCK: tl.constexpr,
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
            split * SPLIT_STEPS, tl.minimum(steps, (split + 1) * SPLIT_STEPS),
            KIND, ZERO, STEP, WIDTH, EVEN, BY_OUTPUT, PARTS, GROUP_PARTS, RUN, OFFSET, FACTORS,
            SUPERBLOCK, ROWS, COLUMNS, ROUNDED,
        )  # fmt: skip
    total = tl.trans(total)
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
def _sums(values, COUNT: tl.constexpr):
    """Add COUNT numbers that are one behind the other: [..., n] to [..., n / COUNT]."""
    apart = tl.reshape(values, (values.shape[0], values.shape[1], values.shape[2] // COUNT, COUNT))
    return tl.sum(apart, axis=3)


@triton.jit
def _multiply_row(
    x, numbers, scales, offsets, factors, bias, result, outputs, inputs, steps,
    BIAS: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, BY_OUTPUT: tl.constexpr, PARTS: tl.constexpr, GROUP_PARTS: tl.constexpr,
    RUN: tl.constexpr, OFFSET: tl.constexpr, FACTORS: tl.constexpr, SUPERBLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Compute OUTPUTS numbers of the product with one row, STEPS steps at a time."""
    INPUTS: tl.constexpr = STEP // PARTS
    TOGETHER: tl.constexpr = 8 if PARTS > 1 else 16
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    inner = tl.arange(0, WIDTH)
    # Outputs come first, so that each thread has all of them, and reads an input once for all.
    total = tl.zeros([OUTPUTS, STEPS, INPUTS // TOGETHER], tl.float32)
    for begin in range(0, steps, STEPS):
        step = begin + tl.arange(0, STEPS)
        valid = (output < outputs)[:, None] & (step < steps)[None, :]
        at = _place(step.to(tl.int64)[None, :], output[:, None], steps, outputs, BY_OUTPUT) * WIDTH
        packed = tl.load(numbers + at[:, :, None] + inner[None, None, :], mask=valid[:, :, None], other=0)
        for part in tl.static_range(PARTS):
            k = step[:, None] * STEP + part * INPUTS + tl.arange(0, INPUTS)[None, :]
            values = tl.load(x + k, mask=k < inputs, other=0.0)[None, :, :].to(tl.float32)
            if part % RUN == 0:
                scale, offset = _scale_of(
                    scales, offsets, factors, output[:, None], outputs, valid, step[None, :], part,
                    STEP, PARTS, GROUP_PARTS, OFFSET, FACTORS, SUPERBLOCK,
                )  # fmt: skip
                scale, offset = scale[:, :, None], offset[:, :, None]
            weighted = _floats(packed, offset, part, KIND, ZERO, OFFSET, tl.float32) * values
            if part % RUN == 0:
                products = weighted
            else:
                products += weighted
            if part % RUN == RUN - 1:
                total += _sums(products, TOGETHER) * scale
            if OFFSET == "minima":
                total += _sums(tl.broadcast_to(values, products.shape), TOGETHER) * offset
    product = tl.sum(tl.sum(total, axis=2), axis=1)
    used = output < outputs
    if BIAS:
        product += tl.load(bias + output, mask=used, other=0.0).to(tl.float32)
    tl.store(result + output, product.to(result.dtype.element_ty), mask=used)


@triton.jit
def _expand(
    numbers, scales, offsets, factors, weights, outputs, inputs, steps,
    KIND: tl.constexpr, ZERO: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, BY_OUTPUT: tl.constexpr, PARTS: tl.constexpr, GROUP_PARTS: tl.constexpr,
    RUN: tl.constexpr, OFFSET: tl.constexpr, FACTORS: tl.constexpr, SUPERBLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write OUTPUTS rows of STEPS steps to weights [outputs, inputs]."""
    INPUTS: tl.constexpr = STEP // PARTS
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    inner = tl.arange(0, WIDTH)
    step = tl.program_id(1) * STEPS + tl.arange(0, STEPS)
    valid = (step < steps)[:, None] & (output < outputs)[None, :]
    at = _place(step.to(tl.int64)[:, None], output[None, :], steps, outputs, BY_OUTPUT) * WIDTH
    packed = tl.load(numbers + at[:, :, None] + inner[None, None, :], mask=valid[:, :, None], other=0)
    for part in tl.static_range(PARTS):
        scale, offset = _scale_of(
            scales, offsets, factors, output[None, :], outputs, valid, step[:, None], part,
            STEP, PARTS, GROUP_PARTS, OFFSET, FACTORS, SUPERBLOCK,
        )  # fmt: skip
        k = (step[:, None] * STEP + part * INPUTS + tl.arange(0, INPUTS)[None, :])[:, None, :]
        expanded = _weights(
            packed, scale[:, :, None], offset[:, :, None], part, KIND, ZERO, OFFSET, weights.dtype.element_ty
        )
        tl.store(
            weights + output[None, :, None] * inputs + k, expanded, mask=valid[:, :, None] & (k < inputs)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """Outputs in one format, in the order in which the kernel reads them."""

    numbers: Tensor
    """
    [steps, outputs, bytes of a step] uint8 of float8, in memory [outputs, steps, bytes] with a `recipe`; of
    others [steps, outputs, words of a step] int32, see `_words`.
    """
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

    @property
    def _step_bytes(self) -> int:
        """Bytes of a step of one output."""
        return int(self.constants["WIDTH"]) * self.numbers.element_size()

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
            STEPS=max(1, ROW_BYTES // ROW_OUTPUTS // self._step_bytes),
            enable_fp_fusion=True,
            **self.constants,
        )

    def _multiply_tiles(self, x: Tensor, bias: Tensor | None, result: Tensor, shared_memory: int) -> None:
        rows, steps = len(x), len(self.numbers)
        shape = tile_of(rows, x.element_size(), shared_memory)
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
        at_once = max(1, ROW_BYTES // EXPANDED_OUTPUTS // self._step_bytes)
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
        kind, inputs = self.constants["KIND"], self.constants["STEP"] // self.constants["PARTS"]
        numbers = self.numbers[:, outputs].transpose(0, 1).contiguous()  # [T, steps, bytes or words]
        if self.constants["PARTS"] > 1:
            numbers = _octets(numbers, kind in FOUR_BITS)
        if kind == "float4":
            bits = numbers.to(torch.int16)
            numbers = ((bits & 8) << 12 | (bits & 7) << 9).view(torch.float16).to(torch.float32) * 2**14
        if kind == "int8":
            numbers = numbers.view(torch.int8)
        if kind == "e4m3":
            numbers = numbers.view(torch.float8_e4m3fn)
        if kind == "float8":
            bits = numbers.to(torch.int16)
            numbers = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).view(torch.float16)
        numbers = (numbers.to(torch.float32) - self.constants["ZERO"]).view(len(numbers), -1, inputs)
        part = torch.arange(numbers.shape[1], device=outputs.device)
        group, block = part // self.constants["GROUP_PARTS"], part * inputs // SUPERBLOCK

        def of_parts(tensor: Tensor) -> Tensor:
            return tensor[:, outputs].T[:, group, None].to(torch.float32)

        scales = of_parts(self.scales)
        offsets = None if self.offsets is None else of_parts(self.offsets)
        if self.factors is not None:
            factors = self.factors[:, :, outputs].to(torch.float32)[block]
            scales = scales * factors[:, 0].T[..., None]
            offsets = None if offsets is None else offsets * factors[:, 1].T[..., None]
        if offsets is not None and self.constants["OFFSET"] == "zeros":
            numbers = numbers - offsets
        values: Tensor = numbers * scales
        if offsets is not None and self.constants["OFFSET"] == "minima":
            values += offsets
        return values.flatten(1)[:, : self.inputs].contiguous()  # without the padding of a row's last step


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
    kind: str = unpacked.floats or ("int8" if numbers.dtype == torch.int8 else "int4")
    parts = 4 if kind in FOUR_BITS else 2 if kind == "int8" else 1
    group = unpacked.group if unpacked.group < inputs else MOST_STEP
    part = min(MOST_STEP // parts, group & -group)
    steps = -(-inputs // (part * parts))
    # A group is several parts. Parts behind the inputs have the scales of the last group.
    group_parts = group // part if unpacked.group < inputs else steps * parts
    scales = unpacked.scales
    if kind == "float8" and converts_float8(numbers.device):
        kind, scales = "e4m3", scales / FLOAT8_FACTOR
    padding = steps * parts * part - inputs
    padded = functional.pad(numbers, (0, padding)).view(outputs, steps, -1)
    offsets = unpacked.minima if unpacked.zeros is None else unpacked.zeros
    more = -(-steps * parts // group_parts) - scales.shape[1]

    def by_group(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, *[tensor[:, -1:]] * more], dim=1).T.contiguous()

    packed = padded if parts == 1 else _words(padded, kind in FOUR_BITS)
    packed = packed.transpose(0, 1) if recipe is None else packed
    factors = unpacked.factors
    return Arranged(
        numbers=packed.contiguous() if recipe is None else packed.contiguous().transpose(0, 1),
        scales=by_group(scales),
        offsets=None if offsets is None else by_group(offsets),
        factors=None if factors is None else factors.permute(1, 2, 0).contiguous(),
        inputs=inputs,
        constants={
            "KIND": kind,
            "ZERO": unpacked.zero,
            "STEP": part * parts,
            "WIDTH": packed.shape[2],
            "EVEN": padding == 0,
            "BY_OUTPUT": recipe is not None,
            "PARTS": parts,
            "GROUP_PARTS": group_parts,
            "RUN": math.gcd(group_parts, parts),
            "OFFSET": "none" if offsets is None else "minima" if unpacked.zeros is None else "zeros",
            "FACTORS": factors is not None,
        },
        recipe=recipe,
    )


FOUR_BITS = ("int4", "float4")
"""Kinds of numbers of which a byte has two."""


def _words(numbers: Tensor, four_bits: bool) -> Tensor:
    """
    Pack steps [outputs, steps, numbers] of bytes to words [outputs, steps, words] int32.

    Part p of a step are the numbers at bits p * 4 (or p * 8) and 16 more of each word, so a shift and a mask
    take two numbers that follow one another.
    """
    if four_bits:
        parts = numbers.unflatten(2, (2, 2, -1))
        numbers = (parts[:, :, :, 0] | parts[:, :, :, 1] << 4).flatten(2)
    octets = numbers.view(torch.uint8).unflatten(2, (2, -1, 2))  # part or two, word, half of the word
    words: Tensor = octets.permute(0, 1, 3, 4, 2).flatten(2).contiguous().view(torch.int32)
    return words


def _octets(words: Tensor, four_bits: bool) -> Tensor:
    """Unpack what `_words` packed, to uint8."""
    octets: Tensor = words.view(torch.uint8).unflatten(2, (-1, 2, 2)).permute(0, 1, 4, 2, 3)
    if four_bits:
        octets = torch.stack((octets & 15, octets >> 4), dim=3)
    return octets.flatten(2)
