"""Mistral: a sliding window in all layers, if the configuration sets one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.family import ModelFamily, SupportedModels
from baton_engine.spec import ModelSpec


def _refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    window = config.get("sliding_window")
    return replace(spec, sliding_window=None if window is None else int(window))


FAMILY = ModelFamily(
    architecture="MistralForCausalLM",
    refine=_refine,
    models=(
        SupportedModels(
            name="Mistral", tool_parsers=("mistral", "mistral_v11"), reasoning_parsers=("mistral",)
        ),
    ),
    reasoning_parser_aliases={"magistral": "mistral"},
)
