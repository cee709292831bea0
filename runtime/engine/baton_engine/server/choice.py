"""One answer to one prompt, from its request to the engine to its last token."""

from __future__ import annotations

from dataclasses import dataclass

from baton_engine.client import Generation
from baton_engine.requests import PromptLogprobs, Request
from baton_engine.server.transcript import Transcript


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
