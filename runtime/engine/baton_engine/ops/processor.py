"""
What this machine's processor computes well in, as torch reports it.

One question: whether bfloat16 is worth its rounding. Where the processor multiplies it natively
it halves the memory to stream and doubles the arithmetic; elsewhere it is emulated, and float32 wins.
"""

from __future__ import annotations

import torch


def computes_bfloat16() -> bool:
    """Whether the processor has bfloat16 products of its own (AVX-512 BF16, AMX, or Arm's BF16)."""
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def preferred_dtype() -> torch.dtype:
    """What `dtype=auto` means on this processor."""
    return torch.bfloat16 if computes_bfloat16() else torch.float32
