"""One choice of a request, and how an endpoint writes it: as events, or as one object at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from baton_engine.api.streaming import Usage
from baton_engine.api.transcript import Piece, Transcript
from baton_engine.client import Generation
from baton_engine.requests import PromptLogprobs, Request


class AnswerShape(Protocol):
    """Made for one request; it may remember what it has written. Of a request, only one way is asked for."""

    @property
    def id(self) -> str:
        """Of the answer: `chatcmpl-...`."""
        ...

    def events(self, choice: Choice, piece: Piece, usage: Callable[[], Usage]) -> bytes:
        """The events for what `choice` gained, in order of arrival; maybe none."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """The events after the last choice has ended."""
        ...

    def answer(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> Any:
        """
        The whole answer as JSON takes it, in order of the choices' index.

        Each piece is all that its choice gained.
        """
        ...


@runtime_checkable
class Resumable(Protocol):
    """A shape whose answer depends on nothing but the request, the tokens and these two."""

    @property
    def id(self) -> str: ...

    @property
    def created(self) -> int:
        """Seconds since 1970."""
        ...

    def resume(self, answer: str, created: int) -> None:
        """Write a later part of the answer with this id and time. Called before any event."""
        ...


@dataclass(slots=True)
class Choice:
    """Position `index` of the answer's choices."""

    index: int
    prompt: int
    """Number of its prompt."""
    request: Request
    transcript: Transcript
    followers: list[Choice]
    """The other choices of its prompt, until they were submitted."""
    outputs: Generation | None = None
    scores: PromptLogprobs | None = None
    """Of its prompt, where they were asked for; there before its first piece."""
    cached_tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None

    @property
    def decode_s(self) -> float:
        """Seconds from its first token to the last one so far."""
        return (self.last_token or 0.0) - (self.first_token or 0.0)
