"""Configurations of model folders: the options that are read, and the errors of unsupported ones."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton_api.errors import SetupError
from baton_engine.model.config import spec_of
from baton_engine.spec import ExpertSpec, LatentSpec, RopeScaling

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}

PHI3: dict[str, Any] = LLAMA | {
    "architectures": ["Phi3ForCausalLM"],
    "original_max_position_embeddings": 512,
    "rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
}

READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": (LLAMA, {"kv_heads": 8, "head_dim": 8, "rope_theta": 10_000.0, "rope": RopeScaling()}),
    "the old names": (
        LLAMA | {"rope_theta": 500_000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 500_000.0, "rope": RopeScaling(kind="linear", factor=2.0)},
    ),
    "the new names": (
        LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 2.0}},
        {"rope_theta": 500_000.0, "rope": RopeScaling(kind="linear", factor=2.0)},
    ),
    "no scaling by the new names": (
        LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        {"rope_theta": 7.0, "rope": RopeScaling()},
    ),
    "llama 3.1": (
        LLAMA
        | {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
        {
            "rope": RopeScaling(
                kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=512
            )
        },
    ),
    "yarn with an attention factor": (
        LLAMA | {"rope_scaling": YARN | {"attention_factor": 1.5, "truncate": False}},
        {
            "rope": RopeScaling(
                kind="yarn", factor=4.0, original_context=512, attention_factor=1.5, truncate=False
            )
        },
    ),
    "yarn on top of the trained context, as Qwen ships it": (
        QWEN2 | {"rope_scaling": YARN | {"original_max_position_embeddings": 2048}},
        {"context": 8192, "rope": RopeScaling(kind="yarn", factor=4.0, original_context=2048)},
    ),
    "yarn without the original context": (
        QWEN2 | {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"context": 8192, "rope": RopeScaling(kind="yarn", factor=4.0, original_context=2048)},
    ),
    "yarn whose declared context is the stretched one": (
        LLAMA | {"rope_scaling": YARN},
        {"context": 2048, "rope": RopeScaling(kind="yarn", factor=4.0, original_context=512)},
    ),
    "several ends": (LLAMA | {"eos_token_id": [3, 5], "bos_token_id": 1}, {"eos_ids": (3, 5), "bos_id": 1}),
    "biases": (
        LLAMA | {"attention_bias": True, "mlp_bias": True},
        {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    ),
    "qwen2's biases": (QWEN2, {"qkv_bias": True, "output_bias": False, "mlp_bias": False}),
    "a window that is switched off": (
        QWEN2 | {"use_sliding_window": False, "sliding_window": 64},
        {"sliding_window": None, "sliding_layers": ()},
    ),
    "a window above some layers": (
        QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
        {"sliding_window": 64, "sliding_layers": (False, False, False, True)},
    ),
    "a window by layer types": (
        QWEN2
        | {
            "use_sliding_window": True,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {"sliding_window": 64, "sliding_layers": (True, False, True, False)},
    ),
    "mistral's window": (
        LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 32},
        {"sliding_window": 32, "sliding_layers": ()},
    ),
    "gemma 3 with images, as published: its text part, with omitted sizes": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "vision_config": {"hidden_size": 1152},
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 7,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        },
        {
            "architecture": "Gemma3ForCausalLM",
            "vocab": 262_208,
            "heads": 8,
            "kv_heads": 4,
            "head_dim": 256,
            "context": 131_072,
            "rope_theta": 1e6,
            "rope": RopeScaling(kind="linear", factor=8.0),
            "sliding_rope_theta": 10_000.0,
            "sliding_window": 1024,
            "sliding_layers": (True,) * 5 + (False, True),
            "activation": "gelu_tanh",
            "attention_scale": 256**-0.5,
            "embedding_scale": 2560**0.5,
            "logit_cap": None,
            "tied_embeddings": True,
            "eos_ids": (1, 106),
        },
    ),
    "gemma 2": (
        LLAMA | {"architectures": ["Gemma2ForCausalLM"], "head_dim": 16, "query_pre_attn_scalar": 144},
        {
            "attention_scale": 1 / 12,
            "attention_cap": 50.0,
            "logit_cap": 30.0,
            "sliding_window": 4096,
            "sliding_layers": (True, False, True, False),
            "pre_norm": True,
            "post_norm": True,
        },
    ),
    "phi 3 with a long context, by its first name": (
        PHI3,
        {
            "rope": RopeScaling(
                kind="factors",
                original_context=512,
                attention_factor=math.sqrt(1 + math.log(4) / math.log(512)),
                factors=(4.0,) * 4,
                short_factors=(1.0,) * 4,
            )
        },
    ),
    "phi 3 that is served within its first context": (
        PHI3 | {"max_position_embeddings": 512},
        {"rope": RopeScaling(kind="factors", original_context=512, attention_factor=1.0, factors=(1.0,) * 4)},
    ),
    "phi 4 mini, whose window is longer than its context": (
        LLAMA
        | {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75, "sliding_window": 262_144},
        {"rotary_dim": 6, "sliding_window": None},
    ),
    "glm 4": (
        LLAMA | {"architectures": ["Glm4ForCausalLM"]},
        {"head_dim": 128, "rotary_dim": 64, "qkv_bias": True, "output_bias": False, "post_norm": True},
    ),
    "granite": (
        LLAMA
        | {
            "architectures": ["GraniteForCausalLM"],
            "embedding_multiplier": 12,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "logits_scaling": 8,
        },
        {
            "embedding_scale": 12.0,
            "residual_scale": 0.22,
            "attention_scale": 0.015625,
            "logit_scale": 0.125,
        },
    ),
    "smollm 3": (
        LLAMA | {"architectures": ["SmolLM3ForCausalLM"]},
        {"unrotated_layers": (False, False, False, True), "tied_embeddings": True},
    ),
    "mixtral": (
        MIXTRAL,
        {"experts": ExpertSpec(count=8, chosen=2, intermediate=128, normalized=True)},
    ),
    "qwen3 with experts in every other layer": (
        MIXTRAL
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
        },
        {
            "head_dim": 8,
            "experts": ExpertSpec(count=8, chosen=2, intermediate=24, layers=(False, False, False, True)),
        },
    ),
    "deepseek-v3": (
        DEEPSEEK,
        {
            "kv_heads": 1,
            "head_dim": 40,
            "rotated": 8,
            "kv_planes": 1,
            "kv_values_per_token": 4 * 40,
            "latent": LatentSpec(q_rank=0, kv_rank=32, plain=12, value=10),
            "draft_layers": 1,
        },
    ),
    "llama 4 with images": (
        {"architectures": ["Llama4ForConditionalGeneration"], "text_config": MIXTRAL},
        {
            "architecture": "Llama4ForCausalLM",
            "unrotated_layers": (False, False, False, True),
            "sliding_window": None,
        },
    ),
    "qwen3": (
        LLAMA | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
        {"qk_norm": True, "head_dim": 128, "qkv_bias": False, "tied_embeddings": True},
    ),
}


@pytest.mark.parametrize("name", READ)
def test_config_options_are_read(name: str) -> None:
    config, expected = READ[name]
    spec = spec_of(config, "config.json")
    assert {field: getattr(spec, field) for field in expected} == expected


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": (
        LLAMA | {"architectures": ["MambaForCausalLM"]},
        "MambaForCausalLM is not supported. Supported: .*LlamaForCausalLM, .*Gemma3ForConditionalGeneration",
    ),
    "no architecture": (LLAMA | {"architectures": None, "model_type": "bert"}, "model_type 'bert' is not"),
    "a size less": ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "lacks 'hidden_size'"),
    "a word for a number": (LLAMA | {"vocab_size": "many"}, "wrong type.*'many'"),
    "absurd layers": (LLAMA | {"num_hidden_layers": 10**9}, "layers is 1000000000, expected 1 to 1024"),
    "an absurd vocabulary": (LLAMA | {"vocab_size": 10**12}, "vocab is 1000000000000"),
    "no heads": (LLAMA | {"num_attention_heads": 0}, "heads is 0"),
    "heads that do not divide": (LLAMA | {"num_key_value_heads": 3}, "8 query heads.*3 key heads"),
    "an odd head": (LLAMA | {"head_dim": 9}, "head_dim is 9"),
    "another activation": (LLAMA | {"hidden_act": "gelu"}, "'gelu' is not supported"),
    "another scaling": (LLAMA | {"rope_scaling": {"rope_type": "dynamic"}}, "'dynamic' is not supported"),
    "a scaling without factor": (LLAMA | {"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
    "a part of the head": (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "quantised weights": (LLAMA | {"quantization_config": {"quant_method": "hqq"}}, "quantized by 'hqq'"),
    "quantised weights of unknown size": (
        LLAMA | {"quantization_config": {"quant_method": "awq"}},
        "bits None",
    ),
    "a window of nothing": (
        LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
        "sliding_window is 0",
    ),
    "attention in both directions": (
        LLAMA | {"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
        "use_bidirectional_attention is not supported",
    ),
    "an unknown kind of layer": (
        LLAMA | {"architectures": ["Gemma2ForCausalLM"], "layer_types": ["chunked_attention"] * 4},
        "layer_types has .'chunked_attention'.",
    ),
    "a scaling of layers with a window": (
        LLAMA
        | {
            "architectures": ["Olmo3ForCausalLM"],
            "rope_parameters": {"sliding_attention": {"rope_type": "yarn"}},
        },
        "rope scaling 'yarn' of layers with a window is not supported",
    ),
    "a window of smollm 3": (
        LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "use_sliding_window": True},
        "use_sliding_window is not supported",
    ),
    "too many factors": (
        PHI3 | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 5}},
        "5 rope factors for 8 rotated dimensions",
    ),
    "a division by nothing": (
        LLAMA | {"architectures": ["GraniteForCausalLM"], "logits_scaling": 0},
        "division by zero",
    ),
    "a scale of nothing": (
        LLAMA | {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 0},
        "division by zero",
    ),
    "a factor of nothing": (
        LLAMA | {"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0},
        "the residual scale is 0",
    ),
    "no experts": (MIXTRAL | {"num_local_experts": 0}, "number of experts is 0, expected 1 to 4096"),
    "more experts for a token than there are": (
        MIXTRAL | {"num_experts_per_tok": 9},
        "each token uses 9 experts, expected 1 to 8",
    ),
    "experts without a number": (MIXTRAL | {"num_local_experts": None}, "lacks 'num_experts'"),
    "experts of nothing": (MIXTRAL | {"intermediate_size": 0}, "intermediate is 0"),
    "experts that form no groups": (DEEPSEEK | {"n_group": 3}, "8 experts cannot form 3 groups"),
    "more experts than their groups have": (
        DEEPSEEK | {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
        "3 experts of a token cannot be in 1 of 4 groups",
    ),
    "a latent of nothing": (DEEPSEEK | {"v_head_dim": 0}, "v_head_dim is 0, expected 1 to"),
    "another routing": (
        DEEPSEEK | {"topk_method": "greedy"},
        "'greedy'.*is not supported. Supported: noaux_tc",
    ),
    "biases of a latent": (DEEPSEEK | {"attention_bias": True}, "attention_bias is not supported"),
    "gpt-oss in another format": (
        MIXTRAL | {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "hqq"}},
        "quantized by 'hqq'",
    ),
    "too few layer types": (
        QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 3},
        "lists 3 layers, but the model has 4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_config_unsupported_option_is_rejected(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(SetupError, match=f"^config.json.*{message}"):
        spec_of(config, "config.json")
