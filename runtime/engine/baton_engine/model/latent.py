"""
Multi-head latent attention with torch operations: all heads share one latent vector per token.

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
from baton_engine.ops.plain import rotate
from baton_engine.spec import ModelSpec

NORM_EPSILON = 1e-6
"""Of the norms of latents in all published models, whatever the configuration has for other norms."""


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
        latent, rotated, epsilon = self.spec.latent, self.spec.rotated, NORM_EPSILON
        assert latent is not None
        q, kv, k_rotated = torch.split(
            projected, [projected.shape[-1] - latent.kv_rank - rotated, latent.kv_rank, rotated], dim=-1
        )
        if self.expand_q is not None and self.q_norm is not None:
            q = self.expand_q(self.ops.rms_norm(q, self.q_norm, epsilon))
        kv = self.ops.rms_norm(kv, self.kv_norm, epsilon)
        block, slot = batch.slots // cache.block_size, batch.slots % cache.block_size
        k_rotated = rotate(k_rotated[:, None], rotation)[:, 0]
        cache.kv[block, layer, 0, 0, slot] = torch.cat((kv, k_rotated), dim=-1)
        heads = q.view(len(q), self.spec.heads, -1)
        plain, q_rotated = torch.split(heads, [latent.plain, rotated], dim=-1)
        within = torch.einsum("thp,hpr->thr", plain, self.keys)
        return torch.cat((within, rotate(q_rotated, rotation)), dim=-1)

    def expand(self, mixed: Tensor) -> Tensor:
        """Return values [T, H * V] of mixed latents [T, H * (R + rotated)]."""
        latents = mixed.view(len(mixed), self.spec.heads, -1)[..., : self.values.shape[-1]]
        return torch.einsum("thr,hvr->thv", latents, self.values).flatten(1)
