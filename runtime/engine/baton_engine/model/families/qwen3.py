"""Qwen3: RMS norms of each query and key head, optional biases, and a sliding window in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.family import GGUFFormat, ModelFamily, SupportedModels
from baton_engine.model.sliding import gguf_window, layer_windows
from baton_engine.spec import ModelSpec

HEAD_DIM = 128
"""Default of transformers' `Qwen3Config`."""


def _refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    attention_bias = bool(config.get("attention_bias", False))
    return replace(
        layer_windows(spec, config),
        head_dim=int(config.get("head_dim") or HEAD_DIM),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
    )


FAMILY = ModelFamily(
    architecture="Qwen3ForCausalLM",
    refine=_refine,
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
