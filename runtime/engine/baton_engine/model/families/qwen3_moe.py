"""Qwen3 with experts, in all layers or in some. Other options are those of Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.families import qwen3
from baton_engine.model.family import GGUFFormat, ModelFamily, SupportedModels, expert_count, gguf_experts
from baton_engine.model.sliding import gguf_window
from baton_engine.spec import ExpertSpec, ModelSpec


def _refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    step, dense = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
    experts = ExpertSpec(
        count=expert_count(config),
        chosen=int(config["num_experts_per_tok"]),
        intermediate=int(config["moe_intermediate_size"]),
        normalized=bool(config.get("norm_topk_prob", False)),
        layers=tuple(number not in dense and (number + 1) % step == 0 for number in range(spec.layers)),
    )
    head_dim = int(config.get("head_dim") or spec.hidden // spec.heads)
    return replace(qwen3.FAMILY.refine(spec, config), head_dim=head_dim, experts=experts)


def _refine_gguf(spec: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    return replace(gguf_window(spec, metadata), experts=gguf_experts(metadata, spec.intermediate))


FAMILY = ModelFamily(
    architecture="Qwen3MoeForCausalLM",
    refine=_refine,
    gguf=GGUFFormat(architecture="qwen3moe", refine=_refine_gguf),
    models=(
        SupportedModels(
            name="Qwen3 and Qwen3-Coder with experts",
            tool_parsers=("hermes", "qwen3_coder"),
            reasoning_parsers=("qwen3", "qwen3-thinking"),
        ),
    ),
)
