"""
GGUF files as models: their `ModelSpec`, and tensors under Hugging Face's names.

llama.cpp reorders the rows of Llama's query and key weights for its own rotation of neighbouring
pairs; here the order is undone, so that the decoder has one rotation, of halves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton_api.errors import SetupError
from baton_engine.model.gguf import GGUFFile
from baton_engine.model.spec import ModelSpec, RopeScaling, checked

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3's scaling, as divisors of the frequencies."""
REORDERED = ("self_attn.q_proj", "self_attn.k_proj")

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def spec_of(file: GGUFFile) -> ModelSpec:
    """The spec of a GGUF file; a SetupError for an architecture that is not served."""
    kind = file.metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise SetupError(
            f"{file.path}: the architecture {str(kind)[:100]!r} is not served. "
            f"Served in GGUF files are {', '.join(ARCHITECTURES)}."
        )
    if (parts := file.metadata.get("split.count", 1)) > 1:
        raise SetupError(f"{file.path} is one of {parts} parts. Join them with llama-gguf-split --merge.")
    try:
        return checked(_spec(file, kind), str(file.path))
    except KeyError as error:
        raise SetupError(f"{file.path} lacks the metadata {error}.") from error
    except (TypeError, ValueError) as error:
        raise SetupError(f"{file.path} has metadata of the wrong type: {error}") from error


def _spec(file: GGUFFile, kind: str) -> ModelSpec:
    meta = file.metadata

    def number(key: str) -> int:
        return int(meta[f"{kind}.{key}"])

    hidden, heads = number("embedding_length"), number("attention.head_count")
    kv_heads = meta.get(f"{kind}.attention.head_count_kv", heads)
    head_dim = meta.get(f"{kind}.attention.key_length", hidden // max(heads, 1))
    if (rotated := meta.get(f"{kind}.rope.dimension_count", head_dim)) != head_dim:
        raise SetupError(
            f"{file.path}: only {rotated} of {head_dim} dimensions are rotated, which is not served."
        )
    window = meta.get(f"{kind}.attention.sliding_window")
    ends = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    context = number("context_length")
    rope = _rope(file, kind, context)
    return ModelSpec(
        architecture=ARCHITECTURES[kind],
        vocab=file.tensors["token_embd.weight"].shape[0],
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
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_window=int(window) if window else None,
        tied_embeddings="output.weight" not in file.tensors,
        eos_ids=tuple(dict.fromkeys(int(end) for end in ends if end is not None)),
        bos_id=meta.get("tokenizer.ggml.bos_token_id"),
    )


def _rope(file: GGUFFile, kind: str, context: int) -> RopeScaling:
    scaling: dict[str, Any] = {
        key.removeprefix(f"{kind}.rope.scaling."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{kind}.rope.scaling.")
    }
    if ROPE_FACTORS in file.tensors:
        return RopeScaling(kind="factors", factors=tuple(file.read(ROPE_FACTORS).flatten().tolist()))
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
            raise ValueError(f"the rope scaling {other!r} is not served; none, linear and yarn are")


class GGUFTensors:
    """`TensorSource` over a GGUF file."""

    def __init__(self, file: GGUFFile, spec: ModelSpec) -> None:
        self.name = file.path.name
        self._file = file
        self._spec = spec
        self._stored = {_translated(name): name for name in file.tensors if name != ROPE_FACTORS}
        self.shapes = {name: file.tensors[stored].shape for name, stored in self._stored.items()}

    def stored_bytes(self, tensor: str) -> int:
        return self._file.tensors[self._stored[tensor]].size

    def read(self, tensor: str) -> Tensor:
        values = self._file.read(self._stored[tensor])
        if self._spec.architecture != ARCHITECTURES["llama"]:
            return values
        layer_part = tensor.split(".", 3)[-1].rpartition(".")[0]
        if layer_part not in REORDERED:
            return values
        heads = self._spec.heads if layer_part == REORDERED[0] else self._spec.kv_heads
        # [heads, D / 2, 2, ...] as llama.cpp has it -> [heads, 2, D / 2, ...]
        pairs = values.view(heads, -1, 2, *values.shape[1:])
        return pairs.transpose(1, 2).reshape(values.shape)


def _translated(name: str) -> str:
    """Hugging Face's name for a tensor; a name without one stays, and is found to be unknown."""
    if name in TOP:
        return TOP[name]
    match name.split("."):
        case ["blk", number, part, kind] if part in IN_LAYER:
            return f"model.layers.{number}.{IN_LAYER[part]}.{kind}"
    return name
