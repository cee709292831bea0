"""
The tokenizer of a GGUF file.

This module builds byte-level vocabularies from the parsed metadata, which takes tenths of a second;
transformers needs several seconds. Nearly all supported models have such a vocabulary. transformers reads the
other kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from baton_api.errors import SetupError
from baton_engine.model.tokenizer_cache import Definition

BYTE_LEVEL = "gpt2"
CONTROL, USER_DEFINED = 3, 4
"""Token types of GGUF: special tokens, and added tokens that are part of the text."""

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


LOWER, UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
CASED = "|".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{word}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    for word in (f"{UPPER}*{LOWER}+", f"{UPPER}+{LOWER}*")
)
"""Words of OpenAI's o200k: a capital begins a word."""
CASED_REST = r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_apart() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(digits: int) -> Any:
    """Split into words, numbers of at most `digits` digits, and punctuation with its line breaks."""
    return _matches(WORDS % digits + REST)


def _matches(pattern: str) -> Any:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), bytes_only])


SPECIAL = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
"""Roles of special tokens: the names of transformers and of GGUF."""

PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _digits_apart,
    "refact": _digits_apart,
    "llama-bpe": partial(_split, 3),
    "dbrx": partial(_split, 3),
    "glm4": partial(_split, 3),
    "gpt-4o": partial(_matches, CASED + CASED_REST),
    "qwen2": partial(_split, 1),
}
"""Pre-tokenizers, by `tokenizer.ggml.pre`."""


def can_build(metadata: Mapping[str, Any]) -> bool:
    """Return whether `build` supports this kind of vocabulary."""
    return (
        metadata.get("tokenizer.ggml.model") == BYTE_LEVEL
        and metadata.get("tokenizer.ggml.pre", "default") in PRE_TOKENIZERS
    )


def build(metadata: Mapping[str, Any], path: Path) -> Definition:
    """Build the tokenizer from `metadata` of the file at `path`. Raises SetupError."""
    backend = _backend(metadata, path)
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in SPECIAL
        if 0 <= metadata.get(f"tokenizer.ggml.{key}_token_id", -1) < len(tokens)
    }
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [token for token in dict.fromkeys(special.values()) if token not in added]
    backend.add_tokens([AddedToken(token, special=True) for token in missing])
    return Definition(backend, metadata.get("tokenizer.chat_template"), special)


def _backend(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
        kind = metadata.get("tokenizer.ggml.pre", "default")
        model = models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=kind == "llama-bpe",
        )
    except KeyError as error:
        raise SetupError(f"{path} lacks the metadata {error}.") from error
    except Exception as error:  # tokenizers raises bare Exceptions for an invalid vocabulary
        raise SetupError(f"{path} has a damaged vocabulary: {error}") from error
    tokenizer = Tokenizer(model)
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[kind]()
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    for token, number in zip(tokens, types, strict=False):
        if number == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif number == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    added_at = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", kind == "llama-bpe"),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ids = {end: metadata.get(f"tokenizer.ggml.{end}_token_id") for end, added in added_at.items() if added}
    added = {end: (tokens[number], number) for end, number in ids.items() if number is not None}
    text = [added[end][0] if end in added else "" for end in added_at]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{text[0]} $A {text[1]}".strip(), special_tokens=list(added.values())
    )
    return tokenizer
