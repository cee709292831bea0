"""
One sequence's tokens as text: detokenized as they arrive, ended by a stop string or by the engine.

Characters are emitted only when they are complete and cannot begin a stop string. Of several matches the one
that ends first counts, the longer one at a tie, so the answer does not depend on how the text was cut into
pieces. Tokens after the one that completed a stop string do not count: the engine may have drawn some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton_api.messages import TokenChoice
from baton_engine.api.parameters import Parameters
from baton_engine.api.parsing.parts import Part, Reader
from baton_engine.api.parsing.reasoning.formats import Thinker
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.requests import FinishReason, Output


@dataclass(frozen=True, slots=True)
class Piece:
    """What one output of the engine adds to one choice."""

    text: str = ""
    tokens: Sequence[TokenChoice] = ()
    offsets: Sequence[int] = ()
    """For each of `tokens`, the characters of the choice's text before it."""
    parts: Sequence[Part] = ()
    """What `text` turned out to say; it may lag behind."""
    finish: FinishReason | None = None

    @classmethod
    def joined(cls, pieces: Sequence[Piece]) -> Piece:
        """All that a choice has, as one piece."""
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
    """Special tokens that the reader must see; None is all."""
    count: int = 0
    """Tokens generated, the ending one included."""
    finish: FinishReason | None = None
    matched: str | int | None = None
    """The stop string or the id that ended the text."""

    def __post_init__(self) -> None:
        self.reasoning_tokens = 0
        """Tokens up to the end of the thoughts, the marks included."""
        self._thinker = self.reader if isinstance(self.reader, Thinker) else None
        self._stream = self.tokenizer.stream(self.parameters.skip_special_tokens, self.marks)
        self._stops = StopStrings(self.parameters.stops, self.parameters.include_stop)
        self._characters = 0

    @property
    def stop_reason(self) -> str | int | None:
        """The match, unless it was the model's own end of sequence."""
        return None if self.matched in self.parameters.eos_ids else self.matched

    def push(self, output: Output) -> Piece:
        """Take one output of the engine; an empty piece once the text has ended."""
        if self.finish is not None:
            return Piece()
        text: list[str] = []
        parts: list[Part] = []
        offsets: list[int] = []
        silent = output.stop_id is not None and not self.parameters.include_stop
        for position, choice in enumerate(output.tokens, start=1):
            offsets.append(self._characters)
            self.count += 1
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
        whole = "".join(text)
        if self._thinker is None:
            parts += self.reader.push(whole)
        if self.finish is not None:
            parts += self.reader.flush()
        return Piece(whole, output.tokens[: len(offsets)], offsets, parts, self.finish)

    def _read(self, text: str, thinker: Thinker) -> Sequence[Part]:
        """One token's text in; it is a thought if it begins or ends in one."""
        thought = thinker.thinking
        parts = self.reader.push(text)
        if thought or thinker.thinking:
            self.reasoning_tokens = self.count
        return parts

    def _take(self, text: str) -> str:
        """Newly decoded text in, the part that may be shown out; ends the transcript at a stop string."""
        self._characters += len(text)
        if self.count < self.parameters.sampling.min_tokens:
            return text
        released, stop = self._stops.push(text)
        if stop is not None:
            self.finish = FinishReason.STOP
            self.matched = stop
        return released


class StopStrings:
    """The stop strings of one sequence, and the text held back for them."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be sent now, the stop string that was completed)"""
        if not self._stops:
            return text, None
        self._held += text
        match = self._first_match()
        if match is not None:
            start, stop = match
            released = self._held[: start + len(stop) if self._include else start]
            self._held = ""
            return released, stop
        keep = self._could_begin()
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released, None

    def flush(self) -> str:
        """What was held back, at an end for another reason."""
        released, self._held = self._held, ""
        return released

    def _first_match(self) -> tuple[int, str] | None:
        match = [(self._held.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in match if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _could_begin(self) -> int:
        """Characters at the end that are a proper beginning of a stop string, at most."""
        held = self._held
        return max(
            next((n for n in range(min(len(stop) - 1, len(held)), 0, -1) if held.endswith(stop[:n])), 0)
            for stop in self._stops
        )
