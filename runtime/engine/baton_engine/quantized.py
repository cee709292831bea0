"""
Matrices in quantized formats, which the kernels keep instead of expanding them.

Most formats are GGUF's. The native kernels of CPUs (`ops/native/quantized.h`) round activations to 8 bits
with one scale per 32 inputs, as llama.cpp does. So results differ from those of expanded weights within that
rounding. The kernels of accelerators (`ops/kernels/quantized.py`) round activations to FP8 where a checkpoint
declares it, in passes of many rows.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 32
"""Inputs that share a scale."""
SUPERBLOCK = 256
"""Inputs that share float16 factors of their scales, in the formats whose name ends in K."""
FLOAT8_MULTIPLE = 16
"""Inputs of a group of FP8 are a multiple of it: the kernels' smallest step."""


MOST_GROUP = 128
"""Inputs of a group up to which equal groups are joined."""
FLOAT8_FACTOR = 256
"""A float8 (e4m3) number, divided by the float16 number with the same bits of exponent and mantissa."""
LEAST_POWER = 0x40
"""Bits of 2 ** -127 as bfloat16, which is not a normal number."""
NO_EXPONENT = 255
"""The exponent of MXFP4 that stands for NaN."""
SLICE = 1 << 20
"""Values that are rounded at once: those of a whole embedding would take several GiB in fp32."""
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the numbers of IQ4_NL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """
    Rows of a matrix [outputs, inputs]. Groups are consecutive inputs of one size; the last may be cut.

    A value is number * scale + offset. The fields are those of the formats, so nothing is rounded.
    """

    numbers: Tensor
    """[outputs, inputs] int8; uint8 for 4 bits, and for the bits of float8."""
    group: int
    scales: Tensor
    """[outputs, groups] float32, float16, or integers that `factors` multiplies."""
    zeros: Tensor | None = None
    """[outputs, groups] uint8: the numbers that stand for zero."""
    minima: Tensor | None = None
    """[outputs, groups] float16, or integers that `factors` multiplies: the values of number 0."""
    factors: Tensor | None = None
    """[outputs, inputs / 256, 2] float16, of scales and of minima."""
    floats: Literal["", "float8", "float4"] = ""
    """Format of the numbers, if they are bits of floats: float8 (e4m3), read as float16 and so divided by
    `FLOAT8_FACTOR`, or float4 (e2m1)."""
    zero: int = 0
    """The number that stands for zero in all groups."""


def _q8_0(blocks: Tensor) -> Unpacked:
    """A float16 scale, and signed bytes."""
    numbers = _flat(blocks[..., 2:].view(torch.int8))
    return _joined(Unpacked(numbers=numbers, group=BLOCK, scales=_halves(blocks[..., :2])[..., 0]))


def _four_bits(blocks: Tensor) -> Unpacked:
    """Blocks that begin with a float16 scale, and end with numbers of 4 bits."""
    numbers = _flat(_nibbles(blocks[..., -BLOCK // 2 :]))
    return Unpacked(numbers=numbers, group=BLOCK, scales=_halves(blocks[..., :2])[..., 0])


def _five_bits(blocks: Tensor) -> Unpacked:
    """The fifth bits of the numbers are 4 bytes before the others."""
    unpacked = _four_bits(blocks)
    bits = blocks[..., -BLOCK // 2 - 4 : -BLOCK // 2, None] >> _range(8, blocks) & 1
    return replace(unpacked, numbers=(unpacked.numbers | bits.flatten(1) << 4).to(torch.int8))


def _q4_0(blocks: Tensor) -> Unpacked:
    return _joined(replace(_four_bits(blocks), zero=8))


def _q4_1(blocks: Tensor) -> Unpacked:
    return replace(_four_bits(blocks), minima=_halves(blocks[..., 2:4])[..., 0])


def _q5_0(blocks: Tensor) -> Unpacked:
    unpacked = _five_bits(blocks)
    return replace(unpacked, numbers=unpacked.numbers - 16)


def _q5_1(blocks: Tensor) -> Unpacked:
    return replace(_five_bits(blocks), minima=_halves(blocks[..., 2:4])[..., 0])


def _iq4_nl(blocks: Tensor) -> Unpacked:
    unpacked = _four_bits(blocks)
    numbers = torch.empty_like(unpacked.numbers, dtype=torch.int8)
    for index, value in enumerate(IQ4_VALUES):  # as indices, the numbers would take 12 more bytes each
        numbers.masked_fill_(unpacked.numbers == index, value)
    return replace(unpacked, numbers=numbers)


def _int4(blocks: Tensor) -> Unpacked:
    return _joined(replace(_four_bits(blocks), zeros=blocks[..., 2]))


def _mxfp4(blocks: Tensor) -> Unpacked:
    numbers, scales = _flat(_nibbles(blocks[..., 1:])), _powers_of_two(blocks[..., 0])
    return Unpacked(numbers=numbers, floats="float4", group=BLOCK, scales=scales)


def _q4_k(blocks: Tensor) -> Unpacked:
    return _with_minima(blocks, fifth=False)


def _q5_k(blocks: Tensor) -> Unpacked:
    return _with_minima(blocks, fifth=True)


def _with_minima(blocks: Tensor, fifth: bool) -> Unpacked:
    """Q4_K and Q5_K: two float16 factors, eight scales and minima of 6 bits in 12 bytes, and the numbers."""
    first, second, third = torch.split(blocks[..., 4:16], 4, dim=2)
    scales = torch.cat((first & 63, third & 15 | (first >> 6) << 4), dim=2)
    minima = torch.cat((second & 63, third >> 4 | (second >> 6) << 4), dim=2)
    pairs = blocks[..., -SUPERBLOCK // 2 :].reshape(*blocks.shape[:2], 4, 1, BLOCK)
    numbers = torch.cat((pairs & 15, pairs >> 4), dim=3).flatten(2, 3)  # [outputs, superblocks, 8, 32]
    if fifth:
        tops = blocks[..., 16 : 16 + BLOCK].unsqueeze(2) >> _range(8, blocks)[:, None] & 1
        numbers = (numbers | tops << 4).to(torch.int8)
    factors = _halves(blocks[..., :4]) * torch.tensor([1, -1], dtype=torch.float16, device=blocks.device)
    return Unpacked(
        numbers=_flat(numbers), group=BLOCK, scales=_flat(scales), minima=_flat(minima), factors=factors
    )


def _q6_k(blocks: Tensor) -> Unpacked:
    """Q6_K: low four bits, high two bits, a signed scale of each 16 numbers, and a float16 factor."""
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 2 * BLOCK)
    low = torch.cat((low & 15, low >> 4), dim=3).flatten(3)  # [outputs, superblocks, 2, 128]
    shifts = 2 * _range(4, blocks)[:, None]
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, BLOCK) >> shifts & 3
    numbers = (low | high.flatten(3) << 4).to(torch.int8) - 32
    factors = _halves(blocks[..., 208:210])
    return Unpacked(
        numbers=_flat(numbers),
        group=16,
        scales=_flat(blocks[..., 192:208].view(torch.int8)),
        factors=torch.cat((factors, factors), dim=2),
    )


def _joined(unpacked: Unpacked) -> Unpacked:
    """Join adjacent groups with equal scales, which checkpoints with longer groups have."""
    group, scales, zeros = unpacked.group, unpacked.scales, unpacked.zeros
    while group < MOST_GROUP and scales.shape[1] % 2 == 0:
        if not all(
            tensor is None or torch.equal(tensor[:, ::2], tensor[:, 1::2]) for tensor in (scales, zeros)
        ):
            break
        group, scales = 2 * group, scales[:, ::2]
        zeros = None if zeros is None else zeros[:, ::2]
    return replace(unpacked, group=group, scales=scales, zeros=zeros)


def _powers_of_two(exponents: Tensor) -> Tensor:
    """Return the scales of exponents of MXFP4 (uint8 below 255): bfloat16 has the same exponents."""
    bits = exponents.to(torch.int16) << 7
    return torch.where(bits == 0, LEAST_POWER, bits).view(torch.bfloat16)


def _halves(octets: Tensor) -> Tensor:
    """Copy [..., 2n] bytes to [..., n] float16."""
    # `contiguous` leaves strides of dimensions of size 1, which `view` refuses if they are odd.
    return octets.clone(memory_format=torch.contiguous_format).view(torch.float16)


def _nibbles(octets: Tensor) -> Tensor:
    """Return the numbers [..., 2n] of [..., n] bytes: the low four bits of all, and then the high ones."""
    return torch.cat((octets & 15, octets >> 4), dim=-1)


def _flat(blocks: Tensor) -> Tensor:
    return blocks.flatten(1)


def _range(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.uint8, device=like.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """How a format stores blocks of numbers, and which kernels compute in it."""

    unpack: Callable[[Tensor], Unpacked]
    """Takes blocks [outputs, blocks, bytes] uint8 apart, on their device."""
    scales: slice
    """Bytes of a block that have its float16 scales; one byte is an exponent."""
    inputs: int = BLOCK
    """Inputs of a block."""
    native: bool = False
    """Whether the native kernels of CPUs compute in it. Those of accelerators compute in all formats."""


class Format(enum.IntEnum):
    """
    Formats that kernels keep. The numbers are those of GGUF's tensor types, but for INT4 and FP8.

    To add a type of GGUF, add it here with its layout: accelerators then keep it. CPUs keep it with
    `native=True`, once `ops/native/quantized.h` has it.
    """

    layout: BlockLayout | None
    """None: FP8, whose rows are not blocks."""

    def __new__(cls, number: int, layout: BlockLayout | None = None) -> Format:
        member = int.__new__(cls, number)
        member._value_, member.layout = number, layout
        return member

    Q4_0 = 2, BlockLayout(unpack=_q4_0, scales=slice(2), native=True)
    Q4_1 = 3, BlockLayout(unpack=_q4_1, scales=slice(4), native=True)
    Q5_0 = 6, BlockLayout(unpack=_q5_0, scales=slice(2), native=True)
    Q5_1 = 7, BlockLayout(unpack=_q5_1, scales=slice(4), native=True)
    Q8_0 = 8, BlockLayout(unpack=_q8_0, scales=slice(2), native=True)
    Q4_K = 12, BlockLayout(unpack=_q4_k, scales=slice(4), inputs=SUPERBLOCK, native=True)
    Q5_K = 13, BlockLayout(unpack=_q5_k, scales=slice(4), inputs=SUPERBLOCK, native=True)
    Q6_K = 14, BlockLayout(unpack=_q6_k, scales=slice(-2, None), inputs=SUPERBLOCK, native=True)
    IQ4_NL = 20, BlockLayout(unpack=_iq4_nl, scales=slice(2))
    """As Q4_0, but the numbers are indices of `IQ4_VALUES`."""
    MXFP4 = 39, BlockLayout(unpack=_mxfp4, scales=slice(1))
    """Blocks of an exponent of 8 bits, and 32 numbers of float4 (e2m1) placed as in Q4_0."""
    INT4 = 63, BlockLayout(unpack=_int4, scales=slice(2), native=True)
    """Blocks of a float16 scale, the byte that stands for zero, and 32 numbers of 4 bits as in Q4_0."""
    FP8 = 64
    """Float8 (e4m3) numbers of a row, and then its float32 scales of `QuantizedPart.group` inputs each."""

    @property
    def block(self) -> int:
        """Inputs of a block; 1 for FP8."""
        return 1 if self.layout is None else self.layout.inputs

    def scales(self, blocks: NDArray[np.uint8]) -> NDArray[np.float16]:
        """Return the scales of blocks [n, bytes]: [n, 1 or 2]. In damaged ones, some are not finite."""
        assert self.layout is not None
        octets = blocks[:, self.layout.scales]
        if octets.shape[1] == 1:
            return np.where(octets == NO_EXPONENT, np.nan, 1).astype(np.float16)
        return np.ascontiguousarray(octets).view(np.float16)


NATIVE_FORMATS = frozenset(form for form in Format if form.layout is not None and form.layout.native)
"""Formats of the native kernels."""


@dataclass(frozen=True, slots=True)
class QuantizedPart:
    """Some rows of a matrix in one format."""

    format: Format
    rows: Tensor
    """[outputs, bytes per row] uint8, the blocks of each row as GGUF stores them."""
    group: int = 0
    """FP8: inputs that share a scale. Other formats have their own."""
    rounds_inputs: bool = False
    """FP8: whether the checkpoint declares that what it is multiplied with is rounded to FP8 as well."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix [outputs, inputs] of stacked parts."""

    parts: tuple[QuantizedPart, ...]
    inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        return sum(len(part.rows) for part in self.parts), self.inputs

    @property
    def nbytes(self) -> int:
        return sum(part.rows.nbytes for part in self.parts)

    def to(self, device: torch.device) -> Quantized:
        return Quantized(tuple(replace(part, rows=part.rows.to(device)) for part in self.parts), self.inputs)


Matrix = Tensor | Quantized


def floats(matrix: Matrix) -> Tensor:
    """Return a matrix that is not quantized. torch's operations support no other."""
    if isinstance(matrix, Quantized):
        raise TypeError(f"a matrix in {matrix.parts[0].format.name} requires kernels, not torch's operations")
    return matrix


def quantize(values: Tensor, target: Format, device: torch.device | None = None) -> Quantized:
    """
    Round a matrix [outputs, inputs] to Q8_0 or Q4_0 on `device`, None: that of `values`.

    `inputs` is a multiple of 32. The blocks are those of llama.cpp's reference quantization (ggml-quants.c),
    to the bit and on all devices. It divides by scales, so those below 2 ** -128 give no finite numbers: here
    they count as zero, which they are in float16. Raises ValueError if a scale is not finite in float16.
    """
    outputs, inputs = values.shape
    blocks = inputs // BLOCK
    octets = BLOCK if target is Format.Q8_0 else BLOCK // 2
    rows = torch.empty((outputs, blocks * (2 + octets)), dtype=torch.uint8, device=device or values.device)
    count = max(1, SLICE // inputs)
    for start in range(0, outputs, count):
        part = values[start : start + count].to(rows.device)
        rows[start : start + count] = _quantized(part.to(torch.float32), target)
    if bool(_halves(rows.view(outputs, blocks, -1)[..., :2]).isfinite().logical_not().any()):
        raise ValueError(f"a value is not finite, or too large for a float16 scale of {target.name}")
    return Quantized((QuantizedPart(target, rows),), inputs)


def _quantized(values: Tensor, target: Format) -> Tensor:
    """Return the blocks of fp32 values, by operations that have one result on all devices."""
    outputs, inputs = values.shape
    blocks = values.reshape(outputs, inputs // BLOCK, BLOCK)
    if target is Format.Q8_0:
        largest = blocks.abs().amax(dim=2, keepdim=True)
        # By a tensor: instead of dividing by a number, torch multiplies by its inverse on GPUs.
        scale = largest / torch.full_like(largest, 127)
        numbers = _away_from_zero(blocks * _inverse(scale))
    else:
        scale = blocks.gather(2, blocks.abs().argmax(dim=2, keepdim=True)) * -0.125
        numbers = (blocks * _inverse(scale) + 8.5).trunc().clamp(max=15)
    packed = pack(target, numbers.reshape(outputs, inputs), scale.to(torch.float16).squeeze(2))
    return packed.parts[0].rows


def pack(target: Format, numbers: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Quantized:
    """
    Write blocks of Q8_0, Q4_0 or INT4.

    `numbers` [outputs, inputs]: -128 to 127, or 0 to 15 of which 8, or `zeros`, stands for zero. `scales`
    float16 and `zeros` [outputs, inputs / 32]. `zeros` are those of INT4.
    """
    rows, inputs = numbers.shape
    blocks = numbers.reshape(rows, inputs // BLOCK, BLOCK)
    fields = [scales.contiguous().unsqueeze(2).view(torch.uint8)]
    if target is Format.Q8_0:
        fields.append(blocks.to(torch.int8).view(torch.uint8))
    else:
        if zeros is not None:
            fields.append(zeros.to(torch.uint8).unsqueeze(2))
        nibbles = blocks.to(torch.uint8)
        fields.append(nibbles[..., : BLOCK // 2] | nibbles[..., BLOCK // 2 :] << 4)
    return Quantized((QuantizedPart(target, torch.cat(fields, dim=2).reshape(rows, -1)),), inputs)


def pack_float8(numbers: Tensor, scales: Tensor, group: int) -> Quantized:
    """
    Write rows of FP8 from `numbers` [outputs, inputs] uint8 and `scales` [outputs, groups] float32.

    `group` inputs share a scale: a multiple of 16, or all inputs. The last group may be shorter.
    """
    rows = torch.cat((numbers, scales.contiguous().view(torch.uint8)), dim=1)
    return Quantized((QuantizedPart(Format.FP8, rows, group),), numbers.shape[1])


def pack_float4(numbers: Tensor, exponents: Tensor) -> Quantized:
    """Write blocks of MXFP4 from `numbers` [outputs, inputs] and `exponents` [outputs, inputs / 32] uint8."""
    blocks = numbers.view(*exponents.shape, BLOCK)
    octets = blocks[..., : BLOCK // 2] | blocks[..., BLOCK // 2 :] << 4
    rows = torch.cat((exponents[..., None], octets), dim=2).flatten(1)
    return Quantized((QuantizedPart(Format.MXFP4, rows),), numbers.shape[1])


def _inverse(scale: Tensor) -> Tensor:
    inverse = scale.reciprocal()
    return inverse.masked_fill_(inverse.isinf(), 0.0)


def _away_from_zero(values: Tensor) -> Tensor:
    """Round to the nearest integer, halves away from zero, as C's `roundf`."""
    truncated = values.trunc()
    return truncated + (values - truncated).abs().ge(0.5) * values.sign()


def unpack(part: QuantizedPart, inputs: int) -> Unpacked:
    """Take the rows of `part` apart, on their device."""
    rows, layout = part.rows, part.format.layout
    if layout is not None:
        return layout.unpack(rows.view(len(rows), inputs // layout.inputs, -1))
    # A copy even of one row: a view as float32 must begin at a multiple of 4 bytes.
    octets = rows[:, inputs:].clone(memory_format=torch.contiguous_format)
    scales = octets.view(torch.float32) * FLOAT8_FACTOR
    return Unpacked(numbers=rows[:, :inputs], floats="float8", group=part.group, scales=scales)
