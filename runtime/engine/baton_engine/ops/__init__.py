"""
The operations of a decoder, as an interface.

The decoder is written once against `Ops`. `plain` computes them with torch (the reference, and what a CUDA
device runs); `cpu` uses prepacked weights.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from baton_engine.batch import Batch
from baton_engine.kv.cache import KVCache


class Linear(Protocol):
    """One weight, laid out as its `Ops` wants it."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], in x's dtype."""
        ...


class Ops(Protocol):
    """
    What a decoder layer is made of. T tokens, H query heads, K key heads, D head size.

    Inputs are not modified unless a docstring says so; results may share memory with nothing.
    """

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Lay out a [out, in] weight for this device. The caller drops its own copy afterwards."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """[..., N] normalised over N in fp32, times weight."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual); may overwrite both inputs."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2N] -> [T, N]: silu of the first half times the second."""
        ...

    def rope_and_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cache: KVCache,
        layer: int,
        batch: Batch,
    ) -> Tensor:
        """
        Split qkv [T, (H + 2K) * D]; norm the heads if asked; rotate q and k by cos and sin
        [T, D / 2] fp32 (the half-split rotation of Hugging Face); write k and v to the cache at
        `batch.slots`. Returns q [T, H, D].
        """
        ...

    def attention(self, q: Tensor, cache: KVCache, layer: int, batch: Batch, window: int | None) -> Tensor:
        """
        Causal attention of each row over its own cached context, its new tokens included, scaled by
        D ** -0.5. [T, H, D] -> [T, H * D]. With `window`, a position sees itself and the
        window - 1 tokens before it.
        """
        ...
