"""
GLM-4: half of each head is rotated.

GLM-4-0414 has norms around attention and MLP, a fused gate, and rotates adjacent pairs. GLM-4.5 to 4.7 have
experts as DeepSeek-V3 has them, and rotate halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.families.deepseek import draft_layers, routed_by_sigmoids
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


GLM_4 = ModelFamily(
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
)


def _refine_moe(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    return replace(
        spec,
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm=bool(config.get("use_qk_norm", False)),
        experts=routed_by_sigmoids(spec, config),
        draft_layers=draft_layers(config),
    )


GLM_4_MOE = ModelFamily(
    architecture="Glm4MoeForCausalLM",
    normalize=lambda config: {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, **config},
    refine=_refine_moe,
    partial_rotary=True,
    models=(
        SupportedModels(
            name="GLM-4.5, GLM-4.6, GLM-4.7", tool_parsers=("glm45",), reasoning_parsers=("glm45",)
        ),
    ),
    tool_parser_aliases={"glm": "glm45", "glm47": "glm45"},
)

FAMILIES = (GLM_4, GLM_4_MOE)
