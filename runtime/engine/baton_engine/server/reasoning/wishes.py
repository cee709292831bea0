"""What a request has to say about thoughts: apart from the answer, streamed, shown at all, and how long."""

from __future__ import annotations

from dataclasses import dataclass

from baton_api import limits
from baton_engine.server.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    apart: bool
    """SGLang's `separate_reasoning`: not in the answer's text."""
    streamed: bool
    """SGLang's `stream_reasoning`: as they come, and not at their end all at once."""
    included: bool
    """vLLM's `include_reasoning`: at all, if they are apart."""
    budget: int | None
    """vLLM's `thinking_token_budget`: most tokens of thought; None is any number."""


def read_wishes(fields: Fields) -> Wishes:
    budget = fields.integer("thinking_token_budget", *limits.THINKING_BUDGET.range)
    return Wishes(
        apart=fields.boolean("separate_reasoning", True),
        streamed=fields.boolean("stream_reasoning", True),
        included=fields.boolean("include_reasoning", True),
        budget=None if budget == -1 else budget,
    )
