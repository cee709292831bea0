"""
Multi-head latent attention: all heads share one latent vector per token, which is all that the cache keeps.

https://arxiv.org/abs/2405.04434, section 2.1. The cached vector is the normalized latent, then the rotated
part of the key. `ModelSpec` describes it as one key head of `kv_rank` + `rotated` dimensions without values.
Scores and sums are computed in the latent space, between the two halves of the expansion.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_api.errors import SetupError

MOST_RANK = 65_536
"""Upper bound of sizes, above those of any published model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Sizes of latent attention."""

    q_rank: int
    """Size of the latent of queries; 0 if queries are projected directly."""
    kv_rank: int
    """Size of the latent of keys and values."""
    plain: int
    """Dimensions of a query head that are not rotated."""
    value: int
    """Dimensions of a value head."""


def check_latent(latent: LatentSpec, source: str) -> None:
    """Validate the sizes. Raises SetupError, which names `source`."""
    sizes = {"q_lora_rank": (latent.q_rank, 0), "kv_lora_rank": (latent.kv_rank, 1)}
    sizes |= {"qk_nope_head_dim": (latent.plain, 1), "v_head_dim": (latent.value, 1)}
    for name, (value, least) in sizes.items():
        if not least <= value <= MOST_RANK:
            raise SetupError(f"{source}: {name} is {value}, expected {least} to {MOST_RANK}.")
