"""Variants with experts, of which transformers makes tiny models. Sizes are uneven, so that mistakes show."""

from __future__ import annotations

from typing import Any


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


QWEN3_EXPERTS: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}

GPT_OSS: dict[str, Any] = {
    "head_dim": 24,
    "intermediate_size": 40,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 20,
    "swiglu_limit": 1.5,
    **_rope(
        "yarn",
        factor=4.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        original_max_position_embeddings=128,
    ),
}

LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 36,
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}

LATENT_BLOCKS: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
}
"""Small sizes of `LATENT` with inputs of whole blocks of 32. Two ranks divide them between blocks of 32, and
inside blocks of 48."""

GLM4_MOE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "head_dim": 24,
    "pad_token_id": None,
    "num_mtp_layers": 0,
    "moe_intermediate_size": 36,
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}

LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "intermediate_size": 40,
    "intermediate_size_mlp": 72,
    "num_local_experts": 5,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 24,
    "no_rope_layer_interval": 3,
    "floor_scale": 16,
    "attn_scale": 0.3,
}

EXPERT_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 with experts": ("Qwen3Moe", QWEN3_EXPERTS),
    "qwen3 with experts in some layers": (
        "Qwen3Moe",
        QWEN3_EXPERTS | {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "gpt-oss": ("GptOss", GPT_OSS),
    "deepseek-v2": ("DeepseekV2", LATENT | {"topk_method": "greedy"}),
    "deepseek-v2 with groups": (
        "DeepseekV2",
        LATENT
        | {
            "topk_method": "group_limited_greedy",
            "q_lora_rank": None,
            "n_group": 3,
            "topk_group": 2,
            **_rope(
                "yarn",
                factor=4.0,
                mscale=0.7,
                mscale_all_dim=0.9,
                beta_fast=32,
                beta_slow=1,
                original_max_position_embeddings=128,
            ),
        },
    ),
    "deepseek-v3": ("DeepseekV3", LATENT | {"n_group": 3, "topk_group": 2, "num_mtp_layers": 0}),
    "glm4 with experts": (
        "Glm4Moe",
        GLM4_MOE | {"n_group": 3, "topk_group": 2, "use_qk_norm": True, "attention_bias": True},
    ),
    "glm4 with experts and no norms of heads": ("Glm4Moe", GLM4_MOE),
    "minimax m2": (
        "MiniMaxM2",
        {
            "head_dim": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 40,
            **_rope("default", partial_rotary_factor=0.5),
        },
    ),
    "llama 4": ("Llama4", LLAMA4),
    "llama 4 with dense layers": (
        "Llama4",
        LLAMA4 | {"interleave_moe_layer_step": 2, "num_experts_per_tok": 2, "use_qk_norm": False},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 56}),
}
