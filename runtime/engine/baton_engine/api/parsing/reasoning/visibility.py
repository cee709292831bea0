"""Options of a request for reasoning: separate from the answer, streamed, hidden, and its maximum length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton_api import limits
from baton_engine.api.fields import Fields
from baton_engine.api.parsing.parts import Part, Reader, Thought
from baton_engine.api.parsing.reasoning.formats import Thinker


class Showing:
    """Passes on the parts of another reader, with the reasoning joined into one part or omitted."""

    def __init__(self, inner: Reader, *, left_out: bool) -> None:
        self._inner = inner
        self._thinker = inner if isinstance(inner, Thinker) else None
        self._left_out = left_out
        self._thought: list[str] = []

    @property
    def thinking(self) -> bool:
        return self._thinker is not None and self._thinker.thinking

    def push(self, text: str) -> Sequence[Part]:
        return self._shown(self._inner.push(text))

    def flush(self, cut: bool = False) -> Sequence[Part]:
        return [*self._shown(self._inner.flush(cut)), *self._parts()]

    def _shown(self, parts: Sequence[Part]) -> Sequence[Part]:
        shown: list[Part] = []
        for part in parts:
            if not isinstance(part, Thought):
                shown += self._parts()
                shown.append(part)
            elif not self._left_out:
                self._thought.append(part.text)
        return shown

    def _parts(self) -> Sequence[Part]:
        whole = "".join(self._thought)
        self._thought.clear()
        return [Thought(whole)] if whole else []


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions:
    apart: bool
    """SGLang's `separate_reasoning`: whether the answer's text excludes the reasoning."""
    streamed: bool
    """SGLang's `stream_reasoning`: whether reasoning is streamed, or sent in one piece at its end."""
    included: bool
    """vLLM's `include_reasoning`: whether separate reasoning is part of the response."""
    budget: int | None
    """vLLM's `thinking_token_budget`: maximum tokens of reasoning. None: no limit."""


def read_options(fields: Fields) -> ReasoningOptions:
    budget = fields.integer("thinking_token_budget", *limits.THINKING_BUDGET.range)
    return ReasoningOptions(
        apart=fields.boolean("separate_reasoning", True),
        streamed=fields.boolean("stream_reasoning", True),
        included=fields.boolean("include_reasoning", True),
        budget=None if budget == -1 else budget,
    )
