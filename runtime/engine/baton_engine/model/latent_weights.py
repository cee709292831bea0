"""Weights of latent attention: the shapes of their tensors, and the order of rotated dimensions."""

from __future__ import annotations

from torch import Tensor, cat

from baton_engine.model.family import TensorNames
from baton_engine.model.latent import LatentSpec
from baton_engine.model.spec import ModelSpec


def latent_shapes(
    spec: ModelSpec, latent: LatentSpec, names: TensorNames
) -> dict[str, tuple[int, int, bool]]:
    """Return outputs, inputs and whether there is a bias, for each matrix of a layer's attention."""
    n, heads, rotated = spec.hidden, spec.heads, spec.rotated
    queries = heads * (latent.plain + rotated)
    shapes = {
        names.kv_latent: (latent.kv_rank + rotated, n, False),
        names.kv_expand: (heads * (latent.plain + latent.value), latent.kv_rank, False),
        names.output: (n, heads * latent.value, False),
    }
    if not latent.q_rank:
        return shapes | {names.q: (queries, n, False)}
    return shapes | {
        names.q_latent: (latent.q_rank, n, False),
        names.q_expand: (queries, latent.q_rank, False),
    }


def latent_norms(latent: LatentSpec, names: TensorNames) -> dict[str, int]:
    """Return the sizes of the norms of the latents."""
    return {names.kv_latent_norm: latent.kv_rank} | (
        {names.q_latent_norm: latent.q_rank} if latent.q_rank else {}
    )


def rotated_in_halves(rows: Tensor, base: str, spec: ModelSpec, names: TensorNames) -> Tensor:
    """
    Reorder the rows of the weight `base` that rotates adjacent pairs, for a rotation of halves.

    The last `rotated` rows of each query head, and of the latent of keys and values, are rotated.
    """
    latent = spec.latent
    if latent is None or not base.endswith((names.q, names.q_expand, names.kv_latent)):
        return rows
    heads = rows.view(1 if base.endswith(names.kv_latent) else spec.heads, -1, *rows.shape[1:])
    # [heads, R / 2, 2, ...] -> [heads, 2, R / 2, ...]
    adjacent = heads[:, -spec.rotated :].reshape(len(heads), spec.rotated // 2, 2, *rows.shape[1:])
    pairs = adjacent.transpose(1, 2).flatten(1, 2)
    return cat((heads[:, : -spec.rotated], pairs), dim=1).reshape(rows.shape)
