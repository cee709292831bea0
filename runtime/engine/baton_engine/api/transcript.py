"""
The text of one sequence: incremental detokenization, and the end by a stop string or by the engine.

Characters are emitted when they are complete and cannot be part of a stop string. Of several matches the
first to end counts, and the longer one at a tie. The text therefore does not depend on how it was split into
pieces. Tokens after a stop string are ignored; the engine may have sampled some.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton_api.messages import TokenChoice
from baton_engine.api.parameters import Parameters
from baton_engine.api.parsing.parts import Part, Reader
from baton_engine.api.parsing.reasoning.formats import Thinker
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.prompt_lookup import Lookup
from baton_engine.requests import FinishReason, Output


class Piece(msgspec.Struct, frozen=True):
    """The addition of one engine output to a choice."""

    text: str = ""
    tokens: Sequence[TokenChoice] = ()
    offsets: Sequence[int] = ()
    """Offset of each of `tokens` in the choice's text."""
    parts: Sequence[Part] = ()
    """Parsed parts of the text. They may lag behind `text`."""
    finish: FinishReason | None = None

    @classmethod
    def joined(cls, pieces: Sequence[Piece]) -> Piece:
        return cls(
            "".join(piece.text for piece in pieces),
            [token for piece in pieces for token in piece.tokens],
            [offset for piece in pieces for offset in piece.offsets],
            [part for piece in pieces for part in piece.parts],
            pieces[-1].finish if pieces else None,
        )


@dataclass
class Transcript:
    """The text of one choice so far."""

    tokenizer: Tokenizer
    parameters: Parameters
    reader: Reader
    marks: frozenset[str] | None = frozenset()
    """Special tokens that the reader needs in the text. None: all."""
    prediction: tuple[int, ...] = ()
    """Tokens that the client expects as the answer."""
    count: int = 0
    """Number of generated tokens, including the end token."""
    finish: FinishReason | None = None
    matched: str | int | None = None
    """The stop string or token id that ended the text."""

    def __post_init__(self) -> None:
        self.reasoning_tokens = 0
        """Number of tokens up to the end of the reasoning, including the marks."""
        self._thinker = self.reader if isinstance(self.reader, Thinker) else None
        self._stream = self.tokenizer.stream(self.parameters.skip_special_tokens, self.marks)
        self._stops = StopStrings(self.parameters.stops, self.parameters.include_stop)
        self._characters = 0
        self._lookup = Lookup((), self.prediction) if self.prediction else None

    @property
    def predicted(self) -> int:
        """Number of tokens of the prediction that the text contains so far, in the prediction's order."""
        return 0 if self._lookup is None else min(self._lookup.predicted, len(self.prediction))

    @property
    def stop_reason(self) -> str | int | None:
        """The matched stop, except for the model's end-of-sequence tokens."""
        return None if self.matched in self.parameters.eos_ids else self.matched

    def push(self, output: Output) -> Piece:
        """Process one output of the engine. Returns an empty piece after the end of the text."""
        if self.finish is not None:
            return Piece()
        text: list[str] = []
        parts: list[Part] = []
        offsets: list[int] = []
        silent = output.stop_id is not None and not self.parameters.include_stop
        for position, choice in enumerate(output.tokens, start=1):
            offsets.append(self._characters)
            self.count += 1
            if self._lookup is not None:
                self._lookup.push(choice.token)
                self._lookup.propose(1)  # finds the place to compare the next token with
            if silent and position == len(output.tokens):
                break
            shown = self._take(self._stream.push(choice.token))
            text.append(shown)
            if self._thinker is not None:
                parts += self._read(shown, self._thinker)
            if self.finish is not None:
                break
        if self.finish is None and output.finish is not None:
            rest = self._take(self._stream.flush())
            if self.finish is None:
                rest += self._stops.flush()
                self.finish = output.finish
                self.matched = output.stop_id
            text.append(rest)
            if self._thinker is not None:
                parts += self.reader.push(rest)
        new_text = "".join(text)
        if self._thinker is None:
            parts += self.reader.push(new_text)
        if self.finish is not None:
            parts += self.reader.flush(cut=self.finish is not FinishReason.STOP)
        return Piece(new_text, output.tokens[: len(offsets)], offsets, parts, self.finish)

    def _read(self, text: str, thinker: Thinker) -> Sequence[Part]:
        """Read the text of one token. It counts as reasoning if it begins or ends within reasoning."""
        thought = thinker.thinking
        parts = self.reader.push(text)
        if thought or thinker.thinking:
            self.reasoning_tokens = self.count
        return parts

    def _take(self, text: str) -> str:
        """Process decoded text and return the part that can be emitted. A stop string ends the transcript."""
        self._characters += len(text)
        if self.count < self.parameters.sampling.min_tokens:
            return text
        released, stop = self._stops.push(text)
        if stop is not None:
            self.finish = FinishReason.STOP
            self.matched = stop
        return released


class StopStrings:
    """Search for the stop strings of one sequence, with the text that is buffered for it."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._buffer = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text. Returns the text that can be emitted, and the stop string that was found."""
        if not self._stops:
            return text, None
        self._buffer += text
        match = self._first_match()
        if match is not None:
            start, stop = match
            released = self._buffer[: start + len(stop) if self._include else start]
            self._buffer = ""
            return released, stop
        keep = self._could_begin()
        cut = len(self._buffer) - keep
        released, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return released, None

    def flush(self) -> str:
        """Return the buffered text at an end without a stop string."""
        released, self._buffer = self._buffer, ""
        return released

    def _first_match(self) -> tuple[int, str] | None:
        match = [(self._buffer.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in match if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _could_begin(self) -> int:
        """Return the maximum number of characters at the end that are a proper prefix of a stop string."""
        buffer, longest = self._buffer, max(map(len, self._stops)) - 1
        beginnings = _beginnings(self._stops)
        return next((n for n in range(min(longest, len(buffer)), 0, -1) if buffer[-n:] in beginnings), 0)


@functools.lru_cache(maxsize=8)
def _beginnings(stops: tuple[str, ...]) -> frozenset[str]:
    """Return all proper prefixes of `stops`: a lookup in them costs the same for one stop and for many."""
    return frozenset(stop[:length] for stop in stops for length in range(1, len(stop)))
