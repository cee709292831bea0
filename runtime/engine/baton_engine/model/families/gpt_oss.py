"""gpt-oss: attention sinks, windows in every other layer, and experts with biases and a clamp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.family import (
    GGUF_NAMES,
    GGUFFormat,
    ModelFamily,
    SupportedModels,
    TensorNames,
    alternating_windows,
    every,
    expert_count,
)
from baton_engine.spec import ExpertSpec, ModelSpec

SLOPE, CLAMP = 1.702, 7.0
"""Defaults of transformers' `GptOssConfig`."""

PERIOD = 2
"""Every second layer attends to all tokens."""


def _refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    experts = ExpertSpec(
        count=expert_count(config),
        chosen=int(config["num_experts_per_tok"]),
        intermediate=spec.intermediate,
        normalized=True,
        biased=True,
        clamp=float(config.get("swiglu_limit") or CLAMP),
        slope=float(config.get("swiglu_alpha") or SLOPE),
    )
    biased = bool(config.get("attention_bias", True))
    spec = alternating_windows(spec, config, PERIOD)
    return replace(spec, experts=experts, sinks=True, qkv_bias=biased, output_bias=biased)


def _refine_gguf(spec: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    experts = ExpertSpec(
        count=int(metadata["expert_count"]),
        chosen=int(metadata["expert_used_count"]),
        intermediate=int(metadata["expert_feed_forward_length"]),
        normalized=True,
        biased=True,
        clamp=CLAMP,
        slope=SLOPE,
    )
    return replace(
        spec,
        experts=experts,
        sinks=True,
        rope=replace(spec.rope, truncate=False),
        sliding_window=int(metadata["attention.sliding_window"]),
        sliding_layers=every(spec.layers, PERIOD),
    )


FAMILIES = (
    ModelFamily(
        architecture="GptOssForCausalLM",
        refine=_refine,
        gguf=GGUFFormat(
            architecture="gpt-oss",
            refine=_refine_gguf,
            tensors=replace(GGUF_NAMES, mlp_norm="post_attention_norm", attention_post_norm=""),
        ),
        models=(SupportedModels(name="gpt-oss", reasoning_parsers=("gpt-oss",)),),
        tensors=TensorNames(router="mlp.router"),
        fused_experts="interleaved",
        quantizations=("mxfp4",),
    ),
)
