"""OLMo 3: OLMo 2 with a sliding window in three of four layers, which have no rope scaling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.families import olmo2
from baton_engine.model.family import ModelFamily, SupportedModels
from baton_engine.model.sliding import alternating_windows, rope_by_window
from baton_engine.spec import ModelSpec

THETA = 500_000.0
"""Default of `rope_theta` in transformers."""


def _normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return rope_by_window({"rms_norm_eps": 1e-5, "sliding_window": 4096, **config}, THETA)


def _refine(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    spec = alternating_windows(olmo2.refine(spec, config), config, olmo2.WINDOW_PERIOD)
    return replace(spec, sliding_rope_theta=float(config["sliding_rope_theta"]))


FAMILY = ModelFamily(
    architecture="Olmo3ForCausalLM",
    normalize=_normalize,
    refine=_refine,
    tensors=olmo2.TENSORS,
    # GGUF files of OLMo 3 use the architecture of OLMo 2.
    models=(SupportedModels(name="OLMo 3", tool_parsers=("hermes",)),),
)
