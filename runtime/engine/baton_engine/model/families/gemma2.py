"""
Gemma 2: norms around attention and MLP, GELU gates, capped scores and logits, a window in every second layer.

https://arxiv.org/abs/2408.00118
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.family import GGUFFormat, ModelFamily, SupportedModels, TensorNames
from baton_engine.model.sliding import alternating_windows, gguf_pattern
from baton_engine.spec import ModelSpec

WINDOW_PERIOD = 2
"""Every second layer attends to all tokens."""
HEAD_SIZE = 256
"""Default of `head_dim` and of `query_pre_attn_scalar` in transformers."""
LAYERS_27B = 46
"""Layers of the only size whose scores are scaled by hidden / heads; GGUF files do not store the scale."""

TENSORS = TensorNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fill in the values that published configurations omit, with transformers' defaults."""
    defaults = {"head_dim": HEAD_SIZE, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    activation = config.get("hidden_activation") or "gelu_pytorch_tanh"
    return {**defaults, **config, "hidden_act": activation}


def gemma(spec: ModelSpec) -> ModelSpec:
    """Return the spec with the options that Gemma 2 and 3 share."""
    return replace(spec, post_norm=True, activation="gelu_tanh", embedding_scale=spec.hidden**0.5)


def refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """Read the options of `config.json` that Gemma 2 and 3 share."""
    if config.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported.")
    biased = bool(config.get("attention_bias", False))
    caps = {
        name: None if config.get(key) is None else float(config[key])
        for name, key in (
            ("attention_cap", "attn_logit_softcapping"),
            ("logit_cap", "final_logit_softcapping"),
        )
    }
    return replace(
        gemma(spec),
        activation=spec.activation,
        qkv_bias=biased,
        output_bias=biased,
        attention_scale=1 / math.sqrt(config.get("query_pre_attn_scalar", HEAD_SIZE)),
        attention_cap=caps["attention_cap"],
        logit_cap=caps["logit_cap"],
    )


def _refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    spec = refine(spec, caps | dict(config))
    return alternating_windows(spec, {"sliding_window": 4096, **config}, WINDOW_PERIOD)


def gguf_scale(spec: ModelSpec, layers: int) -> float | None:
    """Return the scale of scores, which llama.cpp derives from the number of layers of the largest size."""
    return (spec.hidden / spec.heads) ** -0.5 if spec.layers == layers else None


def _refine_gguf(spec: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    return replace(
        gguf_pattern(gemma(spec), {"attention.sliding_window": 4096, **metadata}, WINDOW_PERIOD),
        attention_scale=gguf_scale(spec, LAYERS_27B),
        attention_cap=float(metadata.get("attn_logit_softcapping", 50.0)),
        logit_cap=float(metadata.get("final_logit_softcapping", 30.0)),
    )


FAMILY = ModelFamily(
    architecture="Gemma2ForCausalLM",
    normalize=normalize,
    refine=_refine,
    tensors=TENSORS,
    norm_offset=1.0,
    gguf=GGUFFormat(architecture="gemma2", refine=_refine_gguf),
    models=(SupportedModels(name="Gemma 2", tool_parsers=("hermes",)),),
)
