"""A prompt as text that stands before its answer, and where in it each token begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton_engine.model.tokenizer import Tokenizer
from baton_engine.server.prompts import Given


@dataclass(frozen=True, slots=True)
class Echo:
    """One prompt."""

    tokens: Sequence[int]
    text: str
    offsets: Sequence[int]
    """For each of `tokens`, the characters of `text` before it; empty where nobody asks for them."""


def echo_of(given: Given, tokens: Sequence[int], tokenizer: Tokenizer, *, located: bool) -> Echo:
    """
    `tokens` are those that the model is given: fewer than `given` has where it was shortened.

    A prompt that came as text is shown as it came, byte for byte; one that came as ids is decoded.
    """
    if given.text is not None and tuple(tokens) == given.tokens:
        return Echo(tokens, given.text, tokenizer.offsets(given.text) if located else ())
    stream = tokenizer.stream()
    pieces, offsets, length = [], [], 0
    for token in tokens:
        offsets.append(length)
        pieces.append(stream.push(token))
        length += len(pieces[-1])
    pieces.append(stream.flush())
    return Echo(tokens, "".join(pieces), offsets if located else ())
