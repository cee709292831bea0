"""Sliding windows, as several model families describe them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from baton_engine.spec import ModelSpec


def layer_windows(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """Read `sliding_window`, and the layers that use it, from a `config.json`."""
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", False):
        return spec
    if kinds := config.get("layer_types"):
        slides = _slides(kinds)
    else:
        first = int(config.get("max_window_layers", 28))
        slides = tuple(number >= first for number in range(spec.layers))
    return replace(spec, sliding_window=int(window), sliding_layers=slides) if any(slides) else spec


def alternating_windows(spec: ModelSpec, config: Mapping[str, Any], period: int) -> ModelSpec:
    """Read the window; without `layer_types`, all layers use it except each `period`-th one."""
    window = config.get("sliding_window")
    if window is None:
        return spec
    slides = _slides(config.get("layer_types") or ()) or every(spec.layers, period)
    return replace(spec, sliding_window=int(window), sliding_layers=slides)


def rope_by_window(
    config: Mapping[str, Any], theta: float, sliding_theta: float | None = None
) -> dict[str, Any]:
    """
    Return the configuration with one set of rotary parameters, and those of layers with a window beside it.

    transformers 5 nests the parameters by kind of layer. Layers with a window have only `sliding_rope_theta`.
    `theta` and `sliding_theta` are the family's defaults; without the second one, `rope_theta` is.
    """
    nested = config.get("rope_parameters") or {}
    flat = nested if "rope_type" in nested else {}
    full, sliding = nested.get("full_attention") or flat, nested.get("sliding_attention") or {}
    if (kind := sliding.get("rope_type", "default")) != "default":
        raise ValueError(f"rope scaling {kind!r} of layers with a window is not supported.")
    base = full.get("rope_theta") or config.get("rope_theta") or theta
    local = sliding.get("rope_theta") or config.get("rope_local_base_freq") or sliding_theta or base
    return {**config, "rope_parameters": full, "rope_theta": base, "sliding_rope_theta": local}


def every(layers: int, period: int) -> tuple[bool, ...]:
    """
    Return True for all layers except each `period`-th one.

    >>> every(6, 3)
    (True, True, False, True, True, False)
    """
    return tuple((number + 1) % period != 0 for number in range(layers))


def _slides(kinds: Iterable[str]) -> tuple[bool, ...]:
    if others := set(kinds) - {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer_types has {sorted(others)}. Supported: sliding_attention, full_attention.")
    return tuple(kind == "sliding_attention" for kind in kinds)


def gguf_pattern(spec: ModelSpec, metadata: Mapping[str, Any], period: int) -> ModelSpec:
    """Read the window, if there is one, and its layers: listed, or all but each `period`-th one."""
    window = metadata.get("attention.sliding_window")
    if not window:
        return spec
    pattern = metadata.get("attention.sliding_window_pattern", period)
    slides = tuple(map(bool, pattern)) if isinstance(pattern, list) else every(spec.layers, int(pattern))
    return replace(spec, sliding_window=int(window), sliding_layers=slides)


def gguf_window(spec: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    """Read the window of all layers from the metadata of a GGUF file."""
    window = metadata.get("attention.sliding_window")
    return replace(spec, sliding_window=int(window)) if window else spec
