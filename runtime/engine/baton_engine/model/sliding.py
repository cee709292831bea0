"""Sliding windows, as several model families describe them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.model.spec import ModelSpec


def layer_windows(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """Read `sliding_window`, and the layers that use it, from a `config.json`."""
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", False):
        return spec
    if kinds := config.get("layer_types"):
        slides = tuple(kind == "sliding_attention" for kind in kinds)
    else:
        first = int(config.get("max_window_layers", 28))
        slides = tuple(number >= first for number in range(spec.layers))
    return replace(spec, sliding_window=int(window), sliding_layers=slides) if any(slides) else spec


def gguf_window(spec: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    """Read the window of all layers from the metadata of a GGUF file."""
    window = metadata.get("attention.sliding_window")
    return replace(spec, sliding_window=int(window)) if window else spec
