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
    last_token: float | None = None
