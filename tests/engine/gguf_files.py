"""GGUF files made from tiny Hugging Face folders, in llama.cpp's conventions."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from baton_engine.model.checkpoint import Checkpoint, load_spec
from baton_engine.model.families import BY_ARCHITECTURE, BY_GGUF
from baton_engine.model.family import NORM
from baton_engine.model.quantized_folder import ExpertTensors
from baton_engine.model.safetensors import SafetensorsFolder
from baton_engine.spec import ExpertSpec, LatentSpec, ModelSpec
from tests.engine.models import BOS, CHAT_TEMPLATE, EOS, SPECIAL, UNKNOWN

CONTROL, NORMAL = 3, 1

STORED_AS = {
    "MixtralForCausalLM": "LlamaForCausalLM",
    "DeepseekV3ForCausalLM": "DeepseekV2ForCausalLM",
}
"""Architectures for which llama.cpp has no name of its own."""


def write_gguf(
    folder: Path,
    target: Path,
    quantised: bool = False,
    pre: str = "gpt-2",
    adds_eos: bool = False,
    forms: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """The checkpoint in `folder` as one file; `quantised` stores its matrices as Q8_0, or as in `forms`."""
    spec = load_spec(Checkpoint(folder, folder.name))
    stored = STORED_AS.get(spec.architecture, spec.architecture)
    kind = next(kind for kind, family in BY_GGUF.items() if family.architecture == stored)
    writer = gguf.GGUFWriter(target, kind)
    writer.add_context_length(spec.rope.original_context if spec.rope.kind == "yarn" else spec.context)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.intermediate)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_epsilon)
    writer.add_rope_freq_base(spec.rope_theta)
    if spec.rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(spec.rope.factor)
    if spec.rope.kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(spec.rope.factor)
        writer.add_rope_scaling_orig_ctx_len(spec.rope.original_context)
    _add_options(writer, spec, kind)
    _add_vocabulary(writer, folder, pre)
    if adds_eos:
        writer.add_add_eos_token(True)
    _add_tensors(writer, folder, spec, kind, quantised, forms or {})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add_options(writer: Any, spec: ModelSpec, kind: str) -> None:
    """The options that llama.cpp stores for some architectures."""
    if spec.rotary_dim:
        writer.add_rope_dimension_count(spec.rotary_dim)
    if spec.sliding_window:
        writer.add_sliding_window(spec.sliding_window)
    if spec.sliding_rope_theta is not None:
        writer.add_rope_freq_base_swa(spec.sliding_rope_theta)
        if spec.layers < 6:
            writer.add_sliding_window_pattern(list(spec.sliding_layers))
    if spec.attention_cap is not None:
        writer.add_attn_logit_softcapping(spec.attention_cap)
    if spec.logit_cap is not None:
        writer.add_final_logit_softcapping(spec.logit_cap)
    if spec.rope.short_factors:
        writer.add_rope_scaling_orig_ctx_len(spec.rope.original_context)
        writer.add_rope_scaling_attn_factors(spec.rope.attention_factor)
        writer.add_tensor("rope_factors_long.weight", numpy.array(spec.rope.factors, numpy.float32))
        writer.add_tensor("rope_factors_short.weight", numpy.array(spec.rope.short_factors, numpy.float32))
    if spec.latent is not None and spec.experts is not None:
        _add_latent(writer, spec, spec.latent, spec.experts)
    if spec.experts is not None:
        writer.add_expert_count(spec.experts.count)
        writer.add_expert_used_count(spec.experts.chosen)
        writer.add_expert_feed_forward_length(spec.experts.intermediate)
    if kind == "granite":
        writer.add_embedding_scale(spec.embedding_scale)
        writer.add_residual_scale(spec.residual_scale)
        writer.add_attention_scale(spec.attention_scale)
        writer.add_logit_scale(1 / spec.logit_scale)


def _add_vocabulary(writer: Any, folder: Path, pre: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in SPECIAL else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(UNKNOWN)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_tensors(
    writer: Any,
    folder: Path,
    spec: ModelSpec,
    kind: str,
    quantised: bool,
    forms: Mapping[str, gguf.GGMLQuantizationType],
) -> None:
    source, family = ExpertTensors(SafetensorsFolder(folder), spec), BY_ARCHITECTURE[spec.architecture]
    form = BY_GGUF[kind].gguf
    assert form is not None
    reordered = form.interleaved and not family.interleaved

    def stacked(name: str) -> str:
        return re.sub(r"\.experts\.\d+\.", ".experts.{}.", name)

    for name, parts in itertools.groupby(sorted(source.shapes, key=_by_number), stacked):
        read = [source.read(part).to(torch.float32).numpy() for part in parts]
        values: NDArray[Any] = numpy.stack(read) if "{}" in name else read[0]
        part = name.rpartition(".")[0]
        if reordered and part.endswith(("self_attn.q_proj", "self_attn.k_proj")):
            values = _reordered(values, spec.heads if part.endswith("q_proj") else spec.kv_heads)
        if part.endswith(NORM):
            values = values + numpy.float32(family.norm_offset)
        stored = family.tensors.translate(name, form.tensors)
        if stored.endswith(".attn_kv_b.weight") and spec.latent is not None:
            heads = values.reshape(spec.heads, -1, spec.latent.kv_rank)
            keys, expanded = heads[:, : spec.latent.plain], heads[:, spec.latent.plain :]
            writer.add_tensor(stored.replace("kv_b", "k_b"), numpy.ascontiguousarray(keys.swapaxes(1, 2)))
            stored, values = stored.replace("kv_b", "v_b"), expanded
        if quantised and values.ndim > 1:
            kept = forms.get(stored.split(".")[-2], gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(stored, gguf.quants.quantize(values, kept), raw_dtype=kept)
        else:
            writer.add_tensor(stored, numpy.ascontiguousarray(values))
    if spec.rope.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(spec))


def _add_latent(writer: Any, spec: ModelSpec, latent: LatentSpec, experts: ExpertSpec) -> None:
    writer.add_kv_lora_rank(latent.kv_rank)
    if latent.q_rank:
        writer.add_q_lora_rank(latent.q_rank)
    writer.add_key_length_mla(latent.plain + spec.rotated)
    writer.add_value_length_mla(latent.value)
    writer.add_leading_dense_block_count(experts.layers.index(True))
    writer.add_expert_shared_count(experts.shared // experts.intermediate)
    writer.add_expert_weights_scale(experts.scale)
    writer.add_expert_weights_norm(experts.normalized)
    writer.add_expert_group_count(experts.groups)
    writer.add_expert_group_used_count(experts.chosen_groups)
    sigmoid = experts.scoring == "sigmoid"
    writer.add_expert_gating_func(
        gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX
    )
    if spec.rope.kind == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * 0.9)


def _by_number(name: str) -> tuple[str, int]:
    """Names of the same tensor of different experts in sequence, in the experts' order."""
    number = re.search(r"\.experts\.(\d+)\.", name)
    return (name, 0) if number is None else (name.replace(number[0], ".experts."), int(number[1]))


def _reordered(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Halves of each head interleaved, as llama.cpp's rotation of adjacent pairs wants them."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _divisors(spec: ModelSpec) -> NDArray[Any]:
    """Llama 3's scaling as llama.cpp's converter writes it."""
    rope = spec.rope
    low, high = rope.original_context / rope.low_freq_factor, rope.original_context / rope.high_freq_factor
    divisors = []
    for index in range(0, spec.head_dim, 2):
        wave = 2 * numpy.pi * spec.rope_theta ** (index / spec.head_dim)
        if wave < high:
            divisors.append(1.0)
        elif wave > low:
            divisors.append(rope.factor)
        else:
            smooth = (rope.original_context / wave - rope.low_freq_factor) / (
                rope.high_freq_factor - rope.low_freq_factor
            )
            divisors.append(1 / ((1 - smooth) / rope.factor + smooth))
    return numpy.array(divisors, dtype=numpy.float32)
