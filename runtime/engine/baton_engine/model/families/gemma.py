"""
Gemma: norms around attention and MLP, GELU gates, and windows in most layers.

Gemma 2 caps scores and logits: https://arxiv.org/abs/2408.00118. Gemma 3 normalizes each query and key head,
and rotates layers with a window by another base: https://arxiv.org/abs/2503.19786. The text part of its
checkpoints with images is served too, for text only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.family import (
    GGUFFormat,
    ModelFamily,
    SupportedModels,
    TensorNames,
    alternating_windows,
    gguf_pattern,
    rope_by_window,
)
from baton_engine.spec import ModelSpec

HEAD_SIZE = 256
"""Default of `head_dim` and of `query_pre_attn_scalar` in transformers."""

GEMMA_2_PERIOD, GEMMA_3_PERIOD = 2, 6
"""Every second or sixth layer attends to all tokens."""
GEMMA_2_LAYERS, GEMMA_3_LAYERS = 46, 62
"""Layers of 27B, whose scores alone are scaled by hidden / heads; GGUF files do not store the scale."""
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


def _refine_gemma2(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    spec = refine(spec, caps | dict(config))
    return alternating_windows(spec, {"sliding_window": 4096, **config}, GEMMA_2_PERIOD)


def gguf_scale(spec: ModelSpec, layers: int) -> float | None:
    """Return the scale of scores, which llama.cpp derives from the number of layers of the largest size."""
    return (spec.hidden / spec.heads) ** -0.5 if spec.layers == layers else None


def _refine_gguf_gemma2(spec: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    return replace(
        gguf_pattern(gemma(spec), {"attention.sliding_window": 4096, **metadata}, GEMMA_2_PERIOD),
        attention_scale=gguf_scale(spec, GEMMA_2_LAYERS),
        attention_cap=float(metadata.get("attn_logit_softcapping", 50.0)),
        logit_cap=float(metadata.get("final_logit_softcapping", 30.0)),
    )


GEMMA_2 = ModelFamily(
    architecture="Gemma2ForCausalLM",
    normalize=normalize,
    refine=_refine_gemma2,
    tensors=TENSORS,
    norm_offset=1.0,
    gguf=GGUFFormat(architecture="gemma2", refine=_refine_gguf_gemma2),
    models=(SupportedModels(name="Gemma 2", tool_parsers=("hermes",)),),
)


LOCAL_THETA, GLOBAL_THETA = 10_000.0, 1_000_000.0
"""Rotary bases of layers with and without a window."""

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
"""Values of transformers that the `text_config` of published checkpoints omits."""
OUTER = ("eos_token_id", "bos_token_id", "quantization_config")
"""Keys of a multimodal configuration that apply to its text part."""


def _normalize_gemma3(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text part of a multimodal configuration, with one set of rotary parameters."""
    text = dict(config)
    if nested := config.get("text_config"):
        outer = {key: config[key] for key in OUTER if config.get(key) is not None}
        text = {**DEFAULTS, **nested, **outer}
    return normalize(rope_by_window(text, GLOBAL_THETA, LOCAL_THETA))


def _refine_gemma3(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    period = int(config.get("sliding_window_pattern") or GEMMA_3_PERIOD)
    spec = alternating_windows(refine(spec, config), config, period)
    return replace(spec, qk_norm=True, sliding_rope_theta=float(config["sliding_rope_theta"]))


def _refine_gguf_gemma3(spec: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    cap = metadata.get("final_logit_softcapping")
    return replace(
        gguf_pattern(gemma(spec), metadata, GEMMA_3_PERIOD),
        attention_scale=gguf_scale(spec, GEMMA_3_LAYERS),
        logit_cap=None if cap is None else float(cap),
        rope_theta=float(metadata.get("rope.freq_base", GLOBAL_THETA)),
        sliding_rope_theta=float(metadata.get("rope.freq_base_swa", LOCAL_THETA)),
    )


GEMMA_3 = ModelFamily(
    architecture="Gemma3ForCausalLM",
    normalize=_normalize_gemma3,
    refine=_refine_gemma3,
    multimodal="Gemma3ForConditionalGeneration",
    tensors=TENSORS,
    norm_offset=1.0,
    gguf=GGUFFormat(architecture="gemma3", refine=_refine_gguf_gemma3),
    models=(SupportedModels(name="Gemma 3 (text)", tool_parsers=("hermes",)),),
)

FAMILIES = (GEMMA_2, GEMMA_3)
