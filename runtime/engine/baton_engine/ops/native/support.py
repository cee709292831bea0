"""Which models the native kernels compute, and whether this machine has the kernels."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
from collections.abc import Mapping

import torch

from baton_engine.ops.native import library
from baton_engine.spec import ExpertSpec, ModelSpec

MOST_HEAD_DIM = 256
MOST_GROUP = 96
MOST_EXPERTS = 1024
KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""The kernels' numbers of dtypes."""

IMPLEMENTED = frozenset(
    (
        "architecture", "vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate",
        "context", "norm_epsilon", "rope_theta", "rope", "qkv_bias", "output_bias", "mlp_bias", "pre_norm",
        "post_norm", "qk_norm", "qk_norm_joint", "activation", "rotary_dim", "sliding_rope_theta",
        "unrotated_layers", "attention_scale", "attention_cap", "embedding_scale", "residual_scale",
        "logit_scale", "logit_cap", "sliding_window", "sliding_layers", "experts", "draft_layers",
        "tied_embeddings", "headless", "eos_ids", "bos_id",
    )
)  # fmt: skip
"""Fields of `ModelSpec` that the kernels implement or that do not affect them. A model with another option
runs with torch operations."""


def supports(spec: ModelSpec, dtype: torch.dtype) -> bool:
    """Return whether the kernels support a model with these sizes and options in `dtype`."""
    others = (option for option in dataclasses.fields(spec) if option.name not in IMPLEMENTED)
    return (
        dtype in KINDS
        and all(getattr(spec, option.name) == option.default for option in others)
        and spec.head_dim % 2 == 0
        and spec.head_dim <= MOST_HEAD_DIM
        and spec.heads % spec.kv_heads == 0
        and spec.group <= MOST_GROUP
        and _supports_experts(spec)
    )


def _supports_experts(spec: ModelSpec) -> bool:
    """Return whether the kernels compute the experts of `spec`. A dense model is supported too."""
    experts = spec.experts
    if experts is None:
        return True
    supported = ExpertSpec(
        count=experts.count,
        chosen=experts.chosen,
        intermediate=experts.intermediate,
        scoring=experts.scoring,
        normalized=experts.normalized,
        scale=experts.scale,
        layers=experts.layers,
    )
    return (
        experts == supported
        and experts.count <= MOST_EXPERTS
        and spec.pre_norm
        and not spec.post_norm
        and spec.residual_scale == 1
        and spec.activation == "silu"
    )


def runs(spec: ModelSpec, dtype: torch.dtype) -> bool:
    """Return whether the kernels are available and support the model."""
    return supports(spec, dtype) and available()


def library_name() -> str:
    """Return the name of the kernels' library, which states sources, compiler and processor. See `runs`."""
    return os.path.basename(open_library(os.environ)._name)


def available(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the kernels are available. Builds them if necessary."""
    try:
        open_library(environment)
    except library.Unavailable:
        return False
    return True


def open_library(environment: Mapping[str, str]) -> ctypes.CDLL:
    """Return the kernels' library. Builds it if necessary. Raises Unavailable."""
    return _opened(tuple(sorted(environment.items())))


@functools.cache
def _opened(environment: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    kernel_library = library.load(dict(environment))
    kernel_library.baton_create.restype = ctypes.c_void_p
    kernel_library.baton_adapter_create.restype = ctypes.c_void_p
    kernel_library.baton_bytes.restype = ctypes.c_int64
    kernel_library.baton_arena.restype = ctypes.c_void_p
    kernel_library.baton_checksum.restype = ctypes.c_uint64
    return kernel_library


def expert_sizes(spec: ModelSpec) -> dict[str, float]:
    """Return the fields of the kernels' `struct spec` about experts."""
    experts = spec.experts
    if experts is None:
        return {"expert_scale": 1.0}
    return {
        "experts": experts.count,
        "chosen": experts.chosen,
        "expert_intermediate": experts.intermediate,
        "expert_layers": sum(experts.in_layer(layer) for layer in range(spec.layers)),
        "sigmoid": experts.scoring == "sigmoid",
        "normalized": experts.normalized,
        "expert_scale": experts.scale,
    }
