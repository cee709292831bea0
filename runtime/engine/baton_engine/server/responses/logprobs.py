"""
The logprobs of what is said to the user, told apart from those of thoughts, calls and marks.

Each token knows where in the whole text it stands, and each piece of a message is found there.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from baton_api.messages import TokenChoice
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.server.logprobs import chat_logprobs
from baton_engine.server.transcript import Piece


class MessageLogprobs:
    """Of one answer. The tokens of a piece are taken in before its parts are asked about."""

    def __init__(self, tokenizer: Tokenizer, alternatives: int) -> None:
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._text = ""
        self._read = 0
        """Characters of the text that are accounted for."""
        self._tokens: deque[tuple[int, TokenChoice]] = deque()
        """Those that are not, with their places."""

    def saw(self, piece: Piece) -> None:
        self._text += piece.text
        self._tokens.extend(zip(piece.offsets, piece.tokens, strict=True))

    def skip(self, thought: str) -> None:
        """This much was thought and not said."""
        at = self._text.find(thought, self._read)
        if at >= 0:
            self._read = at + len(thought)

    def of(self, words: str) -> list[dict[str, Any]]:
        """The entries of the tokens that these words are made of."""
        start = max(self._text.find(words, self._read), self._read)
        end = self._read = start + len(words)
        made: list[TokenChoice] = []
        while self._tokens and self._tokens[0][0] < end:
            place, token = self._tokens.popleft()
            if place >= start:
                made.append(token)
        entries: list[dict[str, Any]] = chat_logprobs(self._tokenizer, made, self._alternatives)["content"]
        return entries
