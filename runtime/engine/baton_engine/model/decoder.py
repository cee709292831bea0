"""
The decoder: computes the logits of a batch, for every model family.

`baton_engine.ops` implements the operations. The layers are plain dataclasses instead of `nn.Module`s,
because on a CPU a module call costs more than a layer of a small model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from baton_engine.batch import Batch
from baton_engine.kv.cache import KVCache
from baton_engine.lending import Seat
from baton_engine.model.draft_head import DraftHead
from baton_engine.model.group import Group
from baton_engine.model.layer import Layer, laid_out, mlp
from baton_engine.model.lora import LoraWeights, low_rank_linears
from baton_engine.model.native_decoder import native_decoder
from baton_engine.model.rope import Rotary
from baton_engine.model.weights import Weights, rounded
from baton_engine.ops import AdaptedRows, Ops
from baton_engine.ops.choice import create_ops, interpreted
from baton_engine.ops.plain import PlainOps
from baton_engine.quantized import floats
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

    def ops_of(spec: ModelSpec) -> Ops:
        return create_ops(spec, device, dtype, environment)

    return Decoder(spec, weights, ops_of(spec), device, group, dtype, ops_of)


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
        ops_of: Callable[[ModelSpec], Ops] = PlainOps,
    ) -> None:
        """
        `dtype` is that of activations. None: that of the embedding, which is not quantized then. `ops_of`
        creates those of a draft head.
        """
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
            laid_out(layer, spec, number, ops, device) for number, layer in enumerate(weights.layers)
        )
        self.rotary = Rotary.of_layers(spec, device)
        self._embedding_scale = rounded(spec.embedding_scale, self.dtype)
        self.drafts: DraftHead | None = None
        if (head := spec.draft_head) is not None and weights.draft_head is not None:
            own_ops, common = ops_of(head.layer), (device, self.dtype, spec.vocab)
            self.drafts = DraftHead(
                head,
                weights.draft_head,
                own_ops,
                *common,
                embed=self._embedded,
                project=self._logits,
                group=group,
            )

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
            self._meet()
            return torch.empty((0, self.spec.vocab), dtype=torch.float32, device=states.device)
        return self._logits(states)

    @torch.inference_mode()
    def hidden_states(self, batch: Batch, cache: KVCache) -> Tensor:
        states = self._states(batch, cache)
        self._meet()
        return states.to(torch.float32)

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

    def _norms_of_heads(self, qkv: Tensor, layer: Layer) -> tuple[Tensor | None, Tensor | None]:
        """Return the weights of norms of each head. One of all heads, those of all ranks, is computed now."""
        q_norm, k_norm = layer.q_norm, layer.k_norm
        if not self.spec.qk_norm_joint or q_norm is None or k_norm is None:
            return q_norm, k_norm
        means = self.ops.mean_squares(qkv)
        if self.group is not None:
            means = self.group.mean(means)  # all ranks have equally many heads
        self.ops.norm_jointly(qkv, means, q_norm, k_norm)
        return None, None

    def _meet(self) -> None:
        """Wait until all ranks have stored: rank 0 may announce the blocks, which are complete only now."""
        if self.group is not None:
            self.group.meet()

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
        """Return the states [S, N] after the final norm."""
        if self.drafts is None:
            return self._of_layers(batch, cache)
        inputs: list[Tensor] = []
        states = self._of_layers(batch, cache, inputs)
        self.drafts.store(self.drafts.state_of(states, inputs), batch, cache)
        if self.drafts.spec.inputs or len(batch.wanted_at) == batch.size:
            return states
        return states[batch.wanted_at]

    def _of_layers(self, batch: Batch, cache: KVCache, inputs: list[Tensor] | None = None) -> Tensor:
        """
        Return the states after the final norm: [S, N], or of all tokens [T, N] if an MTP layer needs them.

        Appends the inputs [T, N] of layers that a draft head needs to `inputs`.
        """
        ops = self.ops
        tapped = self.drafts.spec.inputs if self.drafts is not None else ()
        needs_all = self.drafts is not None and not tapped
        ops.begin(batch)
        rotations = {kind: rotary.at(batch.positions) for kind, rotary in self.rotary.items()}
        wanted = batch.wanted_at
        residual = self._embedded(batch.tokens)
        first_norm = self.layers[0].attention_norm
        x = residual if first_norm is None else ops.rms_norm(residual, first_norm, self.spec.norm_epsilon)
        last = len(self.layers) - 1
        adapted = ops.adapted(batch, wanted=False)
        for number, layer in enumerate(self.layers):
            if inputs is not None and number in tapped:
                inputs.append(residual.clone())  # operations may overwrite it
            qkv = _with_adapters(layer.qkv(x), x, adapted, number, "qkv")
            rotation = rotations.get(layer.rotation)
            if layer.latent is not None and rotation is not None:
                q = layer.latent.store(qkv, rotation, cache, number, batch)
            else:
                norms = self._norms_of_heads(qkv, layer)
                q = ops.rope_and_store(qkv, rotation, *norms, cache, number, batch)
            if number == last and not len(wanted) and not needs_all:
                break  # keys and values are stored; no output of this batch is needed
            x = ops.attention(q, cache, number, batch, layer.window, layer.sinks)
            if layer.latent is not None:
                x = layer.latent.expand(x)
            if number == last and len(wanted) < batch.size and not needs_all:
                x, residual = x[wanted], residual[wanted]  # only the wanted tokens need the last MLP
                adapted = ops.adapted(batch, wanted=True)
            output = _with_adapters(layer.output(x), x, adapted, number, "output")
            output = self._summed(output)
            x, residual = self._added(output, residual, layer.attention_post_norm, layer.mlp_norm)
            x = self._summed(mlp(layer, x, self.ops, adapted, number))
            norm = self.final_norm if number == last else self.layers[number + 1].attention_norm
            x, residual = self._added(x, residual, layer.mlp_post_norm, norm)
        else:
            return x
        return residual[:0]


def _with_adapters(result: Tensor, x: Tensor, adapted: AdaptedRows | None, layer: int, linear: str) -> Tensor:
    return result if adapted is None else adapted.add(result, x, layer, linear)
