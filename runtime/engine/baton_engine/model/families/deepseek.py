"""
DeepSeek: latent attention, dense first layers, then shared and routed experts.

V2 chooses experts by group. V3 and R1 score them by sigmoids, which are corrected for the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from baton_engine.model.family import GGUFFormat, ModelFamily, SupportedModels, expert_count
from baton_engine.spec import ExpertSpec, LatentSpec, ModelSpec, mscale


def with_latent(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """Read the sizes of latent attention."""
    if config.get("attention_bias"):
        raise ValueError("attention_bias is not supported with latent attention")
    rotated, plain = int(config["qk_rope_head_dim"]), int(config["qk_nope_head_dim"])
    rank = int(config["kv_lora_rank"])
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    stretch = (
        mscale(spec.rope.factor, float(rope.get("mscale_all_dim") or 0)) if spec.rope.kind == "yarn" else 1
    )
    return replace(
        spec,
        kv_heads=1,
        head_dim=rank + rotated,
        rotary_dim=rotated,
        attention_scale=(plain + rotated) ** -0.5 * stretch**2,
        latent=LatentSpec(
            q_rank=int(config.get("q_lora_rank") or 0),
            kv_rank=rank,
            plain=plain,
            value=int(config["v_head_dim"]),
        ),
    )


def routed(spec: ModelSpec, config: Mapping[str, Any], **routing: Any) -> ExpertSpec:
    """Read the experts. `routing` are further fields of `ExpertSpec`."""
    size, first = int(config["moe_intermediate_size"]), int(config.get("first_k_dense_replace") or 0)
    if (step := config.get("moe_layer_freq") or 1) != 1:
        raise ValueError(f"moe_layer_freq {step} is not supported. Supported: 1.")
    return ExpertSpec(
        count=expert_count(config),
        chosen=int(config["num_experts_per_tok"]),
        intermediate=size,
        shared=size * int(config.get("n_shared_experts") or 0),
        scale=float(config.get("routed_scaling_factor") or 1),
        layers=tuple(number >= first for number in range(spec.layers)),
        **routing,
    )


def _refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    method, scoring = config.get("topk_method") or "greedy", config.get("scoring_func") or "softmax"
    if method not in ("greedy", "group_limited_greedy") or scoring != "softmax":
        raise ValueError(
            f"topk_method {method!r} with scoring_func {scoring!r} is not supported. Supported: greedy and "
            "group_limited_greedy with softmax."
        )
    if config.get("norm_topk_prob"):
        raise ValueError("norm_topk_prob is not supported for DeepSeek-V2")
    groups = {}
    if method == "group_limited_greedy":
        groups = {"groups": int(config["n_group"]), "chosen_groups": int(config["topk_group"])}
    return replace(with_latent(spec, config), experts=routed(spec, config, **groups))


GATING: Mapping[int, Literal["softmax", "sigmoid"]] = {0: "softmax", 1: "softmax", 2: "sigmoid"}
"""llama.cpp's numbers of scoring functions. Files of DeepSeek-V2 may omit the number."""


def _refine_gguf(spec: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    """Read DeepSeek-V2 and V3, which llama.cpp stores as one architecture."""
    rotated, rank = int(metadata["rope.dimension_count"]), int(metadata["attention.kv_lora_rank"])
    head = int(metadata["attention.key_length_mla"])
    latent = LatentSpec(
        q_rank=int(metadata.get("attention.q_lora_rank", 0)),
        kv_rank=rank,
        plain=head - rotated,
        value=int(metadata["attention.value_length_mla"]),
    )
    scoring = GATING[int(metadata.get("expert_gating_func", 0))]
    size, first = (
        int(metadata["expert_feed_forward_length"]),
        int(metadata.get("leading_dense_block_count", 0)),
    )
    groups = int(metadata.get("expert_group_count", 1))
    experts = ExpertSpec(
        count=int(metadata["expert_count"]),
        chosen=int(metadata["expert_used_count"]),
        intermediate=size,
        scoring=scoring,
        normalized=bool(metadata.get("expert_weights_norm", False)),
        scale=float(metadata.get("expert_weights_scale", 1.0)),
        groups=groups,
        chosen_groups=int(metadata.get("expert_group_used_count", groups)),
        group_best=2 if scoring == "sigmoid" else 1,
        corrected=scoring == "sigmoid",
        shared=size * int(metadata.get("expert_shared_count", 0)),
        layers=tuple(number >= first for number in range(spec.layers)),
    )
    # The file has a tenth of mscale_all_dim. Its factor of cosines and sines is 1.
    stretch, rope = 1.0, spec.rope
    if rope.kind == "yarn":
        stretch = mscale(rope.factor, 10 * float(metadata.get("rope.scaling.yarn_log_multiplier", 0)))
        rope = replace(rope, attention_factor=1.0)
    scale = head**-0.5 * stretch**2
    return replace(spec, qk_norm=False, latent=latent, experts=experts, rope=rope, attention_scale=scale)


DEEPSEEK_V2 = ModelFamily(
    architecture="DeepseekV2ForCausalLM",
    refine=_refine,
    models=(SupportedModels(name="DeepSeek-V2"),),
    gguf=GGUFFormat(architecture="deepseek2", refine=_refine_gguf, interleaved=True),
    interleaved=True,
)


GROUP_BEST = 2
"""A group's score is the sum of its two best experts. https://arxiv.org/abs/2412.19437, section 2.1.2"""


def routed_by_sigmoids(spec: ModelSpec, config: Mapping[str, Any]) -> ExpertSpec:
    """Read the experts of DeepSeek-V3, and of families that have the same."""
    return routed(
        spec,
        config,
        scoring="sigmoid",
        corrected=True,
        normalized=bool(config.get("norm_topk_prob", True)),
        groups=int(config.get("n_group") or 1),
        chosen_groups=int(config.get("topk_group") or 1),
        group_best=GROUP_BEST,
    )


def draft_layers(config: Mapping[str, Any]) -> int:
    """Read the number of layers that predict further tokens."""
    return int(config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0)


def _refine_v3(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    method, scoring = config.get("topk_method") or "noaux_tc", config.get("scoring_func") or "sigmoid"
    if (method, scoring) != ("noaux_tc", "sigmoid"):
        raise ValueError(
            f"topk_method {method!r} with scoring_func {scoring!r} is not supported. Supported: noaux_tc "
            "with sigmoid."
        )
    if config.get("rope_interleave") is False:
        raise ValueError("rope_interleave false is not supported. Supported: true.")
    return replace(
        with_latent(spec, config),
        experts=routed_by_sigmoids(spec, config),
        draft_layers=draft_layers(config),
    )


DEEPSEEK_V3 = ModelFamily(
    architecture="DeepseekV3ForCausalLM",
    refine=_refine_v3,
    models=(
        SupportedModels(
            name="DeepSeek-V3, DeepSeek-R1",
            tool_parsers=("deepseek_v3", "deepseek_v31"),
            reasoning_parsers=("deepseek-r1", "deepseek-v3"),
        ),
    ),
    interleaved=True,
)

FAMILIES = (DEEPSEEK_V2, DEEPSEEK_V3)
