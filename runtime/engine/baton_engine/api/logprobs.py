"""
Logprobs in the formats of the API: one object per token (chat), parallel arrays (completions), and vLLM's
maps by token id (`prompt_logprobs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from baton_api.messages import TokenChoice
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.requests import PromptLogprobs

FLOOR = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""

Name = Callable[[int], str]
"""Returns the name of a token in logprobs."""


def token_name(tokenizer: Tokenizer, as_ids: bool) -> Name:
    """Name tokens by their text, or by their id for vLLM's `return_tokens_as_token_ids`."""
    return (lambda token: f"token_id:{token}") if as_ids else tokenizer.token_text


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenChoice], alternatives: int, name: Name | None = None
) -> dict[str, Any]:
    """Return chat completions' logprobs. `name` defaults to the token's text."""
    entry = partial(_entry, tokenizer, name or tokenizer.token_text)
    return {
        "content": [
            entry(choice.token, _floored(choice.logprob))
            | {"top_logprobs": [entry(token, logprob) for token, logprob in _top(choice, alternatives)]}
            for choice in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(
    name: Name, tokens: Sequence[TokenChoice], offsets: Sequence[int], alternatives: int
) -> dict[str, list[Any]]:
    texts = [name(choice.token) for choice in tokens]
    logprobs = [_floored(choice.logprob) for choice in tokens]
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": [
            # The sampled token is always included, so there may be one more than requested.
            {name(token): value for token, value in _top(choice, alternatives)} | {text: logprob}
            for choice, text, logprob in zip(tokens, texts, logprobs, strict=True)
        ],
        "text_offset": list(offsets),
    }


def echoed_logprobs(
    name: Name, prompt: Sequence[int], scores: PromptLogprobs, offsets: Sequence[int], alternatives: int
) -> dict[str, list[Any]]:
    """Return the arrays of a prompt. Its first token has no preceding token, so its logprobs are null."""
    rest = completion_logprobs(name, scored(prompt, scores), offsets[1:], alternatives)
    first = {
        "tokens": name(prompt[0]),
        "token_logprobs": None,
        "top_logprobs": None,
        "text_offset": offsets[0],
    }
    return {key: [first[key], *values] for key, values in rest.items()}


def scored(prompt: Sequence[int], scores: PromptLogprobs) -> list[TokenChoice]:
    """Return the prompt's tokens after the first in the format of sampled tokens."""
    return [
        TokenChoice(token=token, logprob=logprob, top=top)
        for token, logprob, top in zip(prompt[1:], scores.logprobs.tolist(), _pairs(scores), strict=True)
    ]


def joined(first: Mapping[str, list[Any]], second: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Concatenate the arrays of two texts."""
    return {key: [*values, *second[key]] for key, values in first.items()}


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: PromptLogprobs, alternatives: int
) -> list[dict[str, dict[str, Any]] | None]:
    """
    Return, for each prompt token, a map by token id: the token itself first, then the most likely ones.

    The list begins with None, for the first token. Ranks count from 1.
    """
    entries: list[dict[str, dict[str, Any]] | None] = [None]
    scored_tokens = zip(prompt[1:], scores.logprobs.tolist(), scores.ranks.tolist(), strict=True)
    for (token, logprob, rank), top in zip(scored_tokens, _pairs(scores), strict=True):
        likely = {
            other: (value, position) for position, (other, value) in enumerate(top[:alternatives], start=1)
        }
        ranked = {token: (logprob, rank)} | likely
        entries.append(
            {
                str(other): {
                    "logprob": _floored(value),
                    "rank": position,
                    "decoded_token": tokenizer.token_text(other),
                }
                for other, (value, position) in ranked.items()
            }
        )
    return entries


def mean_logprob(tokens: Sequence[TokenChoice]) -> float:
    """Return the mean logprob of a text; 0 for an empty one."""
    return sum(_floored(choice.logprob) for choice in tokens) / len(tokens) if tokens else 0.0


def _pairs(scores: PromptLogprobs) -> list[list[tuple[int, float]]]:
    return [
        list(zip(ids, values, strict=True))
        for ids, values in zip(scores.top_ids.tolist(), scores.top.tolist(), strict=True)
    ]


def _entry(tokenizer: Tokenizer, name: Name, token: int, logprob: float) -> dict[str, Any]:
    return {"token": name(token), "logprob": logprob, "bytes": list(tokenizer.token_bytes(token))}


def _top(choice: TokenChoice, alternatives: int) -> list[tuple[int, float]]:
    ranked = sorted(choice.top, key=lambda item: -item[1])
    return [(token, _floored(logprob)) for token, logprob in ranked[:alternatives]]


def _floored(logprob: float | None) -> float:
    return FLOOR if logprob is None else max(logprob, FLOOR)
