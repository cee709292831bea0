"""
Quantized matrices in an accelerator's memory: how numbers are packed, and how kernels widen them to floats.

The inputs of an output are divided into steps, which a kernel reads at once. Numbers of 4 and 8 bits are
stored in words, of which one shift and one mask take two. Such a step has several parts, one for each shift.
Each part of a step is in one group, whose numbers have one scale. `Layout` has the sizes.

Instructions are the limit, where numbers have few bits: `benchmarks/kernel_code.py` counts them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from baton_engine.ops.kernels import float8, scaled
from baton_engine.quantized import FLOAT8_FACTOR, SUPERBLOCK, QuantizedPart, Unpacked

MOST_STEP = 128
"""Inputs per step at most."""

FOUR_BITS = ("int4", "float4")
"""Kinds of numbers of which a byte has two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes and kinds, for which kernels are compiled."""

    kind: Literal["int4", "int8", "float4", "float8", "e4m3"]
    """What the numbers are. Those of float8 are divided by `FLOAT8_FACTOR`; those of e4m3 are not."""
    zero: int
    """The number that stands for zero in all groups."""
    offset: Literal["none", "zeros", "minima"]
    """What a group has besides its scale: the number that stands for zero, or the value of number 0."""
    superblock: int
    """Inputs whose scales and offsets are multiplied by one factor each. 0: by none."""
    step: int
    """Inputs of a step."""
    parts: int
    """Parts of a step."""
    group_parts: int
    """Parts of a group."""
    width: int
    """Bytes (float8) or words of a step."""
    even: bool
    """Whether the inputs fill their steps."""
    by_output: bool
    """Whether the steps of an output are adjacent in memory, or the outputs of a step."""

    @property
    def part(self) -> int:
        """Inputs of a part."""
        return self.step // self.parts

    @property
    def run(self) -> int:
        """Adjacent parts of a step that are in one group."""
        return math.gcd(self.group_parts, self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """Outputs in one format."""

    numbers: Tensor
    """
    [steps, outputs, width] uint8 of float8, int32 of others, see `_words`. With `by_output`, in memory
    [outputs, steps, width].
    """
    scales: Tensor
    """[groups, outputs]"""
    offsets: Tensor | None
    """[groups, outputs] zeros or minima."""
    factors: Tensor | None
    """[superblocks, 2, outputs]"""
    inputs: int
    layout: Layout
    recipe: scaled.Recipe | None
    """How many rows are multiplied in FP8; None: they are not."""

    @property
    def steps(self) -> int:
        return self.numbers.shape[0]

    @property
    def outputs(self) -> int:
        return self.numbers.shape[1]

    @property
    def step_bytes(self) -> int:
        """Bytes of a step of one output."""
        return self.layout.width * self.numbers.element_size()

    @property
    def nbytes(self) -> int:
        tensors = (self.numbers, self.scales, self.offsets, self.factors)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def in_memory(self) -> Tensor:
        """The numbers as they are in memory, contiguous."""
        return self.numbers.transpose(0, 1) if self.layout.by_output else self.numbers

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What kernels read. They ignore the last two where a format lacks them."""
        offsets = self.scales if self.offsets is None else self.offsets
        factors = self.scales if self.factors is None else self.factors
        return self.in_memory, self.scales, offsets, factors

    def values(self, outputs: Tensor) -> Tensor:
        """Return the values [T, inputs] fp32 of the rows `outputs` [T] of the matrix."""
        layout = self.layout
        numbers = self.numbers[:, outputs].transpose(0, 1).contiguous()  # [T, steps, width]
        if layout.parts > 1:
            numbers = _octets(numbers, layout.kind in FOUR_BITS)
        if layout.kind == "float4":
            bits = numbers.to(torch.int16)
            numbers = ((bits & 8) << 12 | (bits & 7) << 9).view(torch.float16).to(torch.float32) * 2**14
        if layout.kind == "int8":
            numbers = numbers.view(torch.int8)
        if layout.kind == "e4m3":
            numbers = numbers.view(torch.float8_e4m3fn)
        if layout.kind == "float8":
            bits = numbers.to(torch.int16)
            numbers = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).view(torch.float16)
        numbers = (numbers.to(torch.float32) - layout.zero).view(len(numbers), -1, layout.part)
        part = torch.arange(numbers.shape[1], device=outputs.device)
        group, block = part // layout.group_parts, part * layout.part // SUPERBLOCK

        def of_parts(tensor: Tensor) -> Tensor:
            return tensor[:, outputs].T[:, group, None].to(torch.float32)

        scales = of_parts(self.scales)
        offsets = None if self.offsets is None else of_parts(self.offsets)
        if self.factors is not None:
            factors = self.factors[:, :, outputs].to(torch.float32)[block]
            scales = scales * factors[:, 0].T[..., None]
            offsets = None if offsets is None else offsets * factors[:, 1].T[..., None]
        if offsets is not None and layout.offset == "zeros":
            numbers = numbers - offsets
        values: Tensor = numbers * scales
        if offsets is not None and layout.offset == "minima":
            values += offsets
        return values.flatten(1)[:, : self.inputs].contiguous()  # without the padding of a row's last step


def merged(parts: Sequence[QuantizedPart]) -> list[QuantizedPart]:
    """Join adjacent parts in one format, so that one launch computes them."""
    return [
        QuantizedPart(form, torch.cat([part.rows for part in alike]), group, rounds_inputs)
        for (form, group, rounds_inputs), alike in groupby(
            parts, lambda part: (part.format, part.group, part.rounds_inputs)
        )
    ]


def repack(unpacked: Unpacked, recipe: scaled.Recipe | None = None) -> PackedMatrix:
    """Pack the rows of a matrix, on their device, for kernels. With a `recipe`, groups have whole steps."""
    numbers, scales, factors = unpacked.numbers, unpacked.scales, unpacked.factors
    outputs, inputs = numbers.shape
    kind = unpacked.floats or ("int8" if numbers.dtype == torch.int8 else "int4")
    parts = 4 if kind in FOUR_BITS else 2 if kind == "int8" else 1
    group = unpacked.group if unpacked.group < inputs else MOST_STEP
    part = min(MOST_STEP // parts, group & -group)
    steps = -(-inputs // (part * parts))
    # A group is several parts. Parts behind the inputs have the scales of the last group.
    group_parts = group // part if unpacked.group < inputs else steps * parts
    more = -(-steps * parts // group_parts) - scales.shape[1]
    padding = steps * parts * part - inputs

    def by_group(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, *[tensor[:, -1:]] * more], dim=1).T.contiguous()

    packed = functional.pad(numbers, (0, padding)).view(outputs, steps, -1)
    packed = packed if parts == 1 else _words(packed, kind in FOUR_BITS)
    packed = packed.contiguous() if recipe else packed.transpose(0, 1).contiguous()
    offsets = unpacked.minima if unpacked.zeros is None else unpacked.zeros
    converted = kind == "float8" and converts_float8(numbers.device)
    return PackedMatrix(
        numbers=packed.transpose(0, 1) if recipe else packed,
        scales=by_group(scales / FLOAT8_FACTOR if converted else scales),
        offsets=None if offsets is None else by_group(offsets),
        factors=None if factors is None else factors.permute(1, 2, 0).contiguous(),
        inputs=inputs,
        layout=Layout(
            kind="e4m3" if converted else kind,
            zero=unpacked.zero,
            offset="none" if offsets is None else "minima" if unpacked.zeros is None else "zeros",
            superblock=0 if factors is None else SUPERBLOCK,
            step=part * parts,
            parts=parts,
            group_parts=group_parts,
            width=packed.shape[2],
            even=padding == 0,
            by_output=recipe is not None,
        ),
        recipe=recipe,
    )


def converts_float8(device: torch.device) -> bool:
    """Return whether a device has instructions that widen float8 (e4m3): Ada, Hopper and later."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


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


@triton.jit
def step_offset(step, output, steps, outputs, LAYOUT: tl.constexpr):
    """Return where the numbers of a step of an output begin."""
    if LAYOUT.by_output:
        return (output * steps + step) * LAYOUT.width
    else:
        return (step * outputs + output) * LAYOUT.width


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
def widened(packed, offset, PART: tl.constexpr, LAYOUT: tl.constexpr, dtype: tl.constexpr):
    """
    Widen the numbers of one part of a step, less the layout's zero or zeros in `offset`, exactly.

    Two numbers in a word are computed at once: or-ed to the bits of 128 (bfloat16) or 1024 (float16), a small
    integer is added to it. Devices convert integers at an eighth of that rate.
    """
    if LAYOUT.kind == "float8":
        return float8.widen(packed, dtype)
    elif LAYOUT.kind == "e4m3":
        # Devices convert float16 to bfloat16 at an eighth of the rate of the two conversions.
        return packed.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32).to(dtype)
    else:
        SHORT: tl.constexpr = dtype == tl.bfloat16  # 7 bits of mantissa
        half: tl.constexpr = tl.bfloat16 if SHORT else tl.float16
        ONE: tl.constexpr = 0x43004300 if SHORT else 0x64006400
        BASE: tl.constexpr = 128 if SHORT else 1024
        words = packed.to(tl.uint32, bitcast=True)
        if LAYOUT.kind == "float4":
            # Bits of e2m1, moved to those of a wider float, are the number divided by a power of 2.
            MOVED: tl.constexpr = (6 if SHORT else 9) - 4 * PART
            FACTOR: tl.constexpr = 2.0**126 if SHORT else 2.0**14
            sign = words << (12 - 4 * PART) & 0x80008000
            magnitude = words >> -MOVED if MOVED < 0 else words << MOVED
            magnitude = magnitude & (0x01C001C0 if SHORT else 0x0E000E00)
            return (_halves(sign | magnitude, half) * FACTOR).to(dtype)
        elif LAYOUT.kind == "int4":
            numbers = _halves(words >> 4 * PART & 0x000F000F | ONE, half)
            if LAYOUT.offset == "zeros":
                return (numbers - (offset + BASE).to(half)).to(dtype)
            else:
                return (numbers - (BASE + LAYOUT.zero)).to(dtype)
        elif SHORT:
            octets = words >> 8 * PART
            numbers = _halves(octets & 0x007F007F | ONE, half)
            return numbers - _halves(octets & 0x00800080 | ONE, half)
        else:
            # The sign's bit is inverted, which adds 128.
            numbers = _halves((words >> 8 * PART & 0x00FF00FF) ^ (ONE | 0x00800080), half)
            return (numbers - (BASE + 128)).to(dtype)


@triton.jit
def scale_of(scales, offsets, factors, output, outputs, valid, step, part, LAYOUT: tl.constexpr):
    """Return scale and offset, or zero, of each output in a part of a step, in fp32."""
    offset_of_group = (step * LAYOUT.parts + part) // LAYOUT.group_parts * outputs + output
    scale = tl.load(scales + offset_of_group, mask=valid, other=0).to(tl.float32)
    offset = scale * 0
    if LAYOUT.offset != "none":
        offset = tl.load(offsets + offset_of_group, mask=valid, other=0).to(tl.float32)
    if LAYOUT.superblock:
        factor = factors + step * LAYOUT.step // LAYOUT.superblock * 2 * outputs + output
        scale *= tl.load(factor, mask=valid, other=0).to(tl.float32)
        offset *= tl.load(factor + outputs, mask=valid, other=0).to(tl.float32)
    return scale, offset


@triton.jit
def weights_of(packed, scale, offset, PART: tl.constexpr, LAYOUT: tl.constexpr, dtype: tl.constexpr):
    """Return the weights of one part of a step, rounded once."""
    weights = widened(packed, offset, PART, LAYOUT, tl.float32) * scale
    if LAYOUT.offset == "minima":
        weights += offset
    return weights.to(dtype)
