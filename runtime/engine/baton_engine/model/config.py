"""
Conversion of a Hugging Face `config.json` to a `ModelSpec`.

Reads the names of both formats: `rope_theta` and `rope_scaling`, and `rope_parameters` of transformers 5. An
unsupported option that would change the model's output causes an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from baton_api.errors import SetupError
from baton_engine.model.families import BY_ARCHITECTURE, HEADLESS
from baton_engine.model.spec import ModelSpec, RopeScaling, checked


def spec_of(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Return the spec of a parsed `config.json`. `source` is its name in a SetupError."""
    architecture = _architecture(config, source)
    family = HEADLESS.get(architecture) or BY_ARCHITECTURE[architecture]
    try:
        spec = _spec(config, family.architecture, headless=architecture in HEADLESS)
        spec = family.refine(spec, config)
    except KeyError as error:
        raise SetupError(f"{source} lacks {error}.") from error
    except (TypeError, ValueError) as error:
        raise SetupError(f"{source} has a value of the wrong type: {error}") from error
    _reject_unsupported(config, source)
    return checked(spec, source)


def _architecture(config: Mapping[str, Any], source: str) -> str:
    architectures = config.get("architectures") or []
    for architecture in architectures:
        if architecture in BY_ARCHITECTURE or architecture in HEADLESS:
            return str(architecture)
    names = ", ".join(str(name) for name in architectures) or f"model_type {config.get('model_type')!r}"
    raise SetupError(f"{source}: {names[:200]} is not supported. Supported: {', '.join(BY_ARCHITECTURE)}.")


def _spec(config: Mapping[str, Any], architecture: str, *, headless: bool) -> ModelSpec:
    """Read the options that all families have."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    context = int(config["max_position_embeddings"])
    theta, rope = _rope(config, context)
    bos = config.get("bos_token_id")
    return ModelSpec(
        architecture=architecture,
        vocab=int(config["vocab_size"]),
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // max(heads, 1)),
        intermediate=int(config["intermediate_size"]),
        context=max(context, rope.stretched_context),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope=rope,
        tied_embeddings=headless or bool(config.get("tie_word_embeddings", False)),
        headless=headless,
        eos_ids=token_ids(config.get("eos_token_id")),
        bos_id=None if bos is None else int(bos),
    )


def token_ids(value: Any) -> tuple[int, ...]:
    """Return the ids of an `eos_token_id`: a number, a list or null."""
    if value is None:
        return ()
    return tuple(int(i) for i in value) if isinstance(value, list) else (int(value),)


def _rope(config: Mapping[str, Any], context: int) -> tuple[float, RopeScaling]:
    """Read the base frequency (rope_theta) and the scaling."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    parameters: Mapping[str, Any] = old or new or {}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=float(parameters["factor"]))
    original = int(parameters.get("original_max_position_embeddings") or context)
    if kind == "llama3":
        return theta, RopeScaling(
            kind="llama3",
            factor=float(parameters["factor"]),
            original_context=original,
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
        )
    if kind == "yarn":
        return theta, _yarn(parameters, original, context)
    raise ValueError(f"rope scaling {kind!r} is not supported. Supported: default, linear, llama3, yarn.")


def _yarn(parameters: Mapping[str, Any], original: int, context: int) -> RopeScaling:
    factor = float(parameters.get("factor") or context / original)
    given = parameters.get("attention_factor")
    one, all_dimensions = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if given is None and one and all_dimensions:
        given = _stretch(factor, float(one)) / _stretch(factor, float(all_dimensions))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        attention_factor=None if given is None else float(given),
        truncate=bool(parameters.get("truncate", True)),
    )


def _stretch(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _reject_unsupported(config: Mapping[str, Any], source: str) -> None:
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise SetupError(f"{source}: hidden_act {activation!r} is not supported. Supported: silu.")
    if (quantization := config.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise SetupError(
            f"{source}: weights quantized by {method!r} are not supported. Use the bfloat16 checkpoint, or a "
            ".gguf file."
        )
    parameters = config.get("rope_parameters") or {}
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise SetupError(f"{source}: partial_rotary_factor {partial} is not supported. Supported: 1.")
