"""A pooled vector as an answer shows it: cut, made of length 1, as numbers or as base64 of their bytes."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import numpy as np

from baton_api.errors import UNSUPPORTED_PARAMETER, InvalidRequest
from baton_engine.model.embedder import Embedder
from baton_engine.requests import Vector
from baton_engine.server.fields import Fields

FORMATS = ("float", "base64")


@dataclass(frozen=True, slots=True)
class VectorFormat:
    """What a request wants vectors to look like."""

    dimensions: int | None
    """As many as the model has if None."""
    normalised: bool
    encoded: bool
    """Base64 of little-endian float32, which OpenAI's SDK asks for, instead of a list of numbers."""

    def shown(self, vector: Vector) -> list[float] | str:
        values = vector[: self.dimensions].astype(np.float64)
        if self.normalised:
            length = np.linalg.norm(values)
            values = values / length if length else values
        if self.encoded:
            return base64.b64encode(values.astype("<f4").tobytes()).decode()
        numbers: list[float] = values.astype(np.float32).tolist()
        return numbers


def read_format(fields: Fields, embedder: Embedder, hidden: int) -> VectorFormat:
    """`encoding_format` and `dimensions`, which only some models' vectors can be cut to."""
    encoded = fields.choice("encoding_format", FORMATS) == "base64"
    dimensions = fields.integer("dimensions", 1, hidden)
    if dimensions is None or dimensions == hidden:
        return VectorFormat(None, embedder.normalised, encoded)
    if not embedder.shortens:
        raise InvalidRequest(
            f"This model's embeddings have {hidden} dimensions, and it does not say that fewer of them "
            "serve; leave 'dimensions' out, or start the worker with --matryoshka if it was trained so.",
            param="dimensions",
            code=UNSUPPORTED_PARAMETER,
        )
    if embedder.lengths and dimensions not in embedder.lengths:
        known = ", ".join(map(str, embedder.lengths))
        fields.wrong_value("dimensions", f"this model was trained for {known}, but got {dimensions}")
    return VectorFormat(dimensions, True, encoded)
