"""
Conversion of a Hugging Face `config.json` to a `ModelSpec`.

Reads the names of both formats: `rope_theta` and `rope_scaling`, and `rope_parameters` of transformers 5. An
unsupported option that would change the model's output causes an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from baton_api.errors import SetupError
from baton_engine.model.families import BY_ARCHITECTURE, HEADLESS, MULTIMODAL
from baton_engine.model.family import ModelFamily
from baton_engine.model.schemes import scheme_of
from baton_engine.spec import ModelSpec, RopeScaling, checked, mscale

ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Supported values of `hidden_act`."""


def spec_of(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Return the spec of a parsed `config.json`. `source` is its name in a SetupError."""
    architecture = _architecture(config, source)
    family = HEADLESS.get(architecture) or MULTIMODAL.get(architecture) or BY_ARCHITECTURE[architecture]
    try:
        config = family.normalize(config)
        _reject_unsupported(config, family, source)
        spec = _spec(config, family, headless=architecture in HEADLESS)
        spec = family.refine(spec, config)
    except KeyError as error:
        raise SetupError(f"{source} lacks {error}.") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise SetupError(f"{source} has a value of the wrong type: {error}") from error
    return checked(spec, source)


def _architecture(config: Mapping[str, Any], source: str) -> str:
    architectures = config.get("architectures") or []
    for architecture in architectures:
        if any(architecture in names for names in (BY_ARCHITECTURE, HEADLESS, MULTIMODAL)):
            return str(architecture)
    names = ", ".join(str(name) for name in architectures) or f"model_type {config.get('model_type')!r}"
    supported = ", ".join((*BY_ARCHITECTURE, *MULTIMODAL))
    raise SetupError(f"{source}: {names[:200]} is not supported. Supported: {supported}.")


def _spec(config: Mapping[str, Any], family: ModelFamily, *, headless: bool) -> ModelSpec:
    """Read the options that all families have."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    context = int(config["max_position_embeddings"])
    head_dim = int(config.get("head_dim") or hidden // max(heads, 1))
    theta, rope = _rope(config, context)
    rotated = int(head_dim * float(_partial_rotary(config) or 1))
    bos = config.get("bos_token_id")
    return ModelSpec(
        architecture=family.architecture,
        vocab=int(config["vocab_size"]),
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate=int(config["intermediate_size"]),
        context=max(context, rope.stretched_context),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope=rope,
        rotary_dim=0 if rotated == head_dim else rotated,
        activation=ACTIVATIONS[config.get("hidden_act") or "silu"],
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
    original = int(
        parameters.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or context
    )
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
    if kind in ("longrope", "su"):
        return theta, _longrope(parameters, original, context)
    raise ValueError(
        f"rope scaling {kind!r} is not supported. Supported: default, linear, llama3, longrope, yarn."
    )


def _yarn(parameters: Mapping[str, Any], original: int, context: int) -> RopeScaling:
    factor = float(parameters.get("factor") or context / original)
    given = parameters.get("attention_factor")
    scale, scale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if given is None and scale and scale_all:
        given = mscale(factor, float(scale)) / mscale(factor, float(scale_all))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        attention_factor=None if given is None else float(given),
        truncate=bool(parameters.get("truncate", True)),
    )


def _longrope(parameters: Mapping[str, Any], original: int, context: int) -> RopeScaling:
    """https://arxiv.org/abs/2402.13753"""
    factor = float(parameters.get("factor") or context / original)
    given = parameters.get("attention_factor")
    if given is None:
        given = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        kind="factors",
        original_context=original,
        attention_factor=float(given),
        factors=tuple(float(divisor) for divisor in parameters["long_factor"]),
        short_factors=tuple(float(divisor) for divisor in parameters["short_factor"]),
    )


def _partial_rotary(config: Mapping[str, Any]) -> Any:
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))


def _reject_unsupported(config: Mapping[str, Any], family: ModelFamily, source: str) -> None:
    if (activation := config.get("hidden_act") or "silu") not in ACTIVATIONS:
        raise SetupError(
            f"{source}: hidden_act {activation!r} is not supported. Supported: {', '.join(ACTIVATIONS)}."
        )
    scheme_of(config, source, family.quantizations)
    if not family.partial_rotary and (partial := _partial_rotary(config)) not in (None, 1, 1.0):
        raise SetupError(
            f"{source}: partial_rotary_factor {partial} is not supported for {family.architecture}. "
            "Supported: 1."
        )
