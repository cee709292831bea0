"""
Experts: pairs of a token and an expert are grouped, multiplied by the weights of their expert, and added.

The host reads nothing: each expert has programs, which look up how many pairs chose it. So a pass with
experts can be captured, and a decode step reads only the weights of chosen experts.

Tiles have one of two heights, by the number of pairs for each expert: higher ones read the weights less
often. The inputs of a row are added in one order. So a token has the same bits in any batch of one height.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_engine.ops import ExpertGroups
from baton_engine.ops.kernels.packed import merged, repack
from baton_engine.ops.kernels.quantized import sum_split, tile_of
from baton_engine.quantized import Quantized, unpack

PAIRS = 1024
"""Pairs that a program compares with its expert at a time."""

FEW_PAIRS = 32
"""Pairs for each expert, on average, up to which tiles are low."""

LOW = {"ROWS": 32, "COLUMNS": 64, "STEP": 64, "num_warps": 4, "num_stages": 3}
"""Pairs and outputs of a tile, and inputs per step, of which others are loaded while one is multiplied."""

HIGH = {"ROWS": 128, "COLUMNS": 128, "STEP": 64, "num_warps": 8, "num_stages": 4}
"""For inputs of 2 bytes, if there is shared memory for four steps."""

HIGH_MEMORY = 160 * 1024
"""Bytes of shared memory per program from which a device has high tiles: A100, H100 and later."""

SUMMED = 1024
"""Columns that one program adds."""


@triton.jit(do_not_specialize=["pairs"])
def _group(chosen, order, starts, pairs, BLOCK: tl.constexpr):
    """Write the pairs of one expert behind those of the experts before it."""
    expert = tl.program_id(0)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        inside = pair < pairs
        before += (inside & (tl.load(chosen + pair, mask=inside, other=0) < expert)).to(tl.int32)
    position = tl.sum(before, axis=0)
    tl.store(starts + expert, position)
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        inside = pair < pairs
        of_expert = (inside & (tl.load(chosen + pair, mask=inside, other=0) == expert)).to(tl.int32)
        tl.store(order + position + tl.cumsum(of_expert, axis=0) - 1, pair, mask=of_expert != 0)
        position += tl.sum(of_expert, axis=0)


def group(chosen: Tensor, count: int) -> ExpertGroups:
    """Implement `Ops.group_by_expert` in one launch."""
    pairs = chosen.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=chosen.device)
    _group[(count + 1,)](chosen.contiguous(), order, starts, pairs, BLOCK=PAIRS, enable_fp_fusion=True)
    return ExpertGroups(order, starts)


@triton.jit(do_not_specialize=["share"])
def _multiply(
    x, weights, biases, result, order, starts, share, x_stride, outputs, inputs,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Multiply all pairs of one expert with a tile of its outputs."""
    output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.program_id(1).to(tl.int64)
    valid = output < outputs
    weight = weights + (expert * outputs + output)[:, None] * inputs
    last = tl.load(starts + expert + 1)
    for first in range(tl.load(starts + expert), last, ROWS):
        position = first + tl.arange(0, ROWS)
        paired = position < last
        pair = tl.load(order + position, mask=paired, other=0)
        row = x + (pair // share).to(tl.int64)[:, None] * x_stride
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, inputs, STEP):
            k = (begin + tl.arange(0, STEP))[None, :]
            values = tl.load(row + k, mask=paired[:, None] & (k < inputs), other=0.0)
            tile = tl.load(weight + k, mask=valid[:, None] & (k < inputs), other=0.0)
            total = tl.dot(values, tl.trans(tile), total, input_precision="ieee")
        if BIAS:
            total += tl.load(biases + expert * outputs + output, mask=valid, other=0.0).to(tl.float32)[
                None, :
            ]
        at = result + pair.to(tl.int64)[:, None] * outputs + output[None, :]
        tl.store(at, total.to(result.dtype.element_ty), mask=paired[:, None] & valid[None, :])


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """The weights of all experts: implementation of `ExpertLinear` in one launch."""

    weights: Tensor
    """[E, out, in], contiguous."""
    biases: Tensor | None
    """[E, out], contiguous."""
    shared_memory: int = 0
    """Bytes that the device has for a program. 0: not known."""

    def __call__(self, x: Tensor, groups: ExpertGroups) -> Tensor:
        count, outputs, inputs = self.weights.shape
        pairs = len(groups.order)
        result = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
        if pairs:
            high = pairs > FEW_PAIRS * count and x.element_size() == 2 and self.shared_memory >= HIGH_MEMORY
            tile = HIGH if high else LOW
            _multiply[(triton.cdiv(outputs, tile["COLUMNS"]), count)](
                x if x.stride(1) == 1 else x.contiguous(),
                self.weights,
                self.weights if self.biases is None else self.biases,
                result,
                groups.order,
                groups.starts,
                pairs // len(x),
                x.stride(0) if x.stride(1) == 1 else inputs,
                outputs,
                inputs,
                BIAS=self.biases is not None,
                enable_fp_fusion=True,
                **tile,
            )
        return result


@triton.jit(do_not_specialize=["share", "rows"])
def _multiply_quantized(
    x, numbers, scales, offsets, factors, biases, result, order, starts, share, rows, x_stride, outputs,
    all_outputs, inputs, steps,
    BIAS: tl.constexpr, LAYOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ROUNDED: tl.constexpr,
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
            0, steps, LAYOUT, ROUNDED,
        )  # fmt: skip
        total = tl.trans(total)
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
        self._weights = repack(unpack(part, matrix.inputs))
        self._biases = biases
        self._count = count

    def __call__(self, x: Tensor, groups: ExpertGroups) -> Tensor:
        weights, pairs = self._weights, len(groups.order)
        outputs = weights.outputs // self._count
        result = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
        if pairs:
            x = x if x.stride(1) == 1 else x.contiguous()
            tile = tile_of(pairs // self._count, x.element_size(), self._shared_memory)
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
                weights.steps,
                BIAS=self._biases is not None,
                LAYOUT=weights.layout,
                enable_fp_fusion=True,
                **tile,
            )
        return result


@triton.jit
def _sum(results, shares, total, size, CHOSEN: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    exact = tl.zeros([BLOCK], tl.float32)
    for number in range(CHOSEN):
        pair = token * CHOSEN + number
        part = tl.load(results + pair * size + column, mask=inside, other=0.0).to(tl.float32)
        exact += part * tl.load(shares + pair) if WEIGHTED else part
    tl.store(total + token * size + column, exact.to(total.dtype.element_ty), mask=inside)


def sum_weighted(results: Tensor, shares: Tensor | None) -> Tensor:
    """Implement `Ops.sum_experts` in one launch. `results` are contiguous."""
    tokens, chosen, size = results.shape
    total = torch.empty((tokens, size), dtype=results.dtype, device=results.device)
    if tokens:
        block = min(SUMMED, triton.next_power_of_2(size))
        _sum[(tokens, triton.cdiv(size, block))](
            results,
            results if shares is None else shares.contiguous(),
            total,
            size,
            CHOSEN=chosen,
            WEIGHTED=shares is not None,
            BLOCK=block,
            enable_fp_fusion=True,
        )
    return total
