"""
Interface of the operations of a decoder.

The decoder uses `Ops` only. `plain` implements them with torch, as reference. `cpu` uses prepacked weights,
and `accelerator` Triton's kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # `baton up` imports `native.library` without torch
    from torch import Tensor

    from baton_engine.batch import Batch
    from baton_engine.kv.cache import KVCache
    from baton_engine.quantized import Matrix


class Linear(Protocol):
    """One weight in the layout of its `Ops`."""

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [T, in] -> [T, out], in x's dtype."""
        ...


class Table(Protocol):
    """An embedding [V, N] in the layout of its `Ops`."""

    def __getitem__(self, rows: Tensor, /) -> Tensor:
        """Return the rows [T] of the table: [T, N] in the model's dtype, or fp32 if it is quantized."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Pairs of a token and an expert, grouped by expert. P: pairs, E: experts."""

    order: Tensor
    """[P] the pairs of expert 0, of expert 1 and so on, each in ascending order."""
    starts: Tensor
    """[E + 1] where the pairs of an expert begin in `order`; the last one is P. Plain operations read it on
    the host."""


class ExpertLinear(Protocol):
    """The weights of all experts of a layer in the layout of their `Ops`."""

    def __call__(self, x: Tensor, groups: ExpertGroups) -> Tensor:
        """
        Multiply each pair's row of x [R, in] by the weight of its expert -> [P, out], in x's dtype.

        R is the number of pairs, or of tokens. A token's pairs are adjacent, and have the same row.
        """
        ...


@dataclass(frozen=True, slots=True)
class LowRankOutputs:
    """A range of a linear's outputs that depends on some of its ranks."""

    start: int
    """First output."""
    rank: int
    """First rank."""
    b: Tensor
    """[out, r]"""


@dataclass(frozen=True, slots=True)
class LowRankLinear:
    """The part of an adapter that is added to one linear of a layer. R: ranks of all its projections."""

    a: Tensor
    """[R, in]"""
    outputs: tuple[LowRankOutputs, ...]


class AdaptedRows(Protocol):
    """The tokens of a pass that have adapters."""

    def add(self, result: Tensor, x: Tensor, layer: int, linear: str) -> Tensor:
        """Add the adapters' parts to `result` [T, out] of a linear of `x` [T, in]. Returns `result`."""
        ...

    def mlp(self, gate_up: Tensor, x: Tensor, layer: int, down: Linear) -> Tensor:
        """
        Return an MLP with the adapters' parts, [T, N].

        `gate_up` [T, 2F], the result of the gate and up projections of `x`, is overwritten.
        """
        ...


class Ops(Protocol):
    """
    Operations of a decoder layer. T: tokens, H: query heads, K: key heads, D: head size.

    Inputs are not modified unless stated otherwise. Results do not share memory with other tensors.
    """

    capturable: bool
    """Whether the calls for a `StaticBatch` do not depend on its values, so that a graph can repeat them."""

    def prepare(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        """
        Convert a [out, in] weight to the layout of this device. The caller then releases its copy.

        Raises TypeError for a quantized weight, if these operations do not support it.
        """
        ...

    def prepare_experts(self, weights: Matrix, biases: Tensor | None, count: int) -> ExpertLinear:
        """
        Convert the weights [E, out, in] and biases [E, out] of all experts likewise. E is `count`.

        Quantized weights are [E * out, in], in one format.
        """
        ...

    def prepare_table(self, embedding: Matrix, head: Linear | None) -> Table:
        """Convert an embedding [V, N] likewise. `head` is its product, if the model has tied embeddings."""
        ...

    def begin(self, batch: Batch) -> None:
        """Prepare what all layers of the next forward pass share, such as tiles of attention."""
        ...

    def place_adapter(self, layers: Sequence[Mapping[str, LowRankLinear]]) -> Any:
        """
        Return an adapter for `BatchRow.adapter`: for each layer its linears by their names.

        Its memory is freed with its last reference. Call it on any thread. Raises MemoryError.
        """
        ...

    def adapted(self, batch: Batch, *, wanted: bool) -> AdaptedRows | None:
        """Return the tokens of `batch` that have adapters, of all or of `wanted_at`. None: there are none."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Normalize [..., N] over N in fp32, and multiply by `weight`, in x's dtype or fp32."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual). May overwrite both inputs."""
        ...

    def gated(self, gate_up: Tensor) -> Tensor:
        """Compute [T, 2N] -> [T, N]: the model's activation of the first half times the second half."""
        ...

    def group_by_expert(self, chosen: Tensor, count: int) -> ExpertGroups:
        """Group the pairs of tokens and experts `chosen` [T, C], numbers below `count`. P is T * C."""
        ...

    def sum_experts(self, results: Tensor, shares: Tensor | None) -> Tensor:
        """Add results [T, C, N], weighted by shares [T, C] fp32, in the order of C, in fp32 -> [T, N]."""
        ...

    def mean_squares(self, qkv: Tensor) -> Tensor:
        """Return the means [T, 2] fp32 of the squares of all query heads, and of all key heads, of qkv."""
        ...

    def norm_jointly(self, qkv: Tensor, means: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        """
        Normalize the query heads of qkv [T, (H + 2K) * D] together, and the key heads, in place.

        `means` are those of `mean_squares`, or of all ranks. `q_norm` is [H * D], `k_norm` [K * D].
        """
        ...

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
        """
        Split qkv [T, (H + 2K) * D] and write k and v to the cache at `batch.slots`. May overwrite qkv.

        Normalizes each head if `q_norm` and `k_norm` are set. Rotates the first R dimensions of q and k by
        `rotation`: cosines and sines [T, R / 2] fp32, in Hugging Face's order of halves. None rotates
        nothing. Returns q [T, H, D].
        """
        ...

    def attention(
        self,
        q: Tensor,
        cache: KVCache,
        layer: int,
        batch: Batch,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """
        Compute causal attention [T, H, D] -> [T, H * D] of each row over its cached context.

        Scores are scaled and capped as the model's spec says. A cache of latents has them as keys, and their
        first R dimensions as values: then the result is [T, H * R], with R as in `store_latents`.

        The context includes the new tokens. With `window`, a position attends to itself and to the window - 1
        tokens before it, or as `ModelSpec.window_kind` says. `sinks` [H] are scores without a value, which
        every position attends to. `batch` is that of the last `begin`.
        """
        ...

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
        """
        Write `latents` [T, R + P] to the cache at `batch.slots`: R dimensions normalized, P rotated.

        `norm` [R] are the weights of the norm. Returns the queries q [T, H, plain + P] in the space of the
        cached vectors, [T, H, R + P]: the product of their plain part with `keys` [H, plain, R], and their
        rotated part.
        """
        ...

    def expand_latents(self, mixed: Tensor, values: Tensor) -> Tensor:
        """Multiply mixed latents [T, H * R] by `values` [H, V, R] of their heads -> [T, H * V]."""
        ...
