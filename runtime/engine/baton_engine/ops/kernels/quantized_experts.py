"""
Products of pairs of a token and an expert with quantized weights, which become floats in registers.

The matrices of all experts are one matrix, whose outputs an expert has a range of. Otherwise these are the
products of `baton_engine.ops.kernels.experts`, with the numbers of `baton_engine.ops.kernels.quantized`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_engine.model.quantized import SUPERBLOCK, Quantized
from baton_engine.model.unpacked import unpack
from baton_engine.ops import ExpertGroups
from baton_engine.ops.kernels.quantized import COLUMNS, ROWS, STAGES, arranged, merged, sum_split


@triton.jit(do_not_specialize=["share", "rows"])
def _multiply_quantized(
    x, numbers, scales, offsets, factors, biases, result, order, starts, share, rows, x_stride, outputs,
    all_outputs, inputs, steps,
    BIAS: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    GROUP_STEPS: tl.constexpr, OFFSET: tl.constexpr, FACTORS: tl.constexpr, SUPERBLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply all pairs of one expert with a tile of its outputs."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.program_id(1).to(tl.int64)
    # A tile at the end of an expert reads outputs of the next one, and does not store them.
    output = expert * outputs + column
    last = tl.load(starts + expert + 1)
    for first in range(tl.load(starts + expert), last, ROWS):
        place = first + tl.arange(0, ROWS)
        paired = place < last
        pair = tl.load(order + place, mask=paired, other=0).to(tl.int64)
        row = tl.where(paired, pair // share, rows)
        total = sum_split(
            x, numbers, scales, offsets, factors, row, rows, x_stride, output, all_outputs, inputs, 0, steps,
            KIND, ZERO, STEP, WIDTH, GROUP_STEPS, OFFSET, FACTORS, SUPERBLOCK, ROWS, COLUMNS,
        )  # fmt: skip
        held = column < outputs
        if BIAS:
            total += tl.load(biases + output, mask=held, other=0.0).to(tl.float32)[None, :]
        at = result + pair[:, None] * outputs + column[None, :]
        tl.store(at, total.to(result.dtype.element_ty), mask=paired[:, None] & held[None, :])


class QuantizedExperts:
    """The quantized weights of all experts: implementation of `ExpertLinear` in one launch."""

    def __init__(self, matrix: Quantized, biases: Tensor | None, count: int) -> None:
        """`matrix` has the outputs of `count` experts one after the other, in one format."""
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
            _multiply_quantized[(triton.cdiv(outputs, COLUMNS), self._count)](
                x,
                weights.numbers,
                weights.scales,
                weights.scales if weights.offsets is None else weights.offsets,
                weights.scales if weights.factors is None else weights.factors,
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
                ROWS=ROWS,
                COLUMNS=COLUMNS,
                num_stages=STAGES,
                enable_fp_fusion=True,
                **weights.constants,
            )
        return result
