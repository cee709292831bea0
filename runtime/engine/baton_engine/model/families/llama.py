"""Llama 2 and 3, and models of the same architecture: optional biases in attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.family import GGUFFormat, ModelFamily, SupportedModels, gguf_experts
from baton_engine.model.sliding import gguf_window
from baton_engine.spec import ModelSpec


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


FAMILY = ModelFamily(
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
