"""
Rotary position embeddings: the frequency of each pair of dimensions, and cosines and sines of positions.

All values are fp32, independent of the model's dtype: at position 100,000 a bfloat16 angle is off by whole
rotations.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from baton_engine.model.family import TensorNames
from baton_engine.spec import ModelSpec, RopeScaling


class Rotary:
    """Rotary embedding of one model: computes cosines and sines of positions. R: rotated dimensions."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self.frequencies: Tensor = inverse_frequencies(spec).to(device)
        """[R / 2] fp32, radians per position."""
        self.factor = attention_factor(spec.rope)

    @classmethod
    def of_layers(cls, spec: ModelSpec, device: torch.device) -> dict[str, Rotary]:
        """Return the rotary embeddings of the layers of a model, by `ModelSpec.rotation`."""
        if spec.sliding_rope_theta is None:
            return {"full": cls(spec, device)}
        sliding = replace(spec, rope_theta=spec.sliding_rope_theta, rope=RopeScaling())
        return {"full": cls(spec, device), "sliding": cls(sliding, device)}

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, [T, R / 2] fp32 each, of positions [T]."""
        angles = positions.to(torch.float32)[:, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        return cos, sin


def in_halves(rows: Tensor, heads: int, rotated: int) -> Tensor:
    """
    Reorder the rows of a query or key weight that rotates adjacent pairs, for a rotation of halves.

    `rows` is [heads * D, ...] or a bias [heads * D]. The first `rotated` rows of each head are reordered.
    Scores do not depend on the order of dimensions, because queries and keys are reordered alike.
    """
    by_head = rows.view(heads, -1, *rows.shape[1:])
    # [heads, R / 2, 2, ...] -> [heads, 2, R / 2, ...]
    pairs = by_head[:, :rotated].reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).flatten(1, 2)
    return torch.cat((pairs, by_head[:, rotated:]), dim=1).reshape(rows.shape)


def attention_factor(rope: RopeScaling) -> float:
    """Return the factor of cosines and sines: 1 except for YaRN and LongRoPE."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.kind != "yarn" or rope.factor <= 1 else 0.1 * math.log(rope.factor) + 1.0


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Return the frequencies [R / 2] fp32 on the CPU, with the model's scaling applied."""
    exponents = torch.arange(0, spec.rotated, 2, dtype=torch.float32) / spec.rotated
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
    """Divide low frequencies by the factor, keep high ones, and blend those between."""
    rotations = rope.original_context * plain / (2 * math.pi)
    unscaled = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    unscaled = unscaled.clamp(0, 1)
    return (1 - unscaled) * plain / rope.factor + unscaled * plain


def _yarn(plain: Tensor, rope: RopeScaling, spec: ModelSpec) -> Tensor:
    """Scale as `_llama3` does, but blend by the index of the dimension instead of the wavelength."""

    def dimension(rotations: float) -> float:
        """Return the dimension with this number of rotations within the original context."""
        wave = rope.original_context / (rotations * 2 * math.pi)
        return spec.rotated * math.log(wave) / (2 * math.log(spec.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotated - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    slowed = ((torch.arange(spec.rotated // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * slowed + plain * (1 - slowed)


def reordered(spec: ModelSpec, names: TensorNames) -> tuple[str, ...]:
    """Return the weights whose rows `in_order` moves, of a checkpoint that rotates adjacent pairs."""
    if spec.latent is None:
        return names.q, names.k
    return names.q, names.q_expand, names.kv_latent


def in_order(rows: Tensor, base: str, spec: ModelSpec, names: TensorNames) -> Tensor:
    """
    Reorder the rows of the weight or bias `base` of such a checkpoint, for a rotation of halves.

    With latent attention, the last `rotated` rows of each query head and of the latent are rotated.
    """
    if not base.endswith(reordered(spec, names)):
        return rows
    if spec.latent is None:
        return in_halves(rows, spec.heads if base.endswith(names.q) else spec.kv_heads, spec.rotated)
    heads = rows.view(1 if base.endswith(names.kv_latent) else spec.heads, -1, *rows.shape[1:])
    # [heads, R / 2, 2, ...] -> [heads, 2, R / 2, ...]
    adjacent = heads[:, -spec.rotated :].reshape(len(heads), spec.rotated // 2, 2, *rows.shape[1:])
    pairs = adjacent.transpose(1, 2).flatten(1, 2)
    return torch.cat((heads[:, : -spec.rotated], pairs), dim=1).reshape(rows.shape)
