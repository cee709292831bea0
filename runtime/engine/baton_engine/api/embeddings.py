"""
`POST /v1/embeddings`: texts or token ids in, one vector for each, in order.

Vectors are truncated, normalized, and written as numbers or base64.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton_api import limits
from baton_api.errors import INVALID_VALUE, UNSUPPORTED_PARAMETER, ContextTooLong, InvalidRequest
from baton_engine.api.fields import Fields
from baton_engine.api.pooling import PooledInputs
from baton_engine.api.prompts import PromptInput, read_prompts
from baton_engine.api.served import Served
from baton_engine.model.embedder import Embedder, NoEmbeddings
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.requests import Vector


def prepare(fields: Fields, served: Served) -> PooledInputs:
    """Validate and tokenize a request. Blocks for long inputs, so do not call it on the event loop."""
    embedder, model = embedder_for(served), served.answering(fields.text("model"))
    shape = read_format(fields, embedder, served.hidden)
    truncation = read_truncation(fields, served.max_model_len)
    cut = truncation is not None
    inputs = read_prompts(fields, "input", served, limits.INPUTS.most, any_length=cut)
    if truncation is not None:
        inputs = [truncation.applied(given, served.tokenizer) for given in inputs]
    for position, given in enumerate(inputs):
        param = f"input[{position}]" if len(inputs) > 1 else "input"
        if given.text == "":
            raise InvalidRequest(
                f"Invalid '{param}': the text is empty. Expected at least 1 character.",
                param=param,
                code=INVALID_VALUE,
            )
        check_length(given.tokens, served, param)

    def answer(id: str, vectors: Sequence[Vector], usage: dict[str, int]) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": shape.shown(vector)}
            for index, vector in enumerate(vectors)
        ]
        return {"object": "list", "data": data, "model": model, "usage": usage}

    return PooledInputs("embd", [given.tokens for given in inputs], embedder.pooling, answer)


SIDES = ("left", "right")


@dataclass(frozen=True, slots=True)
class Truncation:
    """vLLM's `truncate_prompt_tokens`: the maximum length of an input, and the side that loses the rest."""

    tokens: int
    side: str

    def applied(self, given: PromptInput, tokenizer: Tokenizer) -> PromptInput:
        """Shorten an input. Tokens that the tokenizer adds around a text stay."""
        before, content, after = self._parted(given, tokenizer)
        limit = self.tokens - len(before) - len(after)
        if len(content) <= limit:
            return given
        shortened = content[:limit] if self.side == "right" else content[len(content) - limit :]
        return given._replace(tokens=(*before, *shortened, *after))

    def _parted(
        self, given: PromptInput, tokenizer: Tokenizer
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        tokens = given.tokens
        if given.text is None or len(tokens) <= self.tokens:
            return (), tokens, ()
        content = tuple(tokenizer.encode(given.text, add_special_tokens=False))
        added = len(tokens) - len(content)
        if added >= self.tokens:
            Fields({}).wrong_value(
                NAME, f"the model adds {added} tokens to a text, so expected more, but got {self.tokens}"
            )
        start = next(
            (offset for offset in range(added + 1) if tokens[offset : offset + len(content)] == content), None
        )
        if start is None:
            return (), tokens, ()
        return tokens[:start], content, tokens[start + len(content) :]


NAME = "truncate_prompt_tokens"


def read_truncation(fields: Fields, context: int) -> Truncation | None:
    """Read the length that inputs are cut to; -1 is the context. Raises InvalidRequest."""
    wanted = fields.integer(NAME, -1, context)
    side = fields.choice("truncation_side", SIDES) or "left"
    if wanted is None:
        return None
    if wanted == 0:
        fields.wrong_value(NAME, "expected -1, or at least 1, but got 0")
    return Truncation(context if wanted == -1 else wanted, side)


def check_length(tokens: Sequence[int], served: Served, param: str) -> None:
    """Raise ContextTooLong if the tokens of one input exceed the context."""
    if len(tokens) > served.max_model_len:
        raise ContextTooLong(len(tokens), 0, served.max_model_len, param=param)


def embedder_for(served: Served) -> Embedder:
    """Return the embedding configuration of the model. Raises InvalidRequest if it does not support any."""
    embedder = served.embedder
    if isinstance(embedder, NoEmbeddings):
        raise InvalidRequest(
            f"The model {served.name!r} does not compute embeddings: {embedder.reason}.", param="model"
        )
    return embedder


FORMATS = ("float", "base64")


@dataclass(frozen=True, slots=True)
class VectorFormat:
    dimensions: int | None
    """None: all dimensions of the model."""
    normalized: bool
    encoded: bool
    """Base64 of little-endian float32, the default of OpenAI's SDK, instead of a list of numbers."""

    def shown(self, vector: Vector) -> list[float] | str:
        values = vector[: self.dimensions].astype(np.float64)
        if self.normalized:
            length = np.linalg.norm(values)
            values = values / length if length else values
        if self.encoded:
            return base64.b64encode(values.astype("<f4").tobytes()).decode()
        numbers: list[float] = values.astype(np.float32).tolist()
        return numbers


def read_format(fields: Fields, embedder: Embedder, hidden: int) -> VectorFormat:
    """Read `encoding_format` and `dimensions`. Raises InvalidRequest for unsupported dimensions."""
    encoded = fields.choice("encoding_format", FORMATS) == "base64"
    dimensions = fields.integer("dimensions", 1, hidden)
    if dimensions is None or dimensions == hidden:
        return VectorFormat(None, embedder.normalized, encoded)
    if not embedder.shortens:
        raise InvalidRequest(
            f"This model's embeddings have {hidden} dimensions and cannot be truncated. Omit 'dimensions', "
            "or start the worker with --matryoshka if the model was trained for truncated embeddings.",
            param="dimensions",
            code=UNSUPPORTED_PARAMETER,
        )
    if embedder.lengths and dimensions not in embedder.lengths:
        lengths = ", ".join(map(str, embedder.lengths))
        fields.wrong_value("dimensions", f"this model supports {lengths}, but got {dimensions}")
    return VectorFormat(dimensions, True, encoded)
