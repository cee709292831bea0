"""
The decoder: computes the logits of a batch, for every model family.

`baton_engine.ops` implements the operations. The layers are plain dataclasses instead of `nn.Module`s,
because on a CPU a module call costs more than a layer of a small model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from baton_engine.batch import Batch
from baton_engine.kv.cache import KVCache
from baton_engine.lending import Seat
from baton_engine.model.experts import Experts
from baton_engine.model.group import Group
from baton_engine.model.latent import LatentAttention
from baton_engine.model.lora import LoraWeights, low_rank_linears
from baton_engine.model.native_decoder import native_decoder
from baton_engine.model.rope import Rotary
from baton_engine.model.weights import LayerWeights, Weights, rounded
from baton_engine.ops import AdaptedRows, ExpertLinear, Linear, Ops
from baton_engine.ops.choice import create_ops, interpreted
from baton_engine.quantized import Matrix, floats
from baton_engine.spec import ModelSpec


class Model(Protocol):
    """A loaded model, as the engine runs it."""

    spec: ModelSpec

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """
        Return the logits [S, V] fp32 of `batch.wanted_at`, [0, V] if that is empty.

        Writes keys and values of all tokens of the batch to `cache`. Raises PassInterrupted.
        """
        ...

    def interrupt(self) -> None:
        """End the `forward` in progress early, where that is possible. Call it on any thread."""
        ...

    def hidden_states(self, batch: Batch, cache: KVCache) -> Tensor:
        """Return the states [S, N] fp32 after the final norm, [0, N] if `batch.wanted_at` is empty."""
        ...

    def project(self, states: Tensor) -> Tensor:
        """Return the logits [S, V] fp32 of `hidden_states` [S, N], equal to the result of `forward`."""
        ...

    def prepare_adapter(self, weights: LoraWeights) -> Any:
        """
        Return an adapter for `BatchRow.adapter`, in the layout of this model. The caller releases `weights`.

        Its memory is freed with its last reference. Call it on any thread. Raises MemoryError.
        """
        ...


def create_model(
    spec: ModelSpec,
    weights: Weights,
    device: torch.device,
    dtype: torch.dtype,
    environment: Mapping[str, str] = os.environ,
    seat: Seat | None = None,
) -> Model:
    """Create the fastest model for `device`. `weights` must be in `dtype`. The CPU kernels use `seat`."""
    cpu = device.type == "cpu" and not interpreted(environment)
    native_model = native_decoder(spec, weights, dtype, environment, seat=seat) if cpu else None
    return native_model or create_decoder(spec, weights, device, dtype, environment=environment)


def create_decoder(
    spec: ModelSpec,
    weights: Weights,
    device: torch.device,
    dtype: torch.dtype,
    group: Group | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Decoder:
    """Create the model with the fastest `Ops`. With `group`, `spec` and `weights` are this rank's parts."""
    return Decoder(spec, weights, create_ops(spec, device, dtype, environment), device, group, dtype)


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


class Decoder:
    """Implementation of `Model` with the operations of `Ops`."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        ops: Ops,
        device: torch.device,
        group: Group | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype` is that of activations. None: that of the embedding, which is not quantized then."""
        self.spec = spec
        self.ops = ops
        self.group = group
        embedding = weights.embedding.to(device)
        self.final_norm = weights.final_norm.to(device)
        tied = weights.head is weights.embedding
        self.head = ops.prepare(embedding if tied else weights.head.to(device))
        self.embedding = ops.prepare_table(embedding, self.head if tied else None)
        self.device, self.dtype = device, dtype or floats(weights.embedding).dtype
        self.layers = tuple(
            _laid_out(layer, spec, number, ops, device) for number, layer in enumerate(weights.layers)
        )
        self.rotary = Rotary.of_layers(spec, device)
        self._embedding_scale = rounded(spec.embedding_scale, self.dtype)

    @property
    def capturable(self) -> bool:
        """Whether passes of a `StaticBatch` can be captured."""
        return self.ops.capturable

    def interrupt(self) -> None:
        pass  # torch's queue of operations cannot be shortened

    def prepare_adapter(self, weights: LoraWeights) -> Any:
        layers = (low_rank_linears(self.spec, layer, self.dtype, self.device) for layer in weights.layers)
        return self.ops.place_adapter(tuple(layers))

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        states = self._states(batch, cache)
        if not len(states):
            return torch.empty((0, self.spec.vocab), dtype=torch.float32, device=states.device)
        return self._logits(states)

    @torch.inference_mode()
    def hidden_states(self, batch: Batch, cache: KVCache) -> Tensor:
        return self._states(batch, cache).to(torch.float32)

    @torch.inference_mode()
    def project(self, states: Tensor) -> Tensor:
        if not len(states):
            return torch.empty((0, self.spec.vocab), dtype=torch.float32, device=states.device)
        return self._logits(states.to(self.dtype))

    def _logits(self, states: Tensor) -> Tensor:
        """Return the logits [S, V] fp32 of the states [S, N] after the final norm."""
        logits = self.head(states).to(torch.float32)
        if self.spec.logit_scale != 1:
            logits *= self.spec.logit_scale
        if (cap := self.spec.logit_cap) is not None:
            logits = (logits / cap).tanh_().mul_(cap)
        return logits if self.group is None else self.group.joined(logits)

    def _embedded(self, tokens: Tensor) -> Tensor:
        if self.group is None:
            residual = self.embedding[tokens].to(self.dtype)  # [T, N]
        else:
            residual = self.group.embedded(self.embedding, tokens, self.dtype)
        if self.spec.embedding_scale != 1:
            residual *= self._embedding_scale
        return residual

    def _summed(self, x: Tensor) -> Tensor:
        """Add the outputs of attention or MLP of all ranks."""
        return x if self.group is None else self.group.sum(x)

    def _added(
        self, x: Tensor, residual: Tensor, post_norm: Tensor | None, norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Add the output `x` of attention or MLP to the residual. Return the next input, and the sum."""
        if post_norm is not None:
            x = self.ops.rms_norm(x, post_norm, self.spec.norm_epsilon)
        if self.spec.residual_scale != 1:
            x = x * self.spec.residual_scale
        if norm is not None:
            return self.ops.add_rms_norm(x, residual, norm, self.spec.norm_epsilon)
        residual = residual + x
        return residual, residual

    def _states(self, batch: Batch, cache: KVCache) -> Tensor:
        ops = self.ops
        ops.begin(batch)
        rotations = {kind: rotary.at(batch.positions) for kind, rotary in self.rotary.items()}
        wanted = batch.wanted_at
        residual = self._embedded(batch.tokens)
        first_norm = self.layers[0].attention_norm
        x = residual if first_norm is None else ops.rms_norm(residual, first_norm, self.spec.norm_epsilon)
        last = len(self.layers) - 1
        adapted = ops.adapted(batch, wanted=False)
        for number, layer in enumerate(self.layers):
            qkv = _with_adapters(layer.qkv(x), x, adapted, number, "qkv")
            rotation = rotations.get(layer.rotation)
            if layer.latent is not None and rotation is not None:
                q = layer.latent.store(qkv, rotation, cache, number, batch)
            else:
                q = ops.rope_and_store(qkv, rotation, layer.q_norm, layer.k_norm, cache, number, batch)
            if number == last and not len(wanted):
                if self.group is not None:
                    self.group.meet()  # rank 0 may announce the blocks, which are complete only now
                break  # keys and values are stored; no output of this batch is needed
            x = ops.attention(q, cache, number, batch, layer.window, layer.sinks)
            if layer.latent is not None:
                x = layer.latent.expand(x)
            if number == last and len(wanted) < batch.size:
                x, residual = x[wanted], residual[wanted]  # only the wanted tokens need the last MLP
                adapted = ops.adapted(batch, wanted=True)
            output = _with_adapters(layer.output(x), x, adapted, number, "output")
            output = self._summed(output)
            x, residual = self._added(output, residual, layer.attention_post_norm, layer.mlp_norm)
            x = self._summed(self._mlp(layer, x, adapted, number))
            norm = self.final_norm if number == last else self.layers[number + 1].attention_norm
            x, residual = self._added(x, residual, layer.mlp_post_norm, norm)
        else:
            return x
        return residual[:0]

    def _mlp(self, layer: Layer, x: Tensor, adapted: AdaptedRows | None, number: int) -> Tensor:
        """Compute the MLP, the experts, or the sum of both."""
        if layer.gate_up is None or layer.down is None:
            assert layer.experts is not None
            return layer.experts(x)
        gated = self.ops.gated(_with_adapters(layer.gate_up(x), x, adapted, number, "gate_up"))
        dense = _with_adapters(layer.down(gated), gated, adapted, number, "down")
        return dense if layer.experts is None else dense.add_(layer.experts(x))


def _with_adapters(result: Tensor, x: Tensor, adapted: AdaptedRows | None, layer: int, linear: str) -> Tensor:
    return result if adapted is None else adapted.add(result, x, layer, linear)


def _laid_out(layer: LayerWeights, spec: ModelSpec, number: int, ops: Ops, device: torch.device) -> Layer:
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
