"""Model families: their registry, names of tensors, and options that native kernels lack."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from baton_engine.model.families import BY_ARCHITECTURE, BY_GGUF, FAMILIES, HEADLESS, MULTIMODAL
from baton_engine.model.family import GGUF_NAMES, TensorNames
from baton_engine.ops.native.support import IMPLEMENTED, supports
from baton_engine.spec import ModelSpec
from tests.engine.random_weights import TINY, tiny_spec


def test_families_are_found_by_each_of_their_names() -> None:
    assert len(BY_ARCHITECTURE) == len(FAMILIES) >= 10
    assert HEADLESS["Qwen3Model"] is BY_ARCHITECTURE["Qwen3ForCausalLM"]
    assert MULTIMODAL["Gemma3ForConditionalGeneration"] is BY_ARCHITECTURE["Gemma3ForCausalLM"]
    assert BY_GGUF["llama"] is BY_ARCHITECTURE["LlamaForCausalLM"]
    assert len(BY_GGUF) == sum(family.gguf is not None for family in FAMILIES)
    assert all(family.models for family in FAMILIES)


@pytest.mark.parametrize(
    ("gguf", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.12.attn_q.bias", "model.layers.12.self_attn.q_proj.bias"),
        ("blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
        ("blk.3.ffn_gate_exps.weight", "model.layers.3.mlp.experts.{}.gate_proj.weight"),
        ("blk.x.attn_q.weight", "blk.x.attn_q.weight"),
        ("blk.0.other.weight", "blk.0.other.weight"),
    ],
)
def test_tensor_names_translate_between_formats(gguf: str, expected: str) -> None:
    assert GGUF_NAMES.translate(gguf, TensorNames()) == expected
    assert TensorNames().translate(expected, GGUF_NAMES) == gguf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScaledSpec(ModelSpec):
    key_scale: float = 1.0


def test_native_kernels_reject_an_option_that_they_lack() -> None:
    assert {option.name for option in dataclasses.fields(ModelSpec)} >= IMPLEMENTED
    assert supports(tiny_spec(), torch.float32)
    assert supports(ScaledSpec(**TINY), torch.float32)
    assert not supports(ScaledSpec(**TINY, key_scale=0.5), torch.float32)
