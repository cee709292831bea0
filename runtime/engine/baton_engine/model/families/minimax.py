"""MiniMax-M2: experts chosen by sigmoids, norms of all heads together, part of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.families.mistral import BLOCK_SPARSE
from baton_engine.model.family import ModelFamily, SupportedModels, expert_count
from baton_engine.spec import ExpertSpec, ModelSpec


def _normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Published configurations have the number of rotated dimensions in place of their share."""
    rotated = config.get("rotary_dim")
    return config if rotated is None else {"partial_rotary_factor": rotated / config["head_dim"], **config}


def _refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    if (kind := config.get("qk_norm_type", "per_layer")) != "per_layer":
        raise ValueError(f"qk_norm_type {kind!r} is not supported. Supported: per_layer.")
    normed = bool(config.get("use_qk_norm", True))
    experts = ExpertSpec(
        count=expert_count(config),
        chosen=int(config["num_experts_per_tok"]),
        intermediate=spec.intermediate,
        scoring="sigmoid",
        corrected=True,
        normalized=True,
    )
    return replace(spec, qk_norm=normed, qk_norm_joint=normed, experts=experts)


FAMILIES = (
    ModelFamily(
        architecture="MiniMaxM2ForCausalLM",
        normalize=_normalize,
        refine=_refine,
        partial_rotary=True,
        tensors=replace(BLOCK_SPARSE, router_correction="block_sparse_moe.e_score_correction"),
        models=(
            SupportedModels(
                name="MiniMax-M2, M2.1, M2.5", tool_parsers=("minimax_m2",), reasoning_parsers=("minimax_m2",)
            ),
        ),
        tool_parser_aliases={"minimax-m2": "minimax_m2"},
    ),
)
