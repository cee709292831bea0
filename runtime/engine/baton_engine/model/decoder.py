"""
The decoder: computes the logits of a batch, for every model family.

`baton_engine.ops` implements the operations. The layers are plain dataclasses instead of `nn.Module`s,
because on a CPU a module call costs more than a layer of a small model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baton_engine.batch import Batch
from baton_engine.kv.cache import KVCache
from baton_engine.model.native_decoder import native_decoder
from baton_engine.model.rope import Rotary
from baton_engine.model.spec import ModelSpec
from baton_engine.model.weights import LayerWeights, Weights
from baton_engine.ops import Linear, Ops
from baton_engine.ops.cpu import CpuOps
from baton_engine.ops.plain import PlainOps


class Model(Protocol):
    """A loaded model, as the engine runs it."""

    spec: ModelSpec

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """
        Return the logits [S, V] fp32 of `batch.wanted_at`, [0, V] if that is empty.

        Writes keys and values of all tokens of the batch to `cache`.
        """
        ...

    def hidden_states(self, batch: Batch, cache: KVCache) -> Tensor:
        """Return the states [S, N] fp32 after the final norm, [0, N] if `batch.wanted_at` is empty."""
        ...

    def project(self, states: Tensor) -> Tensor:
        """Return the logits [S, V] fp32 of `hidden_states` [S, N], equal to the result of `forward`."""
        ...


def create_model(
    spec: ModelSpec,
    weights: Weights,
    device: torch.device,
    dtype: torch.dtype,
    environment: Mapping[str, str] = os.environ,
) -> Model:
    """Create the fastest available model for `device`. `weights` must be in `dtype`."""
    native_model = native_decoder(spec, weights, dtype, environment) if device.type == "cpu" else None
    return native_model or Decoder(spec, weights, _ops(spec, device, dtype), device)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer with its weights on the device."""

    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int | None


class Decoder:
    """Implementation of `Model` with the operations of `Ops`."""

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops, device: torch.device) -> None:
        self.spec = spec
        self.ops = ops
        self.embedding = weights.embedding.to(device)
        self.final_norm = weights.final_norm.to(device)
        tied = weights.head is weights.embedding
        self.head = ops.prepare(self.embedding if tied else weights.head.to(device))
        self.layers = tuple(
            _laid_out(layer, spec.window(number), ops, device) for number, layer in enumerate(weights.layers)
        )
        self.rotary = Rotary(spec, device)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        states = self._states(batch, cache)
        if not len(states):
            return torch.empty((0, self.spec.vocab), dtype=torch.float32, device=states.device)
        return self.head(states).to(torch.float32)

    @torch.inference_mode()
    def hidden_states(self, batch: Batch, cache: KVCache) -> Tensor:
        return self._states(batch, cache).to(torch.float32)

    @torch.inference_mode()
    def project(self, states: Tensor) -> Tensor:
        if not len(states):
            return torch.empty((0, self.spec.vocab), dtype=torch.float32, device=states.device)
        return self.head(states.to(self.embedding.dtype)).to(torch.float32)

    def _states(self, batch: Batch, cache: KVCache) -> Tensor:
        ops, epsilon = self.ops, self.spec.norm_epsilon
        cos, sin = self.rotary.at(batch.positions)
        wanted = batch.wanted_at
        residual = self.embedding[batch.tokens]  # [T, N]
        x = ops.rms_norm(residual, self.layers[0].attention_norm, epsilon)
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            qkv = layer.qkv(x)
            q = ops.rope_and_store(qkv, cos, sin, layer.q_norm, layer.k_norm, cache, number, batch)
            if number == last and not len(wanted):
                break  # keys and values are stored; no output of this batch is needed
            x = ops.attention(q, cache, number, batch, layer.window)
            if number == last and len(wanted) < batch.size:
                x, residual = x[wanted], residual[wanted]  # only the wanted tokens need the last MLP
            x, residual = ops.add_rms_norm(layer.output(x), residual, layer.mlp_norm, epsilon)
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
            norm = self.final_norm if number == last else self.layers[number + 1].attention_norm
            x, residual = ops.add_rms_norm(x, residual, norm, epsilon)
        else:
            return x
        return residual[:0]


def _laid_out(layer: LayerWeights, window: int | None, ops: Ops, device: torch.device) -> Layer:
    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    return Layer(
        attention_norm=layer.attention_norm.to(device),
        qkv=ops.prepare(layer.qkv.to(device), moved(layer.qkv_bias)),
        q_norm=moved(layer.q_norm),
        k_norm=moved(layer.k_norm),
        output=ops.prepare(layer.output.to(device), moved(layer.output_bias)),
        mlp_norm=layer.mlp_norm.to(device),
        gate_up=ops.prepare(layer.gate_up.to(device), moved(layer.gate_up_bias)),
        down=ops.prepare(layer.down.to(device), moved(layer.down_bias)),
        window=window,
    )


def _ops(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Ops:
    """Return the fastest operations for `device`."""
    return CpuOps(spec, dtype) if device.type == "cpu" else PlainOps(spec)
