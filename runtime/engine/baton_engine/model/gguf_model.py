"""
GGUF files as models: their `ModelSpec`, and their tensors under Hugging Face's names.

llama.cpp rotates adjacent pairs of Llama's dimensions and reorders the rows of query and key weights for it.
This module restores the original order, so that the decoder needs one kind of rotation, of halves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton_api.errors import SetupError
from baton_engine.model.families import BY_ARCHITECTURE, BY_GGUF
from baton_engine.model.family import GGUFFormat
from baton_engine.model.gguf import GGUFFile
from baton_engine.spec import ModelSpec, RopeScaling, checked

if TYPE_CHECKING:
    from torch import Tensor

    from baton_engine.model.cuts import Cut
    from baton_engine.quantized import Quantized

ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3's scaling, as divisors of the frequencies."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""LongRoPE's divisors, for contexts beyond the original one and up to it."""
ROPE_TENSORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)


def spec_of(file: GGUFFile) -> ModelSpec:
    """Return the spec of a GGUF file. Raises SetupError if its architecture is not supported."""
    kind = file.metadata.get("general.architecture")
    family = BY_GGUF.get(kind) if isinstance(kind, str) else None
    if family is None or family.gguf is None:
        raise SetupError(
            f"{file.path}: the architecture {str(kind)[:100]!r} is not supported. "
            f"Supported in GGUF files: {', '.join(BY_GGUF)}."
        )
    if (parts := file.metadata.get("split.count", 1)) > 1:
        raise SetupError(f"{file.path} is one of {parts} parts. Join them with llama-gguf-split --merge.")
    try:
        return checked(_spec(file, family.architecture, family.gguf), str(file.path))
    except KeyError as error:
        raise SetupError(f"{file.path} lacks the metadata {error}.") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise SetupError(f"{file.path} has metadata of the wrong type: {error}") from error


def _spec(file: GGUFFile, architecture: str, form: GGUFFormat) -> ModelSpec:
    meta, kind, names = file.metadata, form.architecture, form.tensors

    def number(key: str) -> int:
        return int(meta[f"{kind}.{key}"])

    def stored(part: str) -> bool:
        return f"{names.layer.format(0)}{part}" in file.tensors

    hidden, heads = number("embedding_length"), number("attention.head_count")
    kv_heads = meta.get(f"{kind}.attention.head_count_kv", heads)
    head_dim = meta.get(f"{kind}.attention.key_length", hidden // max(heads, 1))
    rotated = meta.get(f"{kind}.rope.dimension_count", head_dim)
    ends = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    context = number("context_length")
    rope = _rope(file, kind, context)
    spec = ModelSpec(
        architecture=architecture,
        vocab=file.tensors[f"{names.embedding}.weight"].shape[0],
        hidden=hidden,
        layers=number("block_count"),
        heads=heads,
        kv_heads=int(kv_heads),
        head_dim=int(head_dim),
        intermediate=number("feed_forward_length"),
        context=max(context, rope.stretched_context),
        norm_epsilon=float(meta[f"{kind}.attention.layer_norm_rms_epsilon"]),
        rope_theta=float(meta.get(f"{kind}.rope.freq_base", 10_000.0)),
        rope=rope,
        rotary_dim=0 if rotated == head_dim else int(rotated),
        qkv_bias=stored(f"{names.qkv or names.q}.bias"),
        output_bias=stored(f"{names.output}.bias"),
        mlp_bias=stored(f"{names.gate_up or names.gate}.bias"),
        qk_norm=stored(f"{names.q_norm}.weight"),
        tied_embeddings=f"{names.head}.weight" not in file.tensors,
        eos_ids=tuple(dict.fromkeys(int(end) for end in ends if end is not None)),
        bos_id=meta.get("tokenizer.ggml.bos_token_id"),
    )
    prefix = f"{kind}."
    options = {key.removeprefix(prefix): value for key, value in meta.items() if key.startswith(prefix)}
    return form.refine(spec, options)


def _rope(file: GGUFFile, kind: str, context: int) -> RopeScaling:
    scaling: dict[str, Any] = {
        key.removeprefix(f"{kind}.rope.scaling."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{kind}.rope.scaling.")
    }
    if ROPE_FACTORS in file.tensors:
        return RopeScaling(kind="factors", factors=tuple(file.read(ROPE_FACTORS).flatten().tolist()))
    if LONG_FACTORS in file.tensors:
        return RopeScaling(
            kind="factors",
            factors=tuple(file.read(LONG_FACTORS).flatten().tolist()),
            short_factors=tuple(file.read(SHORT_FACTORS).flatten().tolist()),
            original_context=int(scaling.get("original_context_length", context)),
            attention_factor=float(scaling.get("attn_factor", 1.0)),
        )
    match scaling.get("type", "none"):
        case "none":
            return RopeScaling()
        case "linear":
            return RopeScaling(kind="linear", factor=float(scaling["factor"]))
        case "yarn":
            return RopeScaling(
                kind="yarn",
                factor=float(scaling["factor"]),
                original_context=int(scaling.get("original_context_length", context)),
                beta_fast=float(scaling.get("yarn_beta_fast", 32)),
                beta_slow=float(scaling.get("yarn_beta_slow", 1)),
            )
        case other:
            raise ValueError(f"rope scaling {other!r} is not supported. Supported: none, linear, yarn.")


KEYS, VALUES = ".attn_k_b.weight", ".attn_v_b.weight"
"""Endings of tensors that expand a latent, which llama.cpp stores apart, the keys transposed."""


class GGUFTensors:
    """Implementation of `TensorSource` for a GGUF file."""

    def __init__(self, file: GGUFFile, spec: ModelSpec) -> None:
        family = BY_ARCHITECTURE[spec.architecture]
        if family.gguf is None:
            raise ValueError(f"{spec.architecture} has no GGUF format")
        self.name = file.path.name
        self._file = file
        self._spec = spec
        self._interleaved = family.gguf.interleaved
        self._names = family.tensors
        stored_names = family.gguf.tensors
        self._stored: dict[str, tuple[str, int | None]] = {}
        """The tensor of the file, and the part of it if it has all experts stacked."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._halves: dict[str, tuple[str, str]] = {}
        """The tensors of keys and values that make up the expansion of a latent."""
        for stored in file.tensors:
            if stored.endswith(KEYS) and (values := stored.removesuffix(KEYS) + VALUES) in file.tensors:
                self._add_expansion(
                    stored_names.translate(stored.replace(KEYS, ".attn_kv_b.weight"), self._names),
                    stored,
                    values,
                )
            elif stored not in ROPE_TENSORS and not (stored.endswith(VALUES) and spec.latent is not None):
                self._add(stored_names.translate(stored, self._names), stored)

    def _add_expansion(self, name: str, keys: str, values: str) -> None:
        # [heads, rank, plain] and [heads, value, rank]
        heads, rank, plain = self._file.tensors[keys].shape
        self._halves[name] = keys, values
        self.shapes[name] = (heads * (plain + self._file.tensors[values].shape[1]), rank)

    def _add(self, name: str, stored: str) -> None:
        shape = self._file.tensors[stored].shape
        if "{}" not in name:
            self._stored[name], self.shapes[name] = (stored, None), shape
            return
        for expert in range(shape[0]):
            tensor = name.format(expert)
            self._stored[tensor], self.shapes[tensor] = (stored, expert), shape[1:]

    def stored_bytes(self, tensor: str) -> int:
        if tensor in self._halves:
            return sum(self._file.tensors[half].size for half in self._halves[tensor])
        stored, part = self._stored[tensor]
        stacked = self._file.tensors[stored]
        return stacked.size if part is None else stacked.size // stacked.shape[0]

    def read(self, tensor: str) -> Tensor:
        if tensor in self._halves:
            keys, expanded = (self._file.read(half) for half in self._halves[tensor])
            from torch import cat

            return cat((keys.transpose(1, 2), expanded), dim=1).flatten(0, 1)
        return self._in_order(tensor, self._file.read(*self._stored[tensor]))

    def format(self, tensor: str) -> str:
        return self._file.format(
            self._halves[tensor][0] if tensor in self._halves else self._stored[tensor][0]
        )

    def read_quantized(self, tensor: str, cut: Cut | None = None) -> Quantized | None:
        from torch import arange

        from baton_engine.model.cuts import outputs_in_order
        from baton_engine.quantized import Format, Quantized, QuantizedPart

        if tensor in self._halves:
            return None
        stored, part = self._stored[tensor]
        kind = self._file.tensors[stored].type
        if kind not in set(Format) or len(self.shapes[tensor]) != 2:
            return None
        rows, (outputs, inputs) = self._file.rows(stored), self.shapes[tensor]
        if part is not None:
            rows = rows[part * outputs : (part + 1) * outputs]
        blocks = QuantizedPart(Format(kind), rows)
        matrix: Quantized | None = Quantized((blocks,), inputs)
        if self._is_reordered(tensor):
            order = self._in_order(tensor, arange(outputs))
            order = order if cut is None else cut.of(order)
            matrix = outputs_in_order(order, lambda read: read.of_blocks(blocks, inputs))
        elif cut is not None:
            matrix = cut.of_blocks(blocks, inputs)
        if matrix is not None:
            self._file.check_scales(stored, matrix.parts[0].rows)
        return matrix

    def _is_reordered(self, tensor: str) -> bool:
        """Return whether the decoder has the rows of `tensor` in another order."""
        from baton_engine.model.rope import reordered

        return self._interleaved and tensor.rpartition(".")[0].endswith(reordered(self._spec, self._names))

    def _in_order(self, tensor: str, values: Tensor) -> Tensor:
        """Return rows in the decoder's order."""
        if not self._is_reordered(tensor):
            return values
        from baton_engine.model.rope import in_order

        return in_order(values, tensor.rpartition(".")[0], self._spec, self._names)
