"""
The decoder's operations on a CPU with nothing but torch: plain operations over prepacked weights.

Laying a bfloat16 weight out once, in the order in which oneDNN streams it, makes a product with a few
rows up to twice as fast as `F.linear`, which lays it out at every call. What the native kernels
(`baton_engine.model.native`) do better still is not needed here: this is what serves where they cannot
be built.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton_engine.model.spec import ModelSpec
from baton_engine.ops import Linear
from baton_engine.ops.plain import PlainLinear, PlainOps
from baton_engine.ops.processor import computes_bfloat16


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A bfloat16 weight in oneDNN's own layout."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return result


class CpuOps(PlainOps):
    """`PlainOps` with prepacked weights, where the processor and the build of torch allow it."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__(spec)
        self.packs = (
            dtype == torch.bfloat16
            and computes_bfloat16(torch.cpu.get_capabilities())
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if not self.packs:
            return PlainLinear(weight, bias)
        return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None), bias)
