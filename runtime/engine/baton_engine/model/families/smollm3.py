"""SmolLM3: Llama without rotation in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.families import llama
from baton_engine.model.family import GGUFFormat, ModelFamily, SupportedModels, every
from baton_engine.spec import ModelSpec

UNROTATED_PERIOD = 4
"""Default of `no_rope_layer_interval`, and llama.cpp's only value."""


def _refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    if config.get("use_sliding_window"):
        raise ValueError("use_sliding_window is not supported.")
    period = int(config.get("no_rope_layer_interval") or UNROTATED_PERIOD)
    # The list has 1 for layers with rotation, in spite of its name.
    rotated = config.get("no_rope_layers") or every(spec.layers, period)
    return replace(llama.refine(spec, config), unrotated_layers=tuple(not layer for layer in rotated))


def _refine_gguf(spec: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    rotated = every(spec.layers, UNROTATED_PERIOD)
    return replace(spec, unrotated_layers=tuple(not layer for layer in rotated))


FAMILIES = (
    ModelFamily(
        architecture="SmolLM3ForCausalLM",
        normalize=lambda config: {"tie_word_embeddings": True, **config},
        refine=_refine,
        gguf=GGUFFormat(architecture="smollm3", refine=_refine_gguf, interleaved=True),
        models=(SupportedModels(name="SmolLM3", tool_parsers=("hermes",), reasoning_parsers=("qwen3",)),),
    ),
)
