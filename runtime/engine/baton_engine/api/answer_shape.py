"""Response format of an endpoint: events of a stream, or one object; and the state of one choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from baton_engine.api.streaming import Usage
from baton_engine.api.transcript import Piece, Transcript
from baton_engine.client import Generation
from baton_engine.requests import PromptLogprobs, Request, TierTokens


class AnswerShape(Protocol):
    """
    Format of one response. May keep state between events.

    A response is either a stream (`events`, then `closing`) or one object (`answer`).
    """

    @property
    def id(self) -> str:
        """Id of the response, such as `chatcmpl-...`."""
        ...

    def events(self, choice: Choice, piece: Piece, usage: Callable[[], Usage]) -> bytes:
        """Return the events for a new piece of `choice`; may be empty."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """Return the events after the end of the last choice."""
        ...

    def answer(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> Any:
        """
        Return the whole response as a JSON value.

        `choices` are in order of their index, each with one piece that contains its whole output.
        """
        ...


@runtime_checkable
class Resumable(Protocol):
    """A shape whose response depends only on the request, the tokens, its id and its creation time."""

    @property
    def id(self) -> str: ...

    @property
    def created(self) -> int:
        """Seconds since 1970."""
        ...

    def resume(self, answer: str, created: int) -> None:
        """Continue the response with this id and time. Call it before any event."""
        ...


@dataclass(slots=True)
class Choice:
    index: int
    prompt: int
    """Index of its prompt."""
    request: Request
    transcript: Transcript
    followers: list[Choice]
    """The other choices of the prompt until they are submitted."""
    outputs: Generation | None = None
    scores: PromptLogprobs | None = None
    """Logprobs of the prompt, if requested. Set before the first piece."""
    cached_tokens: int = 0
    peer_tokens: int = 0
    """Those of them that were read from the cache of another worker."""
    tier_tokens: TierTokens = ()
    """Those of them that were restored, by tier."""
    first_token: float | None = None
    last_token: float | None = None

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the latest one."""
        return (self.last_token or 0.0) - (self.first_token or 0.0)
