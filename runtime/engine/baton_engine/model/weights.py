"""
The weights of a decoder (q, k and v fused, gate and up fused), and how they are made from named tensors.

A source names tensors as Hugging Face does, whatever its file does. Nothing is allocated before every name
and shape has been checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.model.progress import Progress
from baton_engine.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Shapes: N hidden, H and K query and key heads, D head size, F intermediate."""

    attention_norm: Tensor
    """[N]"""
    qkv: Tensor
    """[(H + 2K) * D, N]: q, k, v stacked."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    """[D], Qwen3 only."""
    k_norm: Tensor | None
    output: Tensor
    """[N, H * D]"""
    output_bias: Tensor | None
    mlp_norm: Tensor
    """[N]"""
    gate_up: Tensor
    """[2F, N]: gate and up stacked."""
    gate_up_bias: Tensor | None
    down: Tensor
    """[N, F]"""
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A whole model."""

    embedding: Tensor
    """[V, N]"""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    """[N]"""
    head: Tensor
    """[V, N]; the embedding itself where they are tied."""

    @property
    def bytes(self) -> int:
        """What all of them take, each counted once."""
        parts = [getattr(layer, part.name) for layer in self.layers for part in fields(layer)]
        tensors = [self.embedding, self.final_norm, self.head, *parts]
        sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor is not None}
        return sum(sizes.values())


PREFIX = "model."
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

NAMED_AT_MOST = 5
"""Tensors that an error lists by name; the rest are a number."""


class TensorSource(Protocol):
    """The tensors of one checkpoint."""

    @property
    def name(self) -> str:
        """What errors call it."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def stored_bytes(self, tensor: str) -> int: ...

    def read(self, tensor: str) -> Tensor:
        """The tensor in a float dtype, on the CPU. May be a view of a mapped file."""
        ...


class Prefixed:
    """The tensors of a decoder that was saved without its head, under the names that they have with it."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.name = source.name
        self.shapes = {PREFIX + name: shape for name, shape in source.shapes.items()}

    def stored_bytes(self, tensor: str) -> int:
        return self._source.stored_bytes(tensor.removeprefix(PREFIX))

    def read(self, tensor: str) -> Tensor:
        return self._source.read(tensor.removeprefix(PREFIX))


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint of `spec`."""
    n, f, d = spec.hidden, spec.intermediate, spec.head_dim
    q, k = spec.heads * d, spec.kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab, n), FINAL_NORM: (n,)}
    if not spec.tied_embeddings:
        shapes[HEAD] = (spec.vocab, n)
    matrices = {
        "self_attn.q_proj": (q, n, spec.qkv_bias),
        "self_attn.k_proj": (k, n, spec.qkv_bias),
        "self_attn.v_proj": (k, n, spec.qkv_bias),
        "self_attn.o_proj": (n, q, spec.output_bias),
        "mlp.gate_proj": (f, n, spec.mlp_bias),
        "mlp.up_proj": (f, n, spec.mlp_bias),
        "mlp.down_proj": (n, f, spec.mlp_bias),
    }
    for number in range(spec.layers):
        layer = f"model.layers.{number}."
        shapes[layer + "input_layernorm.weight"] = (n,)
        shapes[layer + "post_attention_layernorm.weight"] = (n,)
        if spec.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (d,)
            shapes[layer + "self_attn.k_norm.weight"] = (d,)
        for name, (rows, columns, biased) in matrices.items():
            shapes[f"{layer}{name}.weight"] = (rows, columns)
            if biased:
                shapes[f"{layer}{name}.bias"] = (rows,)
    return shapes


def check(source: TensorSource, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The expected shapes, if the source has just those; a SetupError that names the others."""
    wanted, held = expected_shapes(spec), source.shapes
    if missing := [name for name in wanted if name not in held]:
        raise SetupError(
            f"{source.name}: {_listed(missing)} missing, of {len(wanted)} tensors that "
            f"{spec.architecture} with {spec.layers} layers has. Is the download complete?"
        )
    if extra := [name for name in held if name not in wanted and not _is_harmless(name, spec)]:
        raise SetupError(
            f"{source.name}: {_listed(extra)} unknown to {spec.architecture} as its configuration "
            "describes it; the model would not compute what it was trained for."
        )
    for name, shape in wanted.items():
        if held[name] != shape:
            raise SetupError(
                f"{source.name}: tensor {name} has shape {list(held[name])}, "
                f"but the configuration says {list(shape)}."
            )
    return wanted


def build(source: TensorSource, spec: ModelSpec, dtype: torch.dtype, progress: Progress) -> Weights:
    """All weights in `dtype`, each read once."""
    source = Prefixed(source) if spec.headless else source
    shapes = check(source, spec)
    progress.start(f"Loading {source.name}", sum(source.stored_bytes(name) for name in shapes))

    def stacked(names: Sequence[str]) -> Tensor:
        """The tensors one below the other, in memory of our own."""
        rows = [shapes[name][0] for name in names]
        whole = torch.empty((sum(rows), *shapes[names[0]][1:]), dtype=dtype)
        start = 0
        for name, count in zip(names, rows, strict=True):
            whole[start : start + count] = source.read(name)
            start += count
            progress.advance(source.stored_bytes(name))
        return whole

    def layer(number: int) -> LayerWeights:
        prefix = f"model.layers.{number}."

        def one(*names: str) -> Tensor:
            return stacked([prefix + name for name in names])

        qkv = [f"self_attn.{x}_proj" for x in "qkv"]
        gate_up = ["mlp.gate_proj", "mlp.up_proj"]
        return LayerWeights(
            attention_norm=one("input_layernorm.weight"),
            qkv=one(*(f"{name}.weight" for name in qkv)),
            qkv_bias=one(*(f"{name}.bias" for name in qkv)) if spec.qkv_bias else None,
            q_norm=one("self_attn.q_norm.weight") if spec.qk_norm else None,
            k_norm=one("self_attn.k_norm.weight") if spec.qk_norm else None,
            output=one("self_attn.o_proj.weight"),
            output_bias=one("self_attn.o_proj.bias") if spec.output_bias else None,
            mlp_norm=one("post_attention_layernorm.weight"),
            gate_up=one(*(f"{name}.weight" for name in gate_up)),
            gate_up_bias=one(*(f"{name}.bias" for name in gate_up)) if spec.mlp_bias else None,
            down=one("mlp.down_proj.weight"),
            down_bias=one("mlp.down_proj.bias") if spec.mlp_bias else None,
        )

    embedding = stacked([EMBEDDING])
    weights = Weights(
        embedding=embedding,
        layers=tuple(layer(number) for number in range(spec.layers)),
        final_norm=stacked([FINAL_NORM]),
        head=embedding if spec.tied_embeddings else stacked([HEAD]),
    )
    progress.done()
    return weights


def _is_harmless(name: str, spec: ModelSpec) -> bool:
    """Older checkpoints store the rotation's frequencies, and some a copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (name == HEAD and spec.tied_embeddings)


def _listed(names: Sequence[str]) -> str:
    named = ", ".join(names[:NAMED_AT_MOST])
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return f"tensor{'s' if len(names) > 1 else ''} {named}{more} {'are' if len(names) > 1 else 'is'}"
