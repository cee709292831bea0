"""Qwen2 and Qwen2.5: biases of q, k and v, and a sliding window in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.family import GGUFFormat, ModelFamily, SupportedModels
from baton_engine.model.sliding import gguf_window, layer_windows
from baton_engine.spec import ModelSpec


def _refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    return replace(layer_windows(spec, config), qkv_bias=True)


FAMILY = ModelFamily(
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
