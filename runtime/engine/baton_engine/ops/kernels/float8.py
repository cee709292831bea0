"""
Conversion between float8 (e4m3) numbers, as bytes, and wider floats.

It uses integers, because many accelerators lack instructions for this format, or have them for a variant.
https://arxiv.org/abs/2209.05433
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widen(octets, dtype: tl.constexpr):
    """Return the numbers divided by `FLOAT8_FACTOR`, exactly. NaN remains NaN."""
    bits = octets.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    half = tl.where((bits & 0x7F) == 0x7F, 0x7E00, half).to(tl.uint16)
    return half.to(tl.float16, bitcast=True).to(dtype)


@triton.jit
def narrow(values):
    """Return the nearest float8 number of each fp32 value, 448 at most, and NaN if it is not finite."""
    bits = values.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    clipped = tl.minimum(magnitude, 0x43E00000)  # 448
    even = (clipped >> 20) & 1
    normal = ((clipped + 0x7FFFF + even) >> 20) - ((127 - 7) << 3)
    # Adding 2**14 leaves multiples of 2**-9, the least number, in the low bits.
    moved = clipped.to(tl.float32, bitcast=True) + 16384.0
    below = moved.to(tl.uint32, bitcast=True) - 0x46800000
    number = tl.where(clipped < 0x3C800000, below, normal)  # 2**-6
    number = tl.where(magnitude >= 0x7F800000, 0x7F, number)
    return (number | ((bits >> 24) & 0x80)).to(tl.uint8)
