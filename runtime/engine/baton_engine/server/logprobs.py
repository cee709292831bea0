"""Logprobs in the two shapes of the API: one object per token (chat), parallel arrays (completions)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton_api.messages import TokenChoice
from baton_engine.model.tokenizer import Tokenizer

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenChoice], alternatives: int) -> dict[str, Any]:
    return {
        "content": [
            _entry(tokenizer, choice.token, _floored(choice.logprob))
            | {
                "top_logprobs": [
                    _entry(tokenizer, token, logprob) for token, logprob in _top(choice, alternatives)
                ]
            }
            for choice in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenChoice], offsets: Sequence[int], alternatives: int
) -> dict[str, Any]:
    texts = [tokenizer.token_text(choice.token) for choice in tokens]
    logprobs = [_floored(choice.logprob) for choice in tokens]
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": [
            # The drawn token is always among them, so that there may be one more than was asked for.
            {tokenizer.token_text(token): value for token, value in _top(choice, alternatives)}
            | {text: logprob}
            for choice, text, logprob in zip(tokens, texts, logprobs, strict=True)
        ],
        "text_offset": list(offsets),
    }


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token),
        "logprob": logprob,
        "bytes": list(tokenizer.token_bytes(token)),
    }


def _top(choice: TokenChoice, alternatives: int) -> list[tuple[int, float]]:
    ranked = sorted(choice.top, key=lambda item: -item[1])
    return [(token, _floored(logprob)) for token, logprob in ranked[:alternatives]]


def _floored(logprob: float | None) -> float:
    return FLOOR if logprob is None else max(logprob, FLOOR)
