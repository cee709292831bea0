"""Granite 3: Llama with factors of embeddings, residuals, attention scores and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.families import llama
from baton_engine.model.family import GGUFFormat, ModelFamily, SupportedModels
from baton_engine.spec import ModelSpec


def _refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    return replace(
        llama.refine(spec, config),
        embedding_scale=float(config.get("embedding_multiplier", 1.0)),
        residual_scale=float(config.get("residual_multiplier", 1.0)),
        attention_scale=float(config.get("attention_multiplier", 1.0)),
        logit_scale=1 / float(config.get("logits_scaling", 1.0)),
    )


def _refine_gguf(spec: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    return replace(
        spec,
        embedding_scale=float(metadata.get("embedding_scale", 1.0)),
        residual_scale=float(metadata.get("residual_scale", 1.0)),
        attention_scale=float(metadata["attention.scale"]) if "attention.scale" in metadata else None,
        logit_scale=1 / float(metadata["logit_scale"]),
    )


FAMILIES = (
    ModelFamily(
        architecture="GraniteForCausalLM",
        refine=_refine,
        gguf=GGUFFormat(architecture="granite", refine=_refine_gguf, interleaved=True),
        models=(SupportedModels(name="Granite 3", reasoning_parsers=("granite",)),),
    ),
)
