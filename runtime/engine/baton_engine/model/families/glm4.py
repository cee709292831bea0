"""GLM-4-0414: norms around attention and MLP, a fused gate, adjacent pairs of half of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.family import GGUF_NAMES, GGUFFormat, ModelFamily, SupportedModels, TensorNames
from baton_engine.spec import ModelSpec

DEFAULTS: Mapping[str, Any] = {
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "rms_norm_eps": 1.5625e-07,
}
"""Values of transformers' `Glm4Config`."""


def _refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    return replace(spec, post_norm=True, qkv_bias=bool(config["attention_bias"]))


FAMILIES = (
    ModelFamily(
        architecture="Glm4ForCausalLM",
        normalize=lambda config: {**DEFAULTS, **config},
        refine=_refine,
        partial_rotary=True,
        interleaved=True,
        tensors=TensorNames(
            attention_post_norm="post_self_attn_layernorm",
            gate="",
            up="",
            gate_up="mlp.gate_up_proj",
            mlp_post_norm="post_mlp_layernorm",
        ),
        gguf=GGUFFormat(
            architecture="glm4",
            refine=lambda spec, _: replace(spec, post_norm=True),
            tensors=replace(GGUF_NAMES, gate="", up="", gate_up="ffn_up"),
            interleaved=True,
        ),
        models=(SupportedModels(name="GLM-4-0414, GLM-Z1"),),
    ),
)
