"""Phi-3 and Phi-4: fused projections, LongRoPE, a sliding window, and partly rotated heads (Phi-4-mini)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.family import GGUF_NAMES, GGUFFormat, ModelFamily, SupportedModels, TensorNames
from baton_engine.spec import ModelSpec

FUSED: Mapping[str, str] = {"q": "", "k": "", "v": "", "gate": "", "up": ""}
"""The tensors that fused ones replace."""


def _normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name the scaling as transformers does: the first configurations call LongRoPE `su` or `yarn`."""
    scaling = dict(config.get("rope_scaling") or {})
    if scaling.get("type") in ("su", "yarn"):
        scaling["type"] = "longrope"
    return {"rms_norm_eps": 1e-5, **config, **({"rope_scaling": scaling} if scaling else {})}


def _refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    return _windowed(spec, config.get("sliding_window"))


def _windowed(spec: ModelSpec, window: int | None) -> ModelSpec:
    """Set the window unless it is longer than the context, as in Phi-4-mini."""
    return replace(spec, sliding_window=int(window)) if window and int(window) < spec.context else spec


def _refine_gguf(spec: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    return _windowed(spec, metadata.get("attention.sliding_window"))


FAMILIES = (
    ModelFamily(
        architecture="Phi3ForCausalLM",
        normalize=_normalize,
        refine=_refine,
        partial_rotary=True,
        tensors=TensorNames(**FUSED, qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
        gguf=GGUFFormat(
            architecture="phi3",
            refine=_refine_gguf,
            tensors=replace(GGUF_NAMES, **FUSED, qkv="attn_qkv", gate_up="ffn_up"),
        ),
        models=(SupportedModels(name="Phi-3, Phi-3.5, Phi-4, Phi-4-mini"),),
    ),
)
