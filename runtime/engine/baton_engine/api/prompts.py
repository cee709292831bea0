"""Prompts as text or token ids, one or several: completions, embeddings and `/generate`."""

from __future__ import annotations

from typing import Any, NamedTuple

from baton_api import limits
from baton_api.errors import EMPTY_ARRAY, ContextTooLong, InvalidRequest
from baton_engine.api.fields import Fields, integer, wrong_type
from baton_engine.api.served import Served
from baton_engine.model.tokenizer import Tokenizer


class PromptInput(NamedTuple):
    tokens: tuple[int, ...]
    """At least one token id, all within the vocabulary."""
    text: str | None
    """The text, if the prompt was given as text."""


def read_prompts(
    fields: Fields, name: str, served: Served, most: int = limits.PROMPTS.most, *, any_length: bool = False
) -> list[PromptInput]:
    """
    Read the field `name`: a string, an array of strings, token ids, or an array of arrays of token ids.

    With `any_length`, texts may be too long for the context.
    """
    value = fields.require(name)
    param = fields.param(name)
    tokenizer = served.tokenizer
    if isinstance(value, str):
        return [_from_text(value, served, param, any_length)]
    if not isinstance(value, list):
        raise wrong_type(param, "a string, an array of strings, or token ids", value)
    if not value:
        raise _empty(param)
    if not isinstance(value[0], str | list):
        return [_from_ids(value, tokenizer, param)]
    fields.array(name, most)
    prompts: list[PromptInput] = []
    for position, item in enumerate(value):
        where = f"{param}[{position}]"
        if type(item) is not type(value[0]):
            raise wrong_type(where, "the same type as the first prompt", item)
        if isinstance(item, str):
            prompts.append(_from_text(item, served, where, any_length))
        else:
            prompts.append(_from_ids(item, tokenizer, where))
    return prompts


def check_text(served: Served, param: str, *texts: str) -> None:
    """Raise ContextTooLong if `texts` together are too long for the context, however they are tokenized."""
    least = served.tokenizer.least_tokens(sum(map(len, texts)))
    if least > served.max_model_len and not served.settings.allow_auto_truncate:
        raise ContextTooLong(least, 0, served.max_model_len, param=param, least=True)


def _from_text(text: str, served: Served, param: str, any_length: bool) -> PromptInput:
    if not any_length:
        check_text(served, param, text)
    tokens = tuple(served.tokenizer.encode(text))
    if not tokens:
        raise _empty(param)
    return PromptInput(tokens, text)


def _from_ids(ids: list[Any], tokenizer: Tokenizer, param: str) -> PromptInput:
    if not ids:
        raise _empty(param)
    return PromptInput(read_ids(ids, tokenizer, param), None)


def read_ids(ids: list[Any], tokenizer: Tokenizer, param: str) -> tuple[int, ...]:
    """Return token ids after validation; may be empty. Raises InvalidRequest."""
    last = tokenizer.vocab_size - 1
    return tuple(integer(value, f"{param}[{position}]", 0, last) for position, value in enumerate(ids))


def _empty(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid '{param}': the prompt is empty. Expected at least 1 token.", param=param, code=EMPTY_ARRAY
    )
