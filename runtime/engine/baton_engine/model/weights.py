"""The weights of a decoder by their places, q, k and v fused, gate and up fused."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Shapes: N hidden, H and K query and key heads, D head size, F intermediate."""

    attention_norm: Tensor
    """[N]"""
    qkv: Tensor
    """[(H + 2K) * D, N]: q, k, v stacked."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    """[D], Qwen3 only."""
    k_norm: Tensor | None
    output: Tensor
    """[N, H * D]"""
    output_bias: Tensor | None
    mlp_norm: Tensor
    """[N]"""
    gate_up: Tensor
    """[2F, N]: gate and up stacked."""
    gate_up_bias: Tensor | None
    down: Tensor
    """[N, F]"""
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A whole model."""

    embedding: Tensor
    """[V, N]"""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    """[N]"""
    head: Tensor
    """[V, N]; the embedding itself where they are tied."""

    @property
    def bytes(self) -> int:
        """What all of them take, each counted once."""
        parts = [getattr(layer, part.name) for layer in self.layers for part in fields(layer)]
        tensors = [self.embedding, self.final_norm, self.head, *parts]
        sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor is not None}
        return sum(sizes.values())
