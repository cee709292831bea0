"""
Products of weights with one row: the steps of a single stream, which only the bandwidth of memory limits.

Libraries compute tiles of many rows, and reach 60 to 90 % of the bandwidth with one. Here each program reads
a few rows of the weights from end to end, without tensor cores. From two rows on, the library is faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

STEP = 1024
"""Inputs that a program reads at once of each of its outputs."""

MANY_OUTPUTS = 6144
"""Outputs from which programs of 4 outputs occupy a device better than larger ones."""


@triton.jit
def _one_row(
    x, weight, bias, result, outputs, inputs,
    BIAS: tl.constexpr, EVEN: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Compute OUTPUTS of result [outputs] = weight [outputs, inputs] x [inputs] + bias [outputs]."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    at = tl.arange(0, STEP)
    row = weight + tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * inputs
    total = tl.zeros([OUTPUTS, STEP], tl.float32)
    for start in range(0, inputs, STEP):
        if EVEN:
            values = tl.load(row + start + at[None, :])
            factors = tl.load(x + start + at)
        else:
            inside = start + at < inputs
            values = tl.load(row + start + at[None, :], mask=inside[None, :], other=0.0)
            factors = tl.load(x + start + at, mask=inside, other=0.0)
        total += values.to(tl.float32) * factors.to(tl.float32)[None, :]
    product = tl.sum(total, axis=1)
    used = output < outputs
    if BIAS:
        product += tl.load(bias + output, mask=used, other=0.0).to(tl.float32)
    tl.store(result + output, product.to(result.dtype.element_ty), mask=used)


@dataclass(frozen=True, slots=True)
class RowLinear:
    """A weight [outputs, inputs] of 2 bytes per number, and a bias [outputs]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [T, inputs] times the weight, plus the bias: [T, outputs]."""
        if len(x) != 1:
            return functional.linear(x, self.weight, self.bias)
        outputs, inputs = self.weight.shape
        result = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
        many = outputs >= MANY_OUTPUTS
        tile = 4 if many else 16
        _one_row[(triton.cdiv(outputs, tile),)](
            x.contiguous(),
            self.weight,
            self.weight if self.bias is None else self.bias,
            result,
            outputs,
            inputs,
            BIAS=self.bias is not None,
            EVEN=inputs % STEP == 0,
            OUTPUTS=tile,
            STEP=STEP,
            num_warps=4 if many else 8,
            num_stages=2,
            enable_fp_fusion=True,
        )
        return result
