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
}
"""Named variants: the family, and what its configuration sets beyond `SIZES`."""


def make_model(folder: Path, variant: str = "llama", **overrides: Any) -> Path:
    """A checkpoint of `variant` in `folder`, with a tokenizer; `overrides` go to the configuration."""
    import transformers

    family, flags = ARCHITECTURES[variant]
    config = getattr(transformers, f"{family}Config")(**(SIZES | flags | overrides))
    torch.manual_seed(SEED)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)  # transformers starts them at 0, where they prove nothing
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


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
