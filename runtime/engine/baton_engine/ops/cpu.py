"""
The decoder's operations on a CPU with torch alone: plain operations over prepacked weights.

A bfloat16 weight is laid out once, in the order in which oneDNN streams it. This makes a product with a few
rows up to twice as fast as `F.linear`, which lays it out at every call. The native kernels
(`baton_engine.model.native`) are faster still; this module serves where they cannot be built.

bfloat16 is the preferred dtype where the processor multiplies it natively: it halves the memory to stream and
doubles the arithmetic. With AVX2 or AVX-512 alone, the native kernels widen it on the way, which still halves
the memory to stream. torch emulates it there, so float32 is faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_engine.model.spec import ModelSpec
from baton_engine.ops import Linear
from baton_engine.ops.plain import PlainLinear, PlainOps


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


def computes_bfloat16(capabilities: Mapping[str, object]) -> bool:
    """Whether the processor has bfloat16 products of its own (AVX-512 BF16, AMX, or Arm's BF16)."""
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def preferred_dtype(capabilities: Mapping[str, object], native: bool) -> torch.dtype:
    """Return what `dtype=auto` means on a processor with these capabilities.

    `native` says whether the native kernels compute the model there.
    """
    widens = native and bool(capabilities.get("avx2"))
    return torch.bfloat16 if widens or computes_bfloat16(capabilities) else torch.float32
