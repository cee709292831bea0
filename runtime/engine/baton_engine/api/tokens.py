"""
`POST /tokenize` and `POST /detokenize`: conversion between text and the model's token ids.

A conversation is rendered as for chat completions, so that `count` equals `prompt_tokens` of its response,
even if it exceeds the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton_api import limits
from baton_api.errors import EMPTY_ARRAY, InvalidRequest
from baton_engine.api.chat import endpoint
from baton_engine.api.fields import Fields, wrong_type
from baton_engine.api.generate import check_model
from baton_engine.api.prompts import read_ids
from baton_engine.api.served import Served


def tokenize(fields: Fields, served: Served) -> dict[str, Any]:
    """Tokenize one prompt, or several with lists as results."""
    check_model(fields, served)
    shows_texts = fields.boolean("return_token_strs")
    prompts = _tokens(fields, served)
    tokenizer = served.tokenizer
    texts = [[tokenizer.token_text(token) for token in tokens] for tokens in prompts] if shows_texts else None
    several = isinstance(fields.get("prompt"), list)
    return {
        "tokens": prompts if several else prompts[0],
        "count": [len(tokens) for tokens in prompts] if several else len(prompts[0]),
        "max_model_len": served.max_model_len,
        "token_strs": texts if several or texts is None else texts[0],
    }


def detokenize(fields: Fields, served: Served) -> dict[str, Any]:
    """Return the text as `text` and as `prompt`, because clients read either."""
    check_model(fields, served)
    skips = fields.boolean("skip_special_tokens", True)
    value = fields.require("tokens")
    if not isinstance(value, list):
        raise wrong_type("tokens", "an array of token ids, or an array of such arrays", value)
    text: str | list[str]
    if value and isinstance(value[0], list):
        fields.array("tokens", limits.TOKEN_LISTS.most)
        text = []
        for position, ids in enumerate(value):
            if not isinstance(ids, list):
                raise wrong_type(f"tokens[{position}]", "an array of token ids", ids)
            text.append(
                served.tokenizer.decode(read_ids(ids, served.tokenizer, f"tokens[{position}]"), skips)
            )
    else:
        text = served.tokenizer.decode(read_ids(value, served.tokenizer, "tokens"), skips)
    return {"text": text, "prompt": text}


def _tokens(fields: Fields, served: Served) -> list[Sequence[int]]:
    if fields.get("messages") is not None:
        if fields.get("prompt") is not None:
            raise InvalidRequest(
                "'prompt' and 'messages' cannot be combined. Remove one of them.", param="messages"
            )
        return [endpoint.prompt_tokens(fields, served)]
    special = fields.boolean("add_special_tokens", True)
    value = fields.require("prompt")
    if isinstance(value, str):
        return [served.tokenizer.encode(value, special)]
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string or an array of strings", value)
    if not value:
        raise InvalidRequest(
            "Invalid 'prompt': empty array. Expected at least 1 string.", param="prompt", code=EMPTY_ARRAY
        )
    fields.array("prompt", limits.PROMPTS.most)
    for position, text in enumerate(value):
        if not isinstance(text, str):
            raise wrong_type(f"prompt[{position}]", "a string", text)
    return [served.tokenizer.encode(text, special) for text in value]
