"""
The Llama series, and models of the same architecture.

Llama 2 and 3 have optional biases in attention and MLP. Llama 4, text
only, has experts beside a shared one, layers without rotation, and attention in chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.family import (
    GGUFFormat,
    ModelFamily,
    SupportedModels,
    TensorNames,
    every,
    expert_count,
    gguf_experts,
    gguf_window,
)
from baton_engine.spec import ExpertSpec, ModelSpec


def refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """Read the biases of `config.json`."""
    attention_bias = bool(config.get("attention_bias", False))
    return replace(
        spec,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _refine_gguf(spec: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    """Read the options of models that llama.cpp stores as Llama: Mistral's window, Mixtral's experts."""
    return replace(gguf_window(spec, metadata), experts=gguf_experts(metadata, spec.intermediate))


LLAMA = ModelFamily(
    architecture="LlamaForCausalLM",
    refine=refine,
    gguf=GGUFFormat(architecture="llama", refine=_refine_gguf, interleaved=True),
    models=(
        SupportedModels(name="Llama 2, SmolLM2", tool_parsers=("hermes",)),
        SupportedModels(name="Llama 3", tool_parsers=("llama3", "pythonic")),
        SupportedModels(
            name="DeepSeek R1 distillations",
            tool_parsers=("deepseek_v3", "deepseek_v31"),
            reasoning_parsers=("deepseek-r1", "deepseek-v3"),
        ),
    ),
    tool_parser_aliases={"llama": "llama3"},
)


PERIOD = 4
"""Default distance of layers without rotation."""

TEMPERATURE, LENGTH = 0.1, 8192
"""Defaults of `attn_scale` and `floor_scale`."""


def _normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the text part, and what the whole configuration has in addition."""
    return {**config, **(config.get("text_config") or {}), "architectures": config.get("architectures")}


def _refine_llama4(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    rotated = config.get("no_rope_layers") or every(
        spec.layers, int(config.get("no_rope_layer_interval") or PERIOD)
    )
    unrotated = tuple(not value for value in rotated)
    kinds = config.get("layer_types") or [
        "full_attention" if omitted else "chunked_attention" for omitted in unrotated
    ]
    if others := set(kinds) - {"chunked_attention", "full_attention"}:
        raise ValueError(f"layer_types has {sorted(others)}. Supported: chunked_attention, full_attention.")
    chunk, step = config.get("attention_chunk_size"), int(config.get("interleave_moe_layer_step") or 1)
    with_experts = config.get("moe_layers")
    if with_experts is None:
        with_experts = range(step - 1, spec.layers, step)
    experts = ExpertSpec(
        count=expert_count(config),
        chosen=int(config["num_experts_per_tok"]),
        intermediate=spec.intermediate,
        shared=spec.intermediate,
        scoring="sigmoid",
        weighs_inputs=True,
        layers=tuple(number in with_experts for number in range(spec.layers)),
    )
    temperature = (float(config.get("attn_scale") or TEMPERATURE), int(config.get("floor_scale") or LENGTH))
    biased = bool(config.get("attention_bias", False))
    return replace(
        spec,
        intermediate=int(config.get("intermediate_size_mlp") or spec.intermediate),
        unrotated_layers=unrotated,
        sliding_window=None if chunk is None else int(chunk),
        sliding_layers=tuple(kind == "chunked_attention" for kind in kinds) if chunk is not None else (),
        window_chunks=chunk is not None,
        qk_norm_after=bool(config.get("use_qk_norm", True)),
        temperature=temperature if config.get("attn_temperature_tuning", True) else None,
        qkv_bias=biased,
        output_bias=biased,
        experts=experts,
    )


LLAMA_4 = ModelFamily(
    architecture="Llama4ForCausalLM",
    refine=_refine_llama4,
    models=(SupportedModels(name="Llama 4 (text)", tool_parsers=("llama4_pythonic", "llama3")),),
    normalize=_normalize,
    multimodal="Llama4ForConditionalGeneration",
    interleaved=True,
    fused_experts="halves",
    tensors=TensorNames(
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
        router="feed_forward.router",
        expert_gate="feed_forward.experts.{}.gate_proj",
        expert_up="feed_forward.experts.{}.up_proj",
        expert_down="feed_forward.experts.{}.down_proj",
        shared_gate="feed_forward.shared_expert.gate_proj",
        shared_up="feed_forward.shared_expert.up_proj",
        shared_down="feed_forward.shared_expert.down_proj",
    ),
)

FAMILIES = (LLAMA, LLAMA_4)
