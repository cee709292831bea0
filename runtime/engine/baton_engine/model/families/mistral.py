"""Mistral and Mixtral: a window in all layers if the configuration sets one; Mixtral has experts in all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.family import ModelFamily, SupportedModels, TensorNames, expert_count
from baton_engine.spec import ExpertSpec, ModelSpec


def _refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    window = config.get("sliding_window")
    return replace(spec, sliding_window=None if window is None else int(window))


MISTRAL = ModelFamily(
    architecture="MistralForCausalLM",
    refine=_refine,
    models=(
        SupportedModels(
            name="Mistral", tool_parsers=("mistral", "mistral_v11"), reasoning_parsers=("mistral",)
        ),
    ),
    reasoning_parser_aliases={"magistral": "mistral"},
)


def _refine_mixtral(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    experts = ExpertSpec(
        count=expert_count(config),
        chosen=int(config["num_experts_per_tok"]),
        intermediate=spec.intermediate,
        normalized=True,
    )
    return replace(_refine(spec, config), experts=experts)


BLOCK_SPARSE = TensorNames(
    router="block_sparse_moe.gate",
    expert_gate="block_sparse_moe.experts.{}.w1",
    expert_up="block_sparse_moe.experts.{}.w3",
    expert_down="block_sparse_moe.experts.{}.w2",
)

MIXTRAL = ModelFamily(
    architecture="MixtralForCausalLM",
    refine=_refine_mixtral,
    models=(SupportedModels(name="Mixtral", tool_parsers=("mistral",)),),
    tensors=BLOCK_SPARSE,
)

FAMILIES = (MISTRAL, MIXTRAL)
