"""
Parts of an answer: reasoning, text, and tool calls.

A `Reader` gets one choice's text as it comes and tells its parts as early as they are certain. It is a
state machine over text alone, so that the whole text at once and its single characters give the same
parts, joined.
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
    """A piece of what is said to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The beginning of a call: its arguments follow."""

    index: int
    """0 for the choice's first call."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments of the call with this index: of JSON text, or of a custom tool's input."""

    index: int
    text: str


Part = Thought | AnswerText | ToolCall | Arguments


class Reader(Protocol):
    """One choice's text in, its parts out; text that may turn out to be a marker is held back."""

    def push(self, text: str) -> Sequence[Part]: ...

    def flush(self) -> Sequence[Part]:
        """The answer is over: what was held back. A call that is cut in the middle keeps what it has."""
        ...


def merged(parts: Sequence[Part]) -> list[Part]:
    """Neighbours that continue one another as one."""
    whole: list[Part] = []
    for _, run in itertools.groupby(parts, key=lambda part: (type(part), getattr(part, "index", None))):
        first, *others = run
        if others and not isinstance(first, ToolCall):
            first = replace(first, text="".join(getattr(part, "text", "") for part in (first, *others)))
        whole.append(first)
    return whole


class PlainReader:
    """All is said to the user."""

    def push(self, text: str) -> Sequence[Part]:
        return (AnswerText(text),) if text else ()

    def flush(self) -> Sequence[Part]:
        return ()
