"""
Gemma 3: Gemma 2 with norms of queries and keys, and windows with their own rotation in five of six layers.

The text part of checkpoints with images is served too; they accept text only. https://arxiv.org/abs/2503.19786
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.families import gemma2
from baton_engine.model.family import GGUFFormat, ModelFamily, SupportedModels
from baton_engine.model.sliding import alternating_windows, gguf_pattern, rope_by_window
from baton_engine.spec import ModelSpec

WINDOW_PERIOD = 6
"""Every sixth layer attends to all tokens."""
LOCAL_THETA, GLOBAL_THETA = 10_000.0, 1_000_000.0
"""Rotary bases of layers with and without a window."""
LAYERS_27B = 62
"""Layers of the only size whose scores are scaled by hidden / heads; GGUF files do not store the scale."""

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


def _normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text part of a multimodal configuration, with one set of rotary parameters."""
    text = dict(config)
    if nested := config.get("text_config"):
        outer = {key: config[key] for key in OUTER if config.get(key) is not None}
        text = {**DEFAULTS, **nested, **outer}
    return gemma2.normalize(rope_by_window(text, GLOBAL_THETA, LOCAL_THETA))


def _refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    period = int(config.get("sliding_window_pattern") or WINDOW_PERIOD)
    spec = alternating_windows(gemma2.refine(spec, config), config, period)
    return replace(spec, qk_norm=True, sliding_rope_theta=float(config["sliding_rope_theta"]))


def _refine_gguf(spec: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    cap = metadata.get("final_logit_softcapping")
    return replace(
        gguf_pattern(gemma2.gemma(spec), metadata, WINDOW_PERIOD),
        attention_scale=gemma2.gguf_scale(spec, LAYERS_27B),
        logit_cap=None if cap is None else float(cap),
        rope_theta=float(metadata.get("rope.freq_base", GLOBAL_THETA)),
        sliding_rope_theta=float(metadata.get("rope.freq_base_swa", LOCAL_THETA)),
    )


FAMILY = ModelFamily(
    architecture="Gemma3ForCausalLM",
    normalize=_normalize,
    refine=_refine,
    multimodal="Gemma3ForConditionalGeneration",
    tensors=gemma2.TENSORS,
    norm_offset=1.0,
    gguf=GGUFFormat(architecture="gemma3", refine=_refine_gguf),
    models=(SupportedModels(name="Gemma 3 (text)", tool_parsers=("hermes",)),),
)
