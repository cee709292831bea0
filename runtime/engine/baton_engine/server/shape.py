"""How one endpoint writes an answer: as events while it comes, or as one object at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from baton_engine.server.choice import Choice
from baton_engine.server.transcript import Piece
from baton_engine.server.usage import Usage


class Shape(Protocol):
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
