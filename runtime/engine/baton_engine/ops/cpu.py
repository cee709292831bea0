"""
The decoder's operations on a CPU with torch only: plain operations with prepacked weights.

bfloat16 weights are converted to oneDNN's layout once. A product with a few rows is up to twice as fast as
`F.linear`, which converts them in each call. The native kernels (`baton_engine.model.native_decoder`) are
faster; this module is used if they cannot be built.

bfloat16 is the preferred dtype if the processor supports it: it halves the memory traffic and doubles the
arithmetic throughput. With AVX2 or AVX-512 only, the native kernels convert it to float32, which still halves
the memory traffic. torch emulates bfloat16 on such processors, so float32 is faster there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_engine.ops import Linear
from baton_engine.ops.plain import PlainLinear, PlainOps
from baton_engine.quantized import Matrix, floats
from baton_engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A bfloat16 weight in oneDNN's layout."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return result


class CpuOps(PlainOps):
    """`PlainOps` with prepacked weights if the processor and the build of torch support them."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__(spec)
        self.packs = (
            dtype == torch.bfloat16
            and computes_bfloat16(torch.cpu.get_capabilities())
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )

    def prepare(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        if not self.packs:
            return PlainLinear(floats(weight), bias)
        return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(floats(weight).contiguous(), None), bias)


def computes_bfloat16(capabilities: Mapping[str, object]) -> bool:
    """Return whether the processor has bfloat16 products (AVX-512 BF16, AMX, or Arm's BF16)."""
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def preferred_dtype(capabilities: Mapping[str, object], has_kernels: bool) -> torch.dtype:
    """Return the dtype of `--dtype auto` on a processor with these capabilities.

    `has_kernels` states whether the native kernels are available.
    """
    widens = has_kernels and bool(capabilities.get("avx2"))
    return torch.bfloat16 if widens or computes_bfloat16(capabilities) else torch.float32
