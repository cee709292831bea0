"""
The decoder's operations in plain torch, on any device: the reference of faster implementations.

Attention gathers the blocks of a row and calls torch's kernels. Rows of one token with similar lengths are
computed together; longer rows one by one.

`CpuOps` converts bfloat16 weights to oneDNN's layout once. A product with a few rows is up to twice as fast
as `F.linear`, which converts them in each call. The native kernels (`baton_engine.model.native_decoder`) are
faster; `CpuOps` is used if they cannot be built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from baton_engine.batch import Batch
from baton_engine.kv.cache import KVCache
from baton_engine.ops import AdaptedRows, ExpertGroups, ExpertLinear, Linear, LowRankLinear, Table
from baton_engine.quantized import Matrix, floats
from baton_engine.spec import LATENT_EPSILON, ModelSpec
from baton_engine.streams import copied

SINK_DIMENSIONS = 8
"""Dimensions that attention with sinks adds to a head. One is needed; torch's kernels want multiples of 8."""

PADDING_LIMIT = 2
"""Maximum ratio of padded to actual size of rows that are computed together."""


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """A weight in torch's layout."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


PlainAdapter = Sequence[Mapping[str, LowRankLinear]]
"""For each layer the adapted linears by their names."""


@dataclass(frozen=True, slots=True)
class PlainAdaptedRows:
    """The tokens of each row with an adapter, one row after the other."""

    spans: Sequence[tuple[slice, PlainAdapter]]
    gated: Callable[[Tensor], Tensor]
    """`Ops.gated`."""

    def mlp(self, gate_up: Tensor, x: Tensor, layer: int, down: Linear) -> Tensor:
        gated = self.gated(self.add(gate_up, x, layer, "gate_up"))
        return self.add(down(gated), gated, layer, "down")

    def add(self, result: Tensor, x: Tensor, layer: int, linear: str) -> Tensor:
        for tokens, adapter in self.spans:
            if (low_rank := adapter[layer].get(linear)) is not None:
                shrunk = x[tokens] @ low_rank.a.T
                for part in low_rank.outputs:
                    outputs, ranks = part.b.shape
                    of_part = shrunk[:, part.rank : part.rank + ranks]
                    result[tokens, part.start : part.start + outputs] += of_part @ part.b.T
        return result


@dataclass(frozen=True, slots=True)
class PlainExpertLinear:
    """The weights of all experts, of which only those of chosen ones are read."""

    experts: Sequence[Linear]
    outputs: int

    def __call__(self, x: Tensor, groups: ExpertGroups) -> Tensor:
        pairs = len(groups.order)
        result = torch.empty((pairs, self.outputs), dtype=x.dtype, device=x.device)
        bounds = groups.starts.tolist()
        for linear, (start, end) in zip(self.experts, pairwise(bounds), strict=True):
            if start < end:
                of_expert = groups.order[start:end]
                result[of_expert] = linear(x[of_expert // (pairs // len(x))])
        return result


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows with the same number of new tokens. R: rows, L: new tokens per row, B: blocks."""

    tokens: Tensor | slice
    """The rows' tokens in the batch."""
    rows: int
    blocks: Tensor
    """[R * B] block ids."""
    context: int
    """Number of keys to use of the B blocks' slots."""
    mask: Tensor | None
    """[R, 1, L, context] or [1, 1, L, context], True for visible keys. None: all, or those of `causal`."""
    causal: bool
    unused: Tensor | None = None
    """[R, slots] True for unused slots of a row's last block. None: no padding."""
    last: Tensor | None = None
    """[R] index of the row's last block. The blocks after it are block 0, which is never written."""


class PlainOps:
    """Implementation of `Ops` in plain torch, for any device and float dtype."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.capturable = False
        self._plans: dict[int | None, list[RowGroup]] = {}

    def prepare(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        return PlainLinear(floats(weight), bias)

    def prepare_experts(self, weights: Matrix, biases: Tensor | None, count: int) -> ExpertLinear:
        of_each = [None] * count if biases is None else list(biases)
        linears = [self.prepare(weight, bias) for weight, bias in zip(floats(weights), of_each, strict=True)]
        return PlainExpertLinear(linears, weights.shape[1])

    def prepare_table(self, embedding: Matrix, head: Linear | None) -> Table:
        return floats(embedding)

    def begin(self, batch: Batch) -> None:
        self._plans = {}

    def place_adapter(self, layers: PlainAdapter) -> Any:
        return layers

    def adapted(self, batch: Batch, *, wanted: bool) -> AdaptedRows | None:
        spans = batch.adapted(wanted=wanted)
        return PlainAdaptedRows(spans, self.gated) if spans else None

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        exact = x.to(weight.dtype)
        return functional.rms_norm(exact, (x.shape[-1],), weight, epsilon).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        residual.add_(x)
        return self.rms_norm(residual, weight, epsilon), residual

    def gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if self.spec.activation == "gelu_tanh":
            return functional.gelu(gate, approximate="tanh").mul_(up)
        return functional.silu(gate).mul_(up)

    def group_by_expert(self, chosen: Tensor, count: int) -> ExpertGroups:
        ordered, order = chosen.flatten().sort(stable=True)
        starts = torch.searchsorted(ordered, torch.arange(count + 1, device=chosen.device))
        return ExpertGroups(order, starts.cpu())  # the host reads it once for all products

    def sum_experts(self, results: Tensor, shares: Tensor | None) -> Tensor:
        exact = results.to(torch.float32)
        parts = (exact if shares is None else exact * shares[..., None]).unbind(1)
        return sum(parts[1:], parts[0]).to(results.dtype)

    def mean_squares(self, qkv: Tensor) -> Tensor:
        means = [heads.to(torch.float32).square().mean(-1) for heads in self._queries_and_keys(qkv)]
        return torch.stack(means, dim=-1)

    def norm_jointly(self, qkv: Tensor, means: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        scales = (means + self.spec.norm_epsilon).rsqrt().unbind(-1)
        for heads, scale, weight in zip(self._queries_and_keys(qkv), scales, (q_norm, k_norm), strict=True):
            heads.copy_(heads.to(torch.float32) * scale[:, None] * weight)

    def _queries_and_keys(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Return all query heads [T, H * D] and all key heads [T, K * D]."""
        spec = self.spec
        of_q, of_k = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        return qkv[:, :of_q], qkv[:, of_q : of_q + of_k]

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
        spec = self.spec
        heads = qkv.view(-1, spec.heads + 2 * spec.kv_heads, spec.head_dim)
        q, k, v = torch.split(heads, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        if q_norm is not None:
            q = self.rms_norm(q, q_norm, spec.norm_epsilon)
        if k_norm is not None:
            k = self.rms_norm(k, k_norm, spec.norm_epsilon)
        block = batch.slots // cache.block_size
        slot = batch.slots % cache.block_size
        kv = cache.kv[:, layer]  # [blocks, 2, K, slot, D]
        kv[block, 0, :, slot] = self._turned(k, rotation)
        kv[block, 1, :, slot] = v
        q = self._turned(q, rotation)
        return (
            q * self._temperatures(batch.positions).to(q.dtype)
            if rotation is None and spec.temperature
            else q
        )

    def _turned(self, heads: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """Rotate heads [T, heads, D], and normalize them if the model does so after the rotation."""
        turned = rotate(heads, rotation)
        if rotation is None or not self.spec.qk_norm_after:
            return turned
        exact = functional.rms_norm(turned.float(), turned.shape[-1:], None, self.spec.norm_epsilon)
        return exact.to(turned.dtype)

    def _temperatures(self, positions: Tensor) -> Tensor:
        """Return the factors [T, 1, 1] of queries at `positions`. https://arxiv.org/abs/2501.19399"""
        factor, length = self.spec.temperature or (0.0, 1)
        grown = (positions + 1) // length
        return (grown.to(torch.float32).log1p() * factor + 1)[:, None, None]

    def attention(
        self,
        q: Tensor,
        cache: KVCache,
        layer: int,
        batch: Batch,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        latent = self.spec.latent
        size = q.shape[-1] if latent is None else latent.kv_rank
        result = q.new_empty((*q.shape[:2], size))
        kv = cache.kv[:, layer]
        for part in self._parts(batch, window):
            # [R * B, 2, K, slot, D] -> [2, R, K, B * slot, D]
            blocks = kv.index_select(0, part.blocks).view(part.rows, -1, *kv.shape[1:])
            if part.unused is not None and part.last is not None:
                # Values of an earlier request may be NaN, and 0 times NaN is NaN.
                row = torch.arange(part.rows, device=blocks.device)
                unused = part.unused[:, None, None, :, None]
                blocks[row, part.last] = blocks[row, part.last].masked_fill(unused, 0)
            planes = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : part.context]
            keys, values = planes[0], planes[-1]
            queries = q[part.tokens].view(part.rows, -1, *q.shape[1:]).transpose(1, 2)  # [R, H, L, D]
            if sinks is not None:
                mixed = self._mix_with_sinks(queries, keys, values, part, sinks)
            else:
                mixed = self._mix(queries, keys, values, part)
            result[part.tokens] = mixed[..., :size].transpose(1, 2).flatten(0, 1)
        return result.flatten(1)

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
        plain, rank = keys.shape[1:]
        latent = self.rms_norm(latents[:, :rank], norm, LATENT_EPSILON)
        key = rotate(latents[:, None, rank:], rotation)[:, 0]
        block, slot = batch.slots // cache.block_size, batch.slots % cache.block_size
        cache.kv[block, layer, 0, 0, slot] = torch.cat((latent, key), dim=-1)
        within = torch.einsum("thp,hpr->thr", q[..., :plain], keys)
        return torch.cat((within, rotate(q[..., plain:], rotation)), dim=-1)

    def expand_latents(self, mixed: Tensor, values: Tensor) -> Tensor:
        latents = mixed.view(len(mixed), *values.shape[::2])
        return torch.einsum("thr,hvr->thv", latents, values).flatten(1)

    def _mix(self, queries: Tensor, keys: Tensor, values: Tensor, part: RowGroup) -> Tensor:
        """Compute attention [R, H, L, D] of queries over keys and values [R, K, context, D]."""
        spec = self.spec
        if spec.attention_cap is None:
            return functional.scaled_dot_product_attention(
                queries,
                keys,
                values,
                part.mask,
                is_causal=part.causal,
                scale=spec.attention_scale,
                enable_gqa=spec.group > 1,
            )
        # torch's kernels cannot cap scores. Query heads of a key head are stacked: [R, K, G * L, D].
        rows, _, length, dim = queries.shape
        stacked = queries.reshape(rows, spec.kv_heads, spec.group * length, dim)
        scores = (stacked @ keys.transpose(2, 3)).float().mul_(spec.score_scale / spec.attention_cap)
        scores = scores.tanh_().mul_(spec.attention_cap).view(rows, spec.kv_heads, spec.group, length, -1)
        mask = part.mask
        if part.causal:
            mask = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~(mask if mask.dim() == 2 else mask[:, :, None]), -torch.inf)
        weights = scores.softmax(-1).to(values.dtype).flatten(2, 3)
        mixed: Tensor = weights @ values
        return mixed.view(queries.shape)

    def _mix_with_sinks(
        self, queries: Tensor, keys: Tensor, values: Tensor, part: RowGroup, sinks: Tensor
    ) -> Tensor:
        """
        Compute attention with one more key, whose score is the head's sink and whose value is 0.

        torch's kernels have no sinks. One more dimension holds the score in the query, and 1 in this key.
        """
        length, context = queries.shape[2], keys.shape[2]
        queries = functional.pad(queries, (0, SINK_DIMENSIONS))
        queries[..., self.spec.head_dim] = (sinks / self.spec.score_scale)[:, None]
        keys, values = (functional.pad(tensor, (0, SINK_DIMENSIONS, 0, 1)) for tensor in (keys, values))
        keys[:, :, context, self.spec.head_dim] = 1
        mask = part.mask
        if mask is None:
            mask = torch.ones(length, context, dtype=torch.bool, device=keys.device)
            mask = mask.tril()[None, None] if part.causal else mask[None, None]
        mixed = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            functional.pad(mask, (0, 1), value=True),
            scale=self.spec.score_scale,
            enable_gqa=self.spec.group > 1,
        )
        return mixed[..., : self.spec.head_dim]

    def _parts(self, batch: Batch, window: int | None) -> list[RowGroup]:
        """Return the row groups of `batch`, cached for all layers with the same window."""
        if window not in self._plans:
            self._plans[window] = _plan(batch, window, self.spec)
        return self._plans[window]


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
    """Rotate the halves of the first R dimensions of [T, heads, D] by [T, R / 2] in fp32."""
    if rotation is None:
        return x
    cos, sin = (table[:, None] for table in rotation)
    rotated, rest = torch.split(x, [2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    first, second = rotated.to(torch.float32).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _plan(batch: Batch, window: int | None, spec: ModelSpec) -> list[RowGroup]:
    single = [r for r, row in enumerate(batch.rows) if len(row.tokens) == 1]
    most = max((batch.contexts[r] for r in single), default=0)
    together = len(single) > 1 and most * len(single) <= PADDING_LIMIT * sum(
        batch.contexts[r] for r in single
    )
    parts = [_single_tokens(batch, single, window, spec)] if together else []
    separate = [r for r in range(len(batch.rows)) if not together or len(batch.rows[r].tokens) > 1]
    return parts + [_row(batch, r, window, spec) for r in separate]


def _seen_from(positions: Tensor, window: int, spec: ModelSpec) -> Tensor:
    """Return the first position that each of `positions` attends to; below 0 it is 0."""
    match spec.window_kind:
        case "chunks":
            return positions // window * window
        case "rest":
            return positions.clamp(max=1).maximum(positions - window + 1)
        case "slides":
            return positions - window + 1


def _single_tokens(batch: Batch, rows: Sequence[int], window: int | None, spec: ModelSpec) -> RowGroup:
    """Group rows of one token each, padded to the longest context."""
    device = batch.device
    contexts = [batch.contexts[r] for r in rows]
    longest = max(contexts)
    width = -(-longest // batch.block_size)
    ends = copied(np.array(contexts), device)[:, None]
    keys = torch.arange(longest, device=device)
    mask = keys < ends
    if window is not None:
        mask &= keys >= _seen_from(ends - 1, window, spec)
    padded = min(contexts) < longest
    last = (ends[:, 0] - 1) // batch.block_size
    slots = torch.arange(batch.block_size, device=device)
    return RowGroup(
        tokens=copied(np.array([batch.starts[r] for r in rows]), device),
        rows=len(rows),
        blocks=batch.block_table[copied(np.array(rows), device), :width].flatten(),
        context=longest,
        mask=mask[:, None, None] if padded or window is not None else None,
        causal=False,
        unused=last[:, None] * batch.block_size + slots >= ends if padded else None,
        last=last if padded else None,
    )


def _row(batch: Batch, r: int, window: int | None, spec: ModelSpec) -> RowGroup:
    """Return the group of one row, without keys before the windows of all its tokens."""
    row, size = batch.rows[r], batch.block_size
    first = 0
    if window is not None:
        first = max(0, int(_seen_from(torch.tensor(row.start), window, spec))) // size
    context = row.context - first * size
    mask = None
    causal = row.start == 0 and len(row.tokens) > 1 and window is None
    if not causal and (len(row.tokens) > 1 or window is not None):
        queries = torch.arange(row.start, row.context, device=batch.device)[:, None]
        keys = torch.arange(first * size, row.context, device=batch.device)
        mask = keys <= queries
        if window is not None:
            mask &= keys >= _seen_from(queries, window, spec)
        mask = mask[None, None]
    return RowGroup(
        tokens=slice(batch.starts[r], batch.starts[r + 1]),
        rows=1,
        blocks=batch.block_table[r, first : -(-row.context // size)],
        context=context,
        mask=mask,
        causal=causal,
    )


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A bfloat16 weight in oneDNN's layout."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return result


class CpuOps(PlainOps):
    """`PlainOps` with prepacked weights if the processor and the build of torch support them."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__(spec)
        self.packs = (
            dtype == torch.bfloat16
            and computes_bfloat16(torch.cpu.get_capabilities())
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )

    def prepare(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        if not self.packs:
            return PlainLinear(floats(weight), bias)
        return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(floats(weight).contiguous(), None), bias)


def computes_bfloat16(capabilities: Mapping[str, object]) -> bool:
    """Return whether the processor has bfloat16 products (AVX-512 BF16, AMX, or Arm's BF16)."""
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def preferred_dtype(capabilities: Mapping[str, object], has_kernels: bool) -> torch.dtype:
    """
    Return the dtype of `--dtype auto` on a processor with these capabilities.

    bfloat16 halves the memory traffic. Processors with its products double the arithmetic throughput too.
    With AVX2 or AVX-512 only, the native kernels convert it to float32; torch emulates it, so float32 is
    faster there. `has_kernels` states whether the native kernels are available.
    """
    widens = has_kernels and bool(capabilities.get("avx2"))
    return torch.bfloat16 if widens or computes_bfloat16(capabilities) else torch.float32
