"""
What the passes of one request took: its first chunk, and the rest of them summed up.

The engine's thread writes while the request runs; whoever asked for it reads once it has ended. Times are by
the engine's clock. Nobody pays for it but requests that are traced.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Passes:
    """Some passes, one after another."""

    count: int = 0
    began: float = 0.0
    ended: float = 0.0
    forward_s: float = 0.0
    """Seconds of forward passes, all that shared them included; the rest of the time others had turns."""
    tokens: int = 0
    """Of this request, that were computed."""

    def add(self, began: float, forward_s: float, tokens: int) -> None:
        self.began = self.began or began
        self.ended = began + forward_s
        self.forward_s += forward_s
        self.count += 1
        self.tokens += tokens


@dataclass(slots=True)
class PassNotes:
    """One request's."""

    arrived: float = 0.0
    first_chunk: Passes = field(default_factory=Passes)
    prompt: Passes = field(default_factory=Passes)
    """Of the prompt, the first chunk included."""
    decode: Passes = field(default_factory=Passes)
    """Of one token each."""

    def passed(self, ended: float, forward_s: float, tokens: int, *, generates: bool) -> None:
        """A pass that has just ended computed so many tokens of it; `generates` if the last one was drawn."""
        began = ended - forward_s
        if generates:
            self.decode.add(began, forward_s, tokens)
            return
        if not self.prompt.count:
            self.first_chunk.add(began, forward_s, tokens)
        self.prompt.add(began, forward_s, tokens)
