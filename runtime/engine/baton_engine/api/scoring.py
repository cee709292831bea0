"""
`POST /v1/rerank` and `/v1/score`: relevance scores of pairs of texts.

A cross encoder reads both texts at once and returns a score from 0 to 1, or a logit if its checkpoint says
so. With an embedder, the score is the cosine of the texts' embeddings, as in vLLM. Rerank has the shape of
Cohere and Jina, score that of vLLM.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton_api import limits
from baton_api.errors import INVALID_VALUE, InvalidRequest
from baton_api.inference_paths import RERANK_PATHS, SCORE_PATHS
from baton_engine.api import parameters
from baton_engine.api.embeddings import check_length
from baton_engine.api.fields import Fields, wrong_type
from baton_engine.api.pooling import PooledInputs
from baton_engine.api.prompts import check_text
from baton_engine.api.served import Served
from baton_engine.model.embedder import Embedder
from baton_engine.model.encoder import EncoderSpec
from baton_engine.requests import Pooling, Vector

__all__ = ["RERANK_PATHS", "SCORE_PATHS", "rerank", "score"]

UNSUPPORTED = ("truncate_prompt_tokens", "max_tokens_per_doc", "max_chunks_per_doc")
FIRST, SECOND = ("text_1", "queries", "data_1"), ("text_2", "documents", "data_2")
"""Names of the two sides of `/v1/score`."""


@dataclass(frozen=True, slots=True)
class TextInput:
    """One text of a request, and its path."""

    text: str
    path: str


Pairs = Sequence[tuple[TextInput, TextInput]]
Body = Callable[[str, Sequence[float], dict[str, int]], dict[str, Any]]
"""Returns a response from its id, the scores of the pairs, and the usage."""


def rerank(fields: Fields, served: Served) -> PooledInputs:
    """Read a request of `/v1/rerank`. Blocks for long texts, so do not call it on the event loop."""
    parameters.reject_unsupported(fields, UNSUPPORTED)
    fields.require("query")
    query = _text(fields.get("query"), "query")
    documents = _texts(fields, "documents")
    top_n = fields.integer("top_n", 0, limits.TOKENS) or len(documents)
    shown = fields.boolean("return_documents", True)

    def body(id: str, scores: Sequence[float], usage: dict[str, int]) -> dict[str, Any]:
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
        results: list[dict[str, Any]] = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": documents[index].text}} if shown else {})
            for index in best
        ]
        return {"id": id, "model": served.name, "usage": usage, "results": results}

    return _inputs("rerank", [(query, document) for document in documents], served, body)


def score(fields: Fields, served: Served) -> PooledInputs:
    """Read a request of `/v1/score`. Blocks for long texts, so do not call it on the event loop."""
    parameters.reject_unsupported(fields, UNSUPPORTED)
    names = [_given(fields, side) for side in (FIRST, SECOND)]
    first, second = (_texts(fields, name) for name in names)
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"Invalid '{names[0]}': it has {len(first)} texts and '{names[1]}' has {len(second)}. Expected 1 "
            f"or {len(second)} texts.",
            param=names[0],
            code=INVALID_VALUE,
        )
    pairs = list(zip(first * (len(second) // len(first)), second, strict=True))

    def body(id: str, scores: Sequence[float], usage: dict[str, int]) -> dict[str, Any]:
        data = [
            {"index": index, "object": "score", "score": similarity}
            for index, similarity in enumerate(scores)
        ]
        envelope = {"id": id, "object": "list", "created": int(time.time()), "model": served.name}
        return envelope | {"data": data, "usage": usage}

    return _inputs("score", pairs, served, body)


def _inputs(kind: str, pairs: Pairs, served: Served, body: Body) -> PooledInputs:
    """Return the inputs that give the scores of `pairs`. Raises InvalidRequest if the model has no scores."""
    encoder = served.encoder
    if encoder is not None and encoder.labels == 1:
        return _read_together(kind, pairs, served, encoder, body)
    if isinstance(served.embedder, Embedder):
        return _embedded(kind, pairs, served, served.embedder, body)
    reason = served.embedder.reason
    if encoder is not None and encoder.labels:
        reason = f"it sorts texts into {encoder.labels} classes"
    raise InvalidRequest(
        f"The model {served.name!r} does not score pairs of texts: {reason}. Use a cross encoder with one "
        "label, or an embedding model.",
        param="model",
    )


def _read_together(kind: str, pairs: Pairs, served: Served, encoder: EncoderSpec, body: Body) -> PooledInputs:
    inputs = []
    for first, second in pairs:
        check_text(served, second.path, first.text, second.text)
        tokens, types = served.tokenizer.encode_pair(first.text, second.text)
        check_length(tokens, served, second.path)
        inputs.append(encoder.with_types(tokens, types))

    def answer(id: str, vectors: Sequence[Vector], usage: dict[str, int]) -> dict[str, Any]:
        logits = [float(vector[0]) for vector in vectors]
        return body(id, logits if encoder.raw_scores else [_sigmoid(logit) for logit in logits], usage)

    return PooledInputs(kind, inputs, Pooling.SCORE, answer)


def _embedded(kind: str, pairs: Pairs, served: Served, embedder: Embedder, body: Body) -> PooledInputs:
    """Each text is embedded once, however many pairs have it."""
    indexes: dict[str, int] = {}
    inputs: list[tuple[int, ...]] = []
    for text in (text for pair in pairs for text in pair):
        if text.text not in indexes:
            indexes[text.text] = len(inputs)
            check_text(served, text.path, text.text)
            inputs.append(tuple(served.tokenizer.encode(text.text)))
            check_length(inputs[-1], served, text.path)

    def answer(id: str, vectors: Sequence[Vector], usage: dict[str, int]) -> dict[str, Any]:
        units = [vector / (np.linalg.norm(vector) or 1.0) for vector in vectors]
        cosines = [float(units[indexes[first.text]] @ units[indexes[second.text]]) for first, second in pairs]
        return body(id, cosines, usage)

    return PooledInputs(kind, inputs, embedder.pooling, answer)


def _sigmoid(logit: float) -> float:
    """
    >>> _sigmoid(0.0), _sigmoid(-1000.0)
    (0.5, 0.0)
    """
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))


def _given(fields: Fields, names: Sequence[str]) -> str:
    """Return the name that the request uses; otherwise the first one."""
    return next((name for name in names if fields.get(name) is not None), names[0])


def _texts(fields: Fields, name: str) -> list[TextInput]:
    """Read a text, or an array of texts."""
    value = fields.require(name)
    if isinstance(value, str):
        return [_text(value, name)]
    if not isinstance(value, list):
        fields.wrong_type(name, "a string or an array of strings", value)
    items = fields.array(name, limits.INPUTS.most) or []
    if not items:
        raise InvalidRequest(
            f"Invalid '{name}': empty array. Expected at least 1 text.",
            param=name,
            code=limits.INPUTS.code_below,
        )
    return [_text(item, f"{name}[{position}]") for position, item in enumerate(items)]


def _text(value: object, path: str) -> TextInput:
    """Read a text: a string, or an object with `text`."""
    given = value.get("text") if isinstance(value, dict) else value
    if not isinstance(given, str):
        raise wrong_type(path, "a string, or an object with 'text'", value)
    if not given:
        raise InvalidRequest(
            f"Invalid '{path}': the text is empty. Expected at least 1 character.",
            param=path,
            code=INVALID_VALUE,
        )
    return TextInput(given, path)
