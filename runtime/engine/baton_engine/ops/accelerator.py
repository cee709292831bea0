"""
The decoder's operations on an accelerator: Triton's kernels, and the vendor's library for matrix products.

The kernels (`baton_engine.ops.kernels`) run on CUDA and ROCm. A layer of a decode step has six launches of
them and four matrix products, where the plain operations have dozens. Products with quantized matrices, and
those with one row, are kernels too.

A token's results from attention, norms and sampling do not depend on the batch. The last bits of attention
may depend on whether it is in a chunk or in a row of one token, because tensor cores multiply tiles of
different heights. Those of products depend on the number of rows: of cuBLAS and hipBLAS, and of the kernels
for quantized matrices, experts and adapters, which have other tiles for more rows (ADR 10).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from baton_engine.batch import Batch, StaticBatch
from baton_engine.kv.cache import KVCache
from baton_engine.ops import AdaptedRows, ExpertGroups, ExpertLinear, Linear, LowRankLinear, Table
from baton_engine.ops.kernels import attention, experts, latent, layers, plans
from baton_engine.ops.kernels.adapter_table import AdapterTable, SlottedAdapter
from baton_engine.ops.kernels.low_rank import adapted_rows
from baton_engine.ops.kernels.one_row import RowLinear
from baton_engine.ops.kernels.quantized import QuantizedLinear
from baton_engine.ops.plain import PlainLinear, PlainOps
from baton_engine.quantized import Matrix, Quantized
from baton_engine.spec import ModelSpec

MOST_HEAD_DIM = 256
"""A tile of wider heads would not fit in registers."""


class AcceleratorOps(PlainOps):
    """Implementation of `Ops` with Triton's kernels. Plain operations compute attention that they do not."""

    def __init__(self, spec: ModelSpec, shared_memory: int = 0) -> None:
        """`shared_memory`: bytes that the device has for a program. 0: not known."""
        super().__init__(spec)
        self.unsupported = _unsupported(spec)
        """Why plain operations compute attention; None if the kernels do."""
        self.capturable = self.unsupported is None
        self._plan_of: dict[int | None, plans.AttentionPlan] = {}
        """By window, made by the first layer with this window."""
        self._shared_memory = shared_memory
        self._adapters: AdapterTable | None = None
        """None until an adapter is placed, or a pass with adapters is captured."""

    def prepare(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        if isinstance(weight, Quantized):
            return QuantizedLinear(weight, bias, self._shared_memory)
        if weight.element_size() == 2 and weight.is_contiguous():
            return RowLinear(weight, bias)
        return PlainLinear(weight, bias)

    def prepare_experts(self, weights: Matrix, biases: Tensor | None, count: int) -> ExpertLinear:
        if isinstance(weights, Quantized):
            return experts.QuantizedExperts(weights, biases, count, self._shared_memory)
        return experts.GroupedLinear(weights.contiguous(), biases, self._shared_memory)

    def prepare_table(self, embedding: Matrix, head: Linear | None) -> Table:
        if isinstance(embedding, Tensor):
            return embedding
        return (
            head
            if isinstance(head, QuantizedLinear)
            else QuantizedLinear(embedding, None, self._shared_memory)
        )

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._plan_of = {}
        if (device := batch.positions.device).type == "cuda":
            torch.cuda.set_device(device)  # Triton launches on the current device of the thread

    def place_adapter(self, layers: Sequence[Mapping[str, LowRankLinear]]) -> SlottedAdapter:
        devices = {linear.a.device for linears in layers for linear in linears.values()}
        return self._adapter_table(devices.pop()).place(layers)

    def adapted(self, batch: Batch, *, wanted: bool) -> AdaptedRows | None:
        if not batch.has_adapters:
            return None
        return adapted_rows(self._adapter_table(batch.device), batch, wanted=wanted, gelu=self._gelu)

    def _adapter_table(self, device: torch.device) -> AdapterTable:
        if self._adapters is None:
            self._adapters = AdapterTable(self.spec, device)
        return self._adapters

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        layers.rms_norm(rows, weight, epsilon, result.view(rows.shape))
        return result

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        layers.rms_norm(x, weight, epsilon, x, residual)
        return x, residual

    def gated(self, gate_up: Tensor) -> Tensor:
        return layers.gated(gate_up, self._gelu)

    @property
    def _gelu(self) -> bool:
        return self.spec.activation == "gelu_tanh"

    def group_by_expert(self, chosen: Tensor, count: int) -> ExpertGroups:
        return experts.group(chosen, count)

    def sum_experts(self, results: Tensor, shares: Tensor | None) -> Tensor:
        return experts.sum_weighted(results, shares)

    def mean_squares(self, qkv: Tensor) -> Tensor:
        return layers.mean_squares(qkv, self.spec)

    def norm_jointly(self, qkv: Tensor, means: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        layers.norm_jointly(qkv, means, q_norm, k_norm, self.spec.norm_epsilon)

    def rope_and_store(
        self,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cache: KVCache,
        layer: int,
        batch: Batch,
    ) -> Tensor:
        norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        return layers.rope_and_store(qkv, rotation, norms, cache, layer, batch, self.spec)

    def attention(
        self,
        q: Tensor,
        cache: KVCache,
        layer: int,
        batch: Batch,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if self.unsupported:
            return super().attention(q, cache, layer, batch, window, sinks)
        if window not in self._plan_of:
            if isinstance(batch, StaticBatch):
                plan = plans.plan_on_device(batch, self.spec, window)
            else:
                plan = plans.plan(batch, self.spec, window, tile_rows=self._tile_rows(q.element_size()))
            self._plan_of[window] = plan
        plan = self._plan_of[window]
        if self.spec.latent is not None:
            return latent.attention(q, cache, layer, batch, plan, window, self.spec, self._shared_memory)
        return attention.attention(q, cache, layer, batch, plan, window, sinks, self.spec)

    def _tile_rows(self, itemsize: int) -> int:
        """Return the rows of a tile of a prompt's chunk. `itemsize`: bytes of a number in a product."""
        if self.spec.latent is not None:
            return latent.tile_rows(itemsize)
        return attention.tile_rows(self.spec, itemsize, self._shared_memory)

    def store_latents(
        self,
        q: Tensor,
        latents: Tensor,
        rotation: tuple[Tensor, Tensor],
        norm: Tensor,
        keys: Tensor,
        cache: KVCache,
        layer: int,
        batch: Batch,
    ) -> Tensor:
        if self.unsupported:
            return super().store_latents(q, latents, rotation, norm, keys, cache, layer, batch)
        return latent.store_latents(q, latents, rotation, norm, keys, cache, layer, batch, self.spec)

    def expand_latents(self, mixed: Tensor, values: Tensor) -> Tensor:
        return latent.expand_latents(mixed, values)


def _unsupported(spec: ModelSpec) -> str | None:
    """Return why the kernels do not compute attention of this model, or None."""
    if spec.latent is not None:
        return latent.unsupported(spec)
    if spec.head_dim > MOST_HEAD_DIM:
        return f"heads of {spec.head_dim} dimensions, above {MOST_HEAD_DIM}"
    return None
