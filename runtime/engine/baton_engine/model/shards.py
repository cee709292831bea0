"""
Tensor parallelism: the part of each weight and of the KV cache that one rank holds.

Query heads, key heads and the intermediate size are divided among the ranks. Outputs of attention and MLP are
then partial sums, which the ranks add. If there are more ranks than key heads, several ranks hold the same
key head. Rows of the embedding and of the head are divided too. Norms and routers are in every rank, but of a
norm of all heads only the weights of the rank's heads: the ranks add what it needs of the others (`Decoder`).

Latent attention is divided by query heads: their projections, and the expansions of the latent. The latent is
one key head, so each rank computes and holds it whole.

A draft head is divided as a layer of the model. Its projection of states is in every rank. The states in KV
blocks have as many parts as the key heads of the model have ranges, so that ranks with the same key head have
the same part.

Megatron-LM describes the scheme: https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.model.cuts import Cut
from baton_engine.model.families import BY_ARCHITECTURE
from baton_engine.model.family import TensorNames
from baton_engine.model.tensor_reader import TensorSource
from baton_engine.quantized import Quantized
from baton_engine.spec import HeadSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` ranks, numbered from 0."""

    rank: int
    size: int

    def part(self, count: int) -> range:
        """Return this rank's numbers of `count`, which are adjacent. Parts differ by at most one."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def kv_heads(self, count: int) -> range:
        """Return this rank's key heads of `count`. `size` divides `count`, or is a multiple of it."""
        return self.part(count) if count >= self.size else _single(self.rank * count // self.size)

    def replicas(self, count: int) -> int:
        """Return how many adjacent ranks have the same key heads of `count`."""
        return max(1, self.size // count)

    def spec(self, model: ModelSpec) -> ModelSpec:
        """Return the sizes of this rank's part. The vocabulary stays whole: only its matrices are divided."""
        experts = model.experts
        if experts is not None:
            inner, shared = experts.intermediate // self.size, experts.shared // self.size
            experts = replace(experts, intermediate=inner, shared=shared)
        return replace(
            model,
            heads=model.heads // self.size,
            kv_heads=len(self.kv_heads(model.kv_heads)),
            intermediate=model.intermediate // self.size,
            experts=experts,
            draft_head=None if model.draft_head is None else self._head(model.draft_head, model),
        )

    def _head(self, head: HeadSpec, model: ModelSpec) -> HeadSpec:
        return replace(head, layer=self.spec(head.layer), state_parts=self.parts(model.kv_heads))

    def parts(self, kv_heads: int) -> int:
        """Return the number of different ranges of so many key heads that ranks have."""
        return self.size // self.replicas(kv_heads)


def _single(number: int) -> range:
    return range(number, number + 1)


def check_degree(spec: ModelSpec, size: int, name: str) -> None:
    """Raise SetupError if `size` ranks cannot compute the model `name`."""
    flag = f"--tensor-parallel-size {size}"
    if _divides(spec, size):
        return
    possible = [str(degree) for degree in range(1, spec.heads + 1) if _divides(spec, degree)]
    raise SetupError(
        f"{flag} does not divide {name}: it has {_sizes(spec)}. Possible degrees: {', '.join(possible)}."
    )


STATE_STEP = 4
"""A rank's part of a state has a multiple of so many values: 8 bytes or more, which checksums need."""


def check_head_degree(head: HeadSpec, spec: ModelSpec, size: int) -> None:
    """Raise SetupError if `size` ranks, which can compute a model of `spec`, cannot compute `head`."""
    layer, flag = head.layer, f"--tensor-parallel-size {size}"
    if not _divides(layer, size):
        raise SetupError(
            f"{flag} does not divide the draft head ({head.kind}): it has {_sizes(layer)}. Choose a degree "
            "that divides both, or --speculation ngram or off."
        )
    if layer.hidden % (STATE_STEP * Shard(0, size).parts(spec.kv_heads)):
        raise SetupError(
            f"{flag} does not divide the states of the draft head ({head.kind}): they have {layer.hidden} "
            f"values, and each rank needs a multiple of {STATE_STEP}. Choose another degree, or "
            "--speculation ngram or off."
        )


def _divides(spec: ModelSpec, size: int) -> bool:
    kv_heads, experts = spec.kv_heads, spec.experts
    inner = [spec.heads, spec.intermediate]
    if experts is not None:
        inner += [experts.intermediate, experts.shared]
    return not any(count % size for count in inner) and not (kv_heads % size and size % kv_heads)


def _sizes(spec: ModelSpec) -> str:
    experts = "" if spec.experts is None else f", in experts {spec.experts.intermediate}"
    key_heads = "" if spec.latent is not None else f", {spec.kv_heads} key heads"
    return f"{spec.heads} query heads{key_heads} and an intermediate size of {spec.intermediate}{experts}"


class ShardTensors:
    """The part of a checkpoint's tensors that one rank holds. Only that part is read from a mapped file."""

    def __init__(self, source: TensorSource, spec: ModelSpec, shard: Shard) -> None:
        self._source = source
        self._cuts = dict(_cuts(spec, shard))
        self._added_once = frozenset() if shard.rank == 0 else frozenset(_added_once(spec))
        self.name = source.name
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: self._cuts[name].shape(shape) if name in self._cuts else shape
            for name, shape in source.shapes.items()
        }

    def stored_bytes(self, tensor: str) -> int:
        return self._source.stored_bytes(tensor)

    def format(self, tensor: str) -> str:
        return self._source.format(tensor)

    def read_quantized(self, tensor: str, cut: Cut | None = None) -> Quantized | None:
        ours = self._cuts.get(tensor)
        if ours is not None and cut is not None:
            raise ValueError(f"{tensor} is cut already")
        return self._source.read_quantized(tensor, ours or cut)

    def read(self, tensor: str) -> Tensor:
        if tensor in self._added_once:
            return torch.zeros(self.shapes[tensor])
        values = self._source.read(tensor)
        return self._cuts[tensor].of(values) if tensor in self._cuts else values


def _cuts(spec: ModelSpec, shard: Shard) -> Iterator[tuple[str, Cut]]:
    """Yield name and cut of each tensor that is divided."""
    names = BY_ARCHITECTURE[spec.architecture].tensors
    rows = Cut(0, (shard.part(spec.vocab),))
    yield f"{names.embedding}.weight", rows
    yield f"{names.head}.weight", rows
    for prefix in _prefixes(spec, names):
        for part, ranges in (_attention_rows(spec, names, shard) | _mlp_rows(spec, names, shard)).items():
            yield f"{prefix}{part}.weight", Cut(0, ranges)
            yield f"{prefix}{part}.bias", Cut(0, ranges)
        for part, columns in _columns(spec, names, shard):
            yield f"{prefix}{part}.weight", Cut(1, (columns,))


def _prefixes(spec: ModelSpec, names: TensorNames) -> list[str]:
    """Return the prefix of each layer's tensors, also of an MTP layer, which has the model's sizes."""
    mtp = spec.draft_head is not None and spec.draft_head.kind == "mtp"
    return [names.layer.format(number) for number in range(spec.layers + mtp)]


def _attention_rows(spec: ModelSpec, names: TensorNames, shard: Shard) -> dict[str, tuple[range, ...]]:
    heads, kv_heads, d = shard.part(spec.heads), shard.kv_heads(spec.kv_heads), spec.head_dim
    if (latent := spec.latent) is not None:
        queries = _scaled(heads, latent.plain + spec.rotated)
        expanded = _scaled(heads, latent.plain + latent.value)
        return {names.q_expand if latent.q_rank else names.q: (queries,), names.kv_expand: (expanded,)}
    q, k = _scaled(heads, d), _scaled(kv_heads, d)
    key, value = (_shifted(k, (spec.heads + before) * d) for before in (0, spec.kv_heads))
    rows: dict[str, tuple[range, ...]] = {names.q: (q,), names.k: (k,), names.v: (k,)}
    if names.qkv:
        rows = {names.qkv: (q, key, value)}
    if spec.qk_norm_joint:
        rows |= {names.q_norm: (q,), names.k_norm: (k,)}
    return rows | ({names.sinks: (heads,)} if spec.sinks else {})


def _mlp_rows(spec: ModelSpec, names: TensorNames, shard: Shard) -> dict[str, tuple[range, ...]]:
    inner, experts = shard.part(spec.intermediate), spec.experts
    rows: dict[str, tuple[range, ...]]
    if names.gate_up:
        rows = {names.gate_up: (inner, _shifted(inner, spec.intermediate))}
    else:
        rows = {names.gate: (inner,), names.up: (inner,)}
    if experts is None:
        return rows
    for expert in range(experts.count):
        for name in (names.expert_gate, names.expert_up):
            rows[name.format(expert)] = (shard.part(experts.intermediate),)
    return rows | dict.fromkeys((names.shared_gate, names.shared_up), (shard.part(experts.shared),))


def _columns(spec: ModelSpec, names: TensorNames, shard: Shard) -> Iterator[tuple[str, range]]:
    value = spec.head_dim if spec.latent is None else spec.latent.value
    yield names.output, _scaled(shard.part(spec.heads), value)
    yield names.down, shard.part(spec.intermediate)
    if spec.experts is not None:
        yield names.shared_down, shard.part(spec.experts.shared)
        for expert in range(spec.experts.count):
            yield names.expert_down.format(expert), shard.part(spec.experts.intermediate)


def _added_once(spec: ModelSpec) -> Iterator[str]:
    """Yield the biases of partial sums, which only rank 0 adds."""
    names = BY_ARCHITECTURE[spec.architecture].tensors
    experts = range(spec.experts.count if spec.experts is not None else 0)
    for prefix in _prefixes(spec, names):
        for part in (names.output, names.down, *(names.expert_down.format(expert) for expert in experts)):
            yield f"{prefix}{part}.bias"


def _scaled(numbers: range, size: int) -> range:
    return range(numbers.start * size, numbers.stop * size)


def _shifted(numbers: range, offset: int) -> range:
    return range(numbers.start + offset, numbers.stop + offset)
