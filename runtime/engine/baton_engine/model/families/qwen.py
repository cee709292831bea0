"""
Qwen: a sliding window in some layers.

Qwen2 and Qwen2.5 have biases of q, k and v. Qwen3 has RMS norms of each query and key head, and optional
biases; with experts, in all layers or in some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.family import (
    GGUFFormat,
    ModelFamily,
    SupportedModels,
    expert_count,
    gguf_experts,
    gguf_window,
    layer_windows,
)
from baton_engine.spec import ExpertSpec, ModelSpec


def _refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    return replace(layer_windows(spec, config), qkv_bias=True)


QWEN_2 = ModelFamily(
    architecture="Qwen2ForCausalLM",
    refine=_refine,
    gguf=GGUFFormat(architecture="qwen2", refine=gguf_window),
    models=(
        SupportedModels(name="Qwen2, Qwen2.5", tool_parsers=("hermes",)),
        SupportedModels(
            name="DeepSeek R1 distillations",
            tool_parsers=("deepseek_v3", "deepseek_v31"),
            reasoning_parsers=("deepseek-r1", "deepseek-v3"),
        ),
    ),
    tool_parser_aliases={"qwen": "hermes", "qwen25": "hermes", "qwen2.5": "hermes"},
)


HEAD_DIM = 128
"""Default of transformers' `Qwen3Config`."""


def _refine_qwen3(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    attention_bias = bool(config.get("attention_bias", False))
    return replace(
        layer_windows(spec, config),
        head_dim=int(config.get("head_dim") or HEAD_DIM),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
    )


QWEN_3 = ModelFamily(
    architecture="Qwen3ForCausalLM",
    refine=_refine_qwen3,
    gguf=GGUFFormat(architecture="qwen3", refine=gguf_window),
    models=(
        SupportedModels(
            name="Qwen3",
            tool_parsers=("hermes", "qwen3_coder"),
            reasoning_parsers=("qwen3", "qwen3-thinking"),
        ),
    ),
    tool_parser_aliases={"qwen3": "hermes"},
)


def _refine_moe(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    step, dense = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
    experts = ExpertSpec(
        count=expert_count(config),
        chosen=int(config["num_experts_per_tok"]),
        intermediate=int(config["moe_intermediate_size"]),
        normalized=bool(config.get("norm_topk_prob", False)),
        layers=tuple(number not in dense and (number + 1) % step == 0 for number in range(spec.layers)),
    )
    head_dim = int(config.get("head_dim") or spec.hidden // spec.heads)
    return replace(_refine_qwen3(spec, config), head_dim=head_dim, experts=experts)


def _refine_gguf_moe(spec: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    return replace(gguf_window(spec, metadata), experts=gguf_experts(metadata, spec.intermediate))


QWEN_3_MOE = ModelFamily(
    architecture="Qwen3MoeForCausalLM",
    refine=_refine_moe,
    gguf=GGUFFormat(architecture="qwen3moe", refine=_refine_gguf_moe),
    models=(
        SupportedModels(
            name="Qwen3 and Qwen3-Coder with experts",
            tool_parsers=("hermes", "qwen3_coder"),
            reasoning_parsers=("qwen3", "qwen3-thinking"),
        ),
    ),
)

FAMILIES = (QWEN_2, QWEN_3, QWEN_3_MOE)
