"""
Multi-head latent attention: all heads share one latent vector per token.

https://arxiv.org/abs/2405.04434, section 2.1. The cache keeps only that vector: the normalized latent, then
the rotated part of the key. `ModelSpec` describes it as one key head of `kv_rank` + `rotated` dimensions
without values. Scores and sums are computed in the latent space, between the two halves of the expansion.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton_engine.batch import Batch
from baton_engine.kv.cache import KVCache
from baton_engine.ops import Linear, Ops
from baton_engine.spec import LATENT_EPSILON, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """The expansions of one layer. H: heads, R: rank of the latent, P: plain and V: value dimensions."""

    q_norm: Tensor | None
    """None if queries are projected directly."""
    kv_norm: Tensor
    expand_q: Linear | None
    keys: Tensor
    """[H, P, R]: expands the latent to keys."""
    values: Tensor
    """[H, V, R]: expands the latent to values."""
    spec: ModelSpec
    ops: Ops

    def store(
        self, projected: Tensor, rotation: tuple[Tensor, Tensor], cache: KVCache, layer: int, batch: Batch
    ) -> Tensor:
        """
        Write the latents of `projected` to the cache at `batch.slots`.

        `projected` is [T, query part + R + rotated]. Returns queries [T, H, R + rotated] in the latent space.
        """
        q, latents = torch.split(
            projected, [projected.shape[-1] - self.spec.head_dim, self.spec.head_dim], dim=-1
        )
        if self.expand_q is not None and self.q_norm is not None:
            q = self.expand_q(self.ops.rms_norm(q, self.q_norm, LATENT_EPSILON))
        heads = q.view(len(q), self.spec.heads, -1)
        return self.ops.store_latents(heads, latents, rotation, self.kv_norm, self.keys, cache, layer, batch)

    def expand(self, mixed: Tensor) -> Tensor:
        """Return values [T, H * V] of mixed latents [T, H * R]."""
        return self.ops.expand_latents(mixed, self.values)
