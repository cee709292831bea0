"""DeepSeek-V3 and R1: as DeepSeek-V2, with sigmoid scores, corrected for the choice of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.families.deepseek_v2 import routed, with_latent
from baton_engine.model.family import ModelFamily, SupportedModels
from baton_engine.spec import ModelSpec

GROUP_BEST = 2
"""A group's score is the sum of its two best experts. https://arxiv.org/abs/2412.19437, section 2.1.2"""


def _refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    method, scoring = config.get("topk_method") or "noaux_tc", config.get("scoring_func") or "sigmoid"
    if (method, scoring) != ("noaux_tc", "sigmoid"):
        raise ValueError(
            f"topk_method {method!r} with scoring_func {scoring!r} is not supported. Supported: noaux_tc "
            "with sigmoid."
        )
    if config.get("rope_interleave") is False:
        raise ValueError("rope_interleave false is not supported. Supported: true.")
    experts = routed(
        spec,
        config,
        scoring="sigmoid",
        corrected=True,
        normalized=bool(config.get("norm_topk_prob", True)),
        groups=int(config.get("n_group") or 1),
        chosen_groups=int(config.get("topk_group") or 1),
        group_best=GROUP_BEST,
    )
    drafts = int(config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0)
    return replace(with_latent(spec, config), experts=experts, draft_layers=drafts)


FAMILY = ModelFamily(
    architecture="DeepseekV3ForCausalLM",
    refine=_refine,
    models=(
        SupportedModels(
            name="DeepSeek-V3, DeepSeek-R1",
            tool_parsers=("deepseek_v3", "deepseek_v31"),
            reasoning_parsers=("deepseek-r1", "deepseek-v3"),
        ),
    ),
    interleaved=True,
)
