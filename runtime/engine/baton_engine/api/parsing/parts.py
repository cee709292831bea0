"""
Parts of an answer: reasoning, text, and tool calls.

A `Reader` receives the text of one choice in pieces and emits parts as early as possible. It is a state
machine over characters: the joined parts do not depend on how the text was split.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerText:
    """A piece of the text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The start of a call. `Arguments` follow."""

    index: int
    """Index of the call within the choice, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments: JSON text, or the input of a custom tool."""

    index: int
    text: str


Part = Thought | AnswerText | ToolCall | Arguments


class Reader(Protocol):
    """Converts the text of one choice into parts. Buffers text that may be the start of a marker."""

    def push(self, text: str) -> Sequence[Part]: ...

    def flush(self, cut: bool = False) -> Sequence[Part]:
        """
        Return the buffered parts at the end of the answer. A truncated call keeps its arguments so far.

        `cut` says that the model did not end the answer. The beginning of a mark or of a call at its end is
        then dropped. Otherwise it is text, so that no text is lost.
        """
        ...


def merged(parts: Sequence[Part]) -> list[Part]:
    """Join adjacent parts of the same type and call."""
    joined: list[Part] = []
    for _, run in itertools.groupby(parts, key=lambda part: (type(part), getattr(part, "index", None))):
        first, *others = run
        if others and not isinstance(first, ToolCall):
            first = replace(first, text="".join(getattr(part, "text", "") for part in (first, *others)))
        joined.append(first)
    return joined


class PlainReader:
    """Emits all text as text for the user."""

    def push(self, text: str) -> Sequence[Part]:
        return (AnswerText(text),) if text else ()

    def flush(self, cut: bool = False) -> Sequence[Part]:
        return ()
