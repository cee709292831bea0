"""
OLMo: norms after attention and MLP instead of before, and norms of all query and all key heads together.

https://arxiv.org/abs/2501.00656. OLMo 3 has a window in three of four layers, which have no rope scaling.
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
    alternating_windows,
    gguf_pattern,
    rope_by_window,
)
from baton_engine.spec import ModelSpec

TENSORS = TensorNames(
    attention_norm="",
    attention_post_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_post_norm="post_feedforward_layernorm",
)
WINDOW_PERIOD = 4
"""Every fourth layer of OLMo 3 attends to all tokens."""


def refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """Read the options of OLMo 2 and 3."""
    biased = bool(config.get("attention_bias", False))
    return replace(_olmo2(spec), qkv_bias=biased, output_bias=biased)


def _olmo2(spec: ModelSpec) -> ModelSpec:
    return replace(spec, pre_norm=False, post_norm=True, qk_norm=True, qk_norm_joint=True)


def _refine_gguf(spec: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    """Read a file of OLMo 2, or of OLMo 3: it has windows, whose layers have no rope scaling."""
    spec = gguf_pattern(_olmo2(spec), metadata, WINDOW_PERIOD)
    return spec if spec.sliding_window is None else replace(spec, sliding_rope_theta=spec.rope_theta)


OLMO_2 = ModelFamily(
    architecture="Olmo2ForCausalLM",
    normalize=lambda config: {"rms_norm_eps": 1e-5, **config},
    refine=refine,
    tensors=TENSORS,
    gguf=GGUFFormat(architecture="olmo2", refine=_refine_gguf),
    models=(SupportedModels(name="OLMo 2", tool_parsers=("hermes",)),),
)


THETA = 500_000.0
"""Default of `rope_theta` in transformers."""


def _normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return rope_by_window({"rms_norm_eps": 1e-5, "sliding_window": 4096, **config}, THETA)


def _refine_olmo3(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    spec = alternating_windows(refine(spec, config), config, WINDOW_PERIOD)
    return replace(spec, sliding_rope_theta=float(config["sliding_rope_theta"]))


OLMO_3 = ModelFamily(
    architecture="Olmo3ForCausalLM",
    normalize=_normalize,
    refine=_refine_olmo3,
    tensors=TENSORS,
    # GGUF files of OLMo 3 use the architecture of OLMo 2.
    models=(SupportedModels(name="OLMo 3", tool_parsers=("hermes",)),),
)

FAMILIES = (OLMO_2, OLMO_3)
