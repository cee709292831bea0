"""Mixtral: experts in all layers, and a sliding window in all layers if the configuration sets one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.family import ModelFamily, SupportedModels, TensorNames, expert_count
from baton_engine.spec import ExpertSpec, ModelSpec


def _refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    window = config.get("sliding_window")
    experts = ExpertSpec(
        count=expert_count(config),
        chosen=int(config["num_experts_per_tok"]),
        intermediate=spec.intermediate,
        normalized=True,
    )
    return replace(spec, sliding_window=None if window is None else int(window), experts=experts)


FAMILY = ModelFamily(
    architecture="MixtralForCausalLM",
    refine=_refine,
    models=(SupportedModels(name="Mixtral", tool_parsers=("mistral",)),),
    tensors=TensorNames(
        router="block_sparse_moe.gate",
        expert_gate="block_sparse_moe.experts.{}.w1",
        expert_up="block_sparse_moe.experts.{}.w3",
        expert_down="block_sparse_moe.experts.{}.w2",
    ),
)
