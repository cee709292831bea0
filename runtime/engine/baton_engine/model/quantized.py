"""
Matrices in quantized formats, which the kernels keep instead of expanding them.

Most formats are GGUF's. The native kernels of CPUs (`ops/native/quantized.h`) round activations to 8 bits
with one scale per 32 inputs, as llama.cpp does. So results differ from those of expanded weights within that
rounding. The kernels of accelerators (`ops/kernels/quantized.py`) do not round activations.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import torch
from torch import Tensor

BLOCK = 32
"""Inputs that share a scale."""
SUPERBLOCK = 256
"""Inputs that share float16 factors of their scales, in the formats whose name ends in K."""
FLOAT8_MULTIPLE = 16
"""Inputs of a group of FP8 are a multiple of it: the kernels' smallest step."""


class Format(enum.IntEnum):
    """Formats that kernels keep. The numbers are those of GGUF's tensor types, but for INT4 and FP8."""

    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    MXFP4 = 39
    """Blocks of an exponent of 8 bits, and 32 numbers of float4 (e2m1) placed as in Q4_0."""
    INT4 = 63
    """Blocks of a float16 scale, the byte that stands for zero, and 32 numbers of 4 bits as in Q4_0."""
    FP8 = 64
    """Float8 (e4m3) numbers of a row, and then its float32 scales of `QuantizedPart.group` inputs each."""

    @property
    def block(self) -> int:
        """Inputs of a block, in all formats but FP8."""
        return SUPERBLOCK if self.name.endswith("K") else BLOCK


NATIVE_FORMATS = frozenset(Format) - {Format.FP8, Format.MXFP4}
"""Formats of the native kernels. Those of accelerators compute in all formats."""


@dataclass(frozen=True, slots=True)
class QuantizedPart:
    """Some rows of a matrix in one format."""

    format: Format
    rows: Tensor
    """[outputs, bytes per row] uint8, the blocks of each row as GGUF stores them."""
    group: int = 0
    """FP8: inputs that share a scale. Other formats have their own."""


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


def quantize(values: Tensor, target: Format) -> Quantized:
    """
    Round a matrix [outputs, inputs] to Q8_0 or Q4_0. `inputs` is a multiple of 32.

    The same blocks as those of llama.cpp's reference quantization (ggml-quants.c), to the bit.
    """
    rows, inputs = values.shape
    blocks = values.to(torch.float32).reshape(rows, inputs // BLOCK, BLOCK)
    if target is Format.Q8_0:
        scale = blocks.abs().amax(dim=2, keepdim=True) / 127
        numbers = _away_from_zero(blocks * _inverse(scale))
    else:
        largest = blocks.gather(2, blocks.abs().argmax(dim=2, keepdim=True))
        scale = largest / -8
        numbers = (blocks * _inverse(scale) + 8.5).trunc().clamp(max=15)
    return pack(target, numbers.reshape(rows, inputs), scale.to(torch.float16).squeeze(2))


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
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def _away_from_zero(values: Tensor) -> Tensor:
    """Round to the nearest integer, halves away from zero, as C's `roundf`."""
    whole = values.trunc()
    return whole + (values - whole).abs().ge(0.5) * values.sign()
