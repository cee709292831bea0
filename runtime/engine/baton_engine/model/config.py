"""
From a Hugging Face `config.json` to a `ModelSpec`.

Reads the names of both eras: `rope_theta` and `rope_scaling`, and the `rope_parameters` that
transformers 5 writes. What would change the model's output and is not served is refused, not ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from baton_api.errors import SetupError
from baton_engine.model.spec import ModelSpec, RopeScaling, checked

SERVED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
HEADLESS = {name.replace("ForCausalLM", "Model"): name for name in SERVED}
"""What the same decoders are called without their head, as embedding models are saved."""
QWEN3_HEAD_DIM = 128
"""Qwen3's head size where its configuration leaves it out."""


def spec_of(config: Mapping[str, Any], source: str) -> ModelSpec:
    """The spec of a parsed `config.json`; `source` names it in errors."""
    named = _architecture(config, source)
    try:
        spec = _spec(config, HEADLESS.get(named, named), headless=named in HEADLESS)
    except KeyError as error:
        raise SetupError(f"{source} lacks {error}.") from error
    except (TypeError, ValueError) as error:
        raise SetupError(f"{source} has a value of the wrong type: {error}") from error
    _refuse_unserved(config, source)
    return checked(spec, source)


def _architecture(config: Mapping[str, Any], source: str) -> str:
    named = config.get("architectures") or []
    for architecture in named:
        if architecture in SERVED or architecture in HEADLESS:
            return str(architecture)
    what = ", ".join(str(name) for name in named) or f"model_type {config.get('model_type')!r}"
    raise SetupError(f"{source}: {what[:200]} is not served. Served are {', '.join(SERVED)}.")


def _spec(config: Mapping[str, Any], architecture: str, *, headless: bool) -> ModelSpec:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    layers, context = int(config["num_hidden_layers"]), int(config["max_position_embeddings"])
    llama, qwen2, qwen3 = (architecture == SERVED[i] for i in (0, 2, 3))
    head_dim = config.get("head_dim") or (QWEN3_HEAD_DIM if qwen3 else hidden // max(heads, 1))
    attention_bias = bool(config.get("attention_bias", False)) and (llama or qwen3)
    window, sliding = _sliding(config, architecture, layers)
    theta, rope = _rope(config, context)
    eos, bos = config.get("eos_token_id"), config.get("bos_token_id")
    return ModelSpec(
        architecture=architecture,
        vocab=int(config["vocab_size"]),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(head_dim),
        intermediate=int(config["intermediate_size"]),
        context=max(context, rope.stretched_context),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope=rope,
        qkv_bias=qwen2 or attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and llama,
        qk_norm=qwen3,
        sliding_window=window,
        sliding_layers=sliding,
        tied_embeddings=headless or bool(config.get("tie_word_embeddings", False)),
        headless=headless,
        eos_ids=token_ids(eos),
        bos_id=None if bos is None else int(bos),
    )


def token_ids(value: Any) -> tuple[int, ...]:
    """The ids of an `eos_token_id`, which is one number, a list, or nothing."""
    if value is None:
        return ()
    return tuple(int(i) for i in value) if isinstance(value, list) else (int(value),)


def _sliding(
    config: Mapping[str, Any], architecture: str, layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    """The window, and which layers have it."""
    window = config.get("sliding_window")
    if window is None or architecture == "LlamaForCausalLM":
        return None, ()
    if architecture == "MistralForCausalLM":
        return int(window), ()
    if not config.get("use_sliding_window", False):
        return None, ()
    if kinds := config.get("layer_types"):
        slides = tuple(kind == "sliding_attention" for kind in kinds)
    else:
        slides = tuple(number >= int(config.get("max_window_layers", 28)) for number in range(layers))
    return (int(window), slides) if any(slides) else (None, ())


def _rope(config: Mapping[str, Any], context: int) -> tuple[float, RopeScaling]:
    """rope_theta and the scaling."""
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
    raise ValueError(f"the rope scaling {kind!r} is not served; default, linear, llama3 and yarn are")


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


def _refuse_unserved(config: Mapping[str, Any], source: str) -> None:
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise SetupError(f"{source}: hidden_act {activation!r} is not served, only silu.")
    if (quantisation := config.get("quantization_config")) is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise SetupError(
            f"{source}: weights quantised by {method!r} are not served. Take the bfloat16 checkpoint, or a "
            ".gguf file."
        )
    parameters = config.get("rope_parameters") or {}
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise SetupError(f"{source}: partial_rotary_factor {partial} is not served, only 1.")
