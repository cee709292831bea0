"""
Tiny models with random weights, one for each architecture and flag that is served.

Made by transformers itself, so that a folder is just what a user would have; seeded, so that every run
sees the same. All share one byte-level tokenizer with a chat template.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.engine.expert_models import EXPERT_ARCHITECTURES

VOCAB = 320
BOS, EOS, UNKNOWN = 0, 1, 2
SPECIAL = ("<|bos|>", "<|end|>", "<|unknown|>")
SEED = 1234

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|bos|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|bos|>assistant\n' }}{% endif %}"
)

CORPUS = (
    "The capital of France is Paris, and the capital of Japan is Tokyo.",
    "A relay has four runners: each one hands the baton to the next.",
    "def hand_over(baton, runner):\n    return runner.take(baton)\n",
    "List 3 countries and their capitals. 1. Spain, 2. Italy, 3. Greece.",
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
    # Large enough that attention matters: with 0.02 every position would give the same token.
    "initializer_range": 0.3,
}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


PADDED: dict[str, Any] = {"pad_token_id": UNKNOWN}
"""For families whose default padding is beyond `VOCAB`."""
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 48,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0, 1.0, 1.1, 1.2, 1.5, 2.0, 2.5, 3.0],
        "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 12.0, 16.0, 20.0],
    },
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama without groups": ("Llama", {"num_key_value_heads": 4}),
    "llama with one key head": ("Llama", {"num_key_value_heads": 1}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with its own head size": ("Llama", {"head_dim": 24}),
    "llama with tied embeddings": ("Llama", {"tie_word_embeddings": True}),
    "llama with linear rope": ("Llama", _rope("linear", factor=4.0)),
    "llama with llama3 rope": (
        "Llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama with yarn rope": ("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral with a sliding window": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen2 with sliding layers": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3 with tied embeddings": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {
            "num_hidden_layers": 3,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 24,
            # Low enough that both caps change the answers.
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 7.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 7,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "gemma3 with images": (
        "Gemma3ForConditionalGeneration",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("Phi3", PADDED | {"sliding_window": 24}),
    "phi3 with a long context": ("Phi3", PADDED | LONGROPE),
    "phi3 within its first context": ("Phi3", PADDED | LONGROPE | {"original_max_position_embeddings": 512}),
    "phi4 mini": (
        "Phi3",
        PADDED
        | {
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.17,
            "logits_scaling": 2.5,
        },
    ),
    "granite with biases": (
        "Granite",
        {"residual_multiplier": 0.4, "attention_multiplier": 0.2, "attention_bias": True, "mlp_bias": True},
    ),
    "olmo2": ("Olmo2", {"num_key_value_heads": 1}),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10_000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "glm4": ("Glm4", PADDED | {"head_dim": 24}),
    "smollm3": ("SmolLM3", PADDED | {"num_hidden_layers": 5}),
    **EXPERT_ARCHITECTURES,
}
"""Named variants: the family, and what its configuration sets beyond `SIZES`."""

DOCUMENTED: dict[str, tuple[str, dict[str, Any]]] = {
    "seed-oss": ("SeedOss", {"head_dim": 24, "attention_bias": True, "attention_out_bias": True}),
}
"""The variant of the family that the documentation adds. The engine does not have the family."""


def make_model(folder: Path, variant: str = "llama", **overrides: Any) -> Path:
    """A checkpoint of `variant` in `folder`, with a tokenizer; `overrides` go to the configuration."""
    import transformers

    family, flags = (ARCHITECTURES | DOCUMENTED)[variant]
    torch.manual_seed(SEED)
    if family == "Gemma3ForConditionalGeneration":
        model = _with_images(SIZES | flags | overrides)
    else:
        architecture = getattr(transformers, f"{family}ForCausalLM")
        model = architecture(architecture.config_class(**(SIZES | flags | overrides)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.3)  # transformers starts them at 0, where they prove nothing
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(std=0.1)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def _with_images(text: dict[str, Any]) -> Any:
    """Return a Gemma 3 whose tensors of images are as small as they can be."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.SiglipVisionConfig(**sizes, image_size=28, patch_size=14, vision_use_head=False)
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=UNKNOWN,
        eos_token_id=EOS,
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE of at most `VOCAB` tokens, its chat template, and what ends an answer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "unk_token": SPECIAL[UNKNOWN],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": SIZES["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
