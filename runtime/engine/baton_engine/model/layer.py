"""The layers of a decoder with their weights on its device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton_engine.model.experts import Experts
from baton_engine.model.latent import LatentAttention
from baton_engine.model.weights import LayerWeights
from baton_engine.ops import AdaptedRows, ExpertLinear, Linear, Ops
from baton_engine.quantized import Matrix
from baton_engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer with its weights on the device."""

    attention_norm: Tensor | None
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    attention_post_norm: Tensor | None
    mlp_norm: Tensor | None
    gate_up: Linear | None
    """None if the layer has experts only."""
    down: Linear | None
    experts: Experts | None
    mlp_post_norm: Tensor | None
    window: int | None
    sinks: Tensor | None
    latent: LatentAttention | None
    rotation: str
    """`ModelSpec.rotation`."""


def laid_out(layer: LayerWeights, spec: ModelSpec, number: int, ops: Ops, device: torch.device) -> Layer:
    """Return layer `number` of a model of `spec` in the layout of `ops`."""

    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    def prepared(weight: Matrix | None, bias: Tensor | None) -> Linear | None:
        return None if weight is None else ops.prepare(weight.to(device), moved(bias))

    return Layer(
        attention_norm=moved(layer.attention_norm),
        qkv=ops.prepare(layer.qkv.to(device), moved(layer.qkv_bias)),
        q_norm=moved(layer.q_norm),
        k_norm=moved(layer.k_norm),
        output=ops.prepare(layer.output.to(device), moved(layer.output_bias)),
        attention_post_norm=moved(layer.attention_post_norm),
        mlp_norm=moved(layer.mlp_norm),
        gate_up=prepared(layer.gate_up, layer.gate_up_bias),
        down=prepared(layer.down, layer.down_bias),
        experts=_experts(layer, spec, number, ops, device),
        sinks=moved(layer.sinks),
        latent=_latent(layer, spec, ops, device),
        mlp_post_norm=moved(layer.mlp_post_norm),
        window=spec.window(number),
        rotation=spec.rotation(number),
    )


def mlp(layer: Layer, x: Tensor, ops: Ops, adapted: AdaptedRows | None = None, number: int = 0) -> Tensor:
    """Compute the MLP, the experts, or the sum of both. `number`: that of the layer, for adapters."""
    if layer.gate_up is None or layer.down is None:
        assert layer.experts is not None
        return layer.experts(x)
    gate_up = layer.gate_up(x)
    dense = layer.down(ops.gated(gate_up)) if adapted is None else adapted.mlp(gate_up, x, number, layer.down)
    return dense if layer.experts is None else dense.add_(layer.experts(x))


def _experts(
    layer: LayerWeights, spec: ModelSpec, number: int, ops: Ops, device: torch.device
) -> Experts | None:
    experts = spec.experts_of(number)
    if experts is None or layer.router is None or layer.expert_gate_up is None or layer.expert_down is None:
        return None

    def exact(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device, torch.float32)

    def prepared(weights: Matrix, biases: Tensor | None) -> ExpertLinear:
        biases = None if biases is None else biases.to(device)
        return ops.prepare_experts(weights.to(device), biases, experts.count)

    return Experts(
        spec=experts,
        router=layer.router.to(device, torch.float32),
        router_bias=exact(layer.router_bias),
        correction=exact(layer.router_correction),
        gate_up=prepared(layer.expert_gate_up, layer.expert_gate_up_bias),
        down=prepared(layer.expert_down, layer.expert_down_bias),
        ops=ops,
    )


def _latent(layer: LayerWeights, spec: ModelSpec, ops: Ops, device: torch.device) -> LatentAttention | None:
    latent = spec.latent
    if latent is None or layer.latent_kv is None or layer.k_norm is None:
        return None
    expanded = layer.latent_kv.to(device).view(spec.heads, latent.plain + latent.value, latent.kv_rank)
    return LatentAttention(
        q_norm=None if layer.q_norm is None else layer.q_norm.to(device),
        kv_norm=layer.k_norm.to(device),
        expand_q=None if layer.latent_q is None else ops.prepare(layer.latent_q.to(device)),
        keys=expanded[:, : latent.plain].contiguous(),
        values=expanded[:, latent.plain :].contiguous(),
        spec=spec,
        ops=ops,
    )
