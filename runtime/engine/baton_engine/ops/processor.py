"""
What this machine's processor computes well in, as torch reports it.

One question: whether bfloat16 is worth its rounding. Where the processor multiplies it natively
it halves the memory to stream and doubles the arithmetic. With AVX2 or AVX-512 alone, the native kernels
widen it on the way: half the memory to stream, which is what a step waits for. torch emulates it there,
and float32 wins.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


def computes_bfloat16(capabilities: Mapping[str, object]) -> bool:
    """Whether the processor has bfloat16 products of its own (AVX-512 BF16, AMX, or Arm's BF16)."""
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def preferred_dtype(capabilities: Mapping[str, object], native: bool) -> torch.dtype:
    """Return what `dtype=auto` means on a processor with these capabilities.

    `native` says whether the native kernels compute the model there.
    """
    widens = native and bool(capabilities.get("avx2"))
    return torch.bfloat16 if widens or computes_bfloat16(capabilities) else torch.float32
