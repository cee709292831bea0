"""
Rotary position embeddings: how fast each pair of dimensions turns, and the cosines and sines of positions.

All in fp32 whatever the model's dtype: at position 100,000 a bfloat16 angle would be off by whole turns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton_engine.model.spec import ModelSpec, RopeScaling


class Rotary:
    """The rotation of one model; makes cosines and sines for the positions of a pass."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self.frequencies: Tensor = inverse_frequencies(spec).to(device)
        """[D / 2] fp32, radians per position."""
        self.factor = attention_factor(spec.rope)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, [T, D / 2] fp32 each, of positions [T]."""
        angles = positions.to(torch.float32)[:, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        return cos, sin


def attention_factor(rope: RopeScaling) -> float:
    """What cosine and sine are multiplied by; only yarn has other than 1."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else 0.1 * math.log(rope.factor) + 1.0


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """[D / 2] fp32 on the CPU, stretched as the model's scaling says."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    plain = 1.0 / (spec.rope_theta**exponents)
    rope = spec.rope
    match rope.kind:
        case "none":
            return plain
        case "linear":
            return plain / rope.factor
        case "factors":
            return plain / torch.tensor(rope.factors, dtype=torch.float32)
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(plain, rope, spec)


def _llama3(plain: Tensor, rope: RopeScaling) -> Tensor:
    """Long waves are slowed by the factor, short ones kept, and those between blended."""
    rotations = rope.original_context * plain / (2 * math.pi)
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(plain: Tensor, rope: RopeScaling, spec: ModelSpec) -> Tensor:
    """As llama3's, but blended along the dimension's number instead of its wavelength."""

    def dimension(rotations: float) -> float:
        """The dimension that turns so often within the original context."""
        wave = rope.original_context / (rotations * 2 * math.pi)
        return spec.head_dim * math.log(wave) / (2 * math.log(spec.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    if low == high:
        high += 0.001  # the step between them stays finite
    slowed = ((torch.arange(spec.head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * slowed + plain * (1 - slowed)
