"""
A model that always says the same: real tokenizer and template of Qwen3, weights that were written by hand.

Random weights give no text that could be checked, and a reasoning model is too large for a test. The head
answers each token of a script with the next one. Attention and the rest stay random and small, so that
sampled tokens still depend on the KV cache a little. After the template's opening it thinks, and then
answers; with thinking switched off, the template's empty thought leads to the same answer.
"""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import torch
import transformers

from tests.tokenizers import npm_tokenizer

THOUGHT = "Spain first, then Italy"
ANSWER = "Madrid and Rome."

VOCAB = 151_936
HIDDEN = 64
CONTEXT = 4096
SEED = 7

SURE = 3.0
"""How far a scripted token's logit is above all others: beyond any chance of another one."""


def make_scripted(folder: Path) -> Path:
    """The checkpoint in `folder`; skips where the tokenizer cannot be had."""
    source = npm_tokenizer("qwen3")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    torch.manual_seed(SEED)
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        embeddings = torch.nn.functional.normalize(torch.randn(VOCAB, HIDDEN), dim=-1) * HIDDEN**0.5
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.normal_(std=0.02)
        for token, next_token in pairwise(_script(tokenizer)):
            model.lm_head.weight[next_token] += SURE / HIDDEN**0.5 * embeddings[token]
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    return folder


def _script(tokenizer: transformers.PreTrainedTokenizerBase) -> list[int]:
    """From the line break after `assistant` to the end of the turn; no token comes twice."""
    text = f"\n<think>{THOUGHT}</think>\n\n{ANSWER}<|im_end|>"
    script: list[int] = tokenizer.encode(text, add_special_tokens=False)
    assert len(set(script)) == len(script), "a token with two successors has no script"
    return script
