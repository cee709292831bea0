"""Experts in the native kernels: which ones they compute, and how their weights are packed."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from baton_engine.model.experts import ExpertSpec
from baton_engine.model.spec import ModelSpec

MOST_EXPERTS = 1024


def sizes(spec: ModelSpec) -> dict[str, float]:
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


def supports(spec: ModelSpec) -> bool:
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


def load(
    kernels: ctypes.CDLL,
    model: ctypes.c_void_p,
    layer: int,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    dtype: torch.dtype,
) -> None:
    """Pack the router [E, N] and the experts [E, 2G, N] and [E, N, G] of a layer. Raises MemoryError."""
    number, exact = ctypes.c_int64(layer), router.to(torch.float32).contiguous()
    fits = kernels.baton_load_router(model, number, ctypes.c_void_p(exact.data_ptr()))
    for expert, weights in enumerate(zip(gate_up, down, strict=True)):
        packed = [weight.to(dtype).contiguous() for weight in weights]
        pointers = (ctypes.c_void_p(weight.data_ptr()) for weight in packed)
        fits = fits and kernels.baton_load_expert(model, number, ctypes.c_int64(expert), *pointers)
    if not fits:
        raise MemoryError(f"layer {layer}: no memory for {len(router)} packed experts")
