"""
What a request costs, in tokens: those of all its prompts, and those of all its choices.

Queue, fair share, quotas, demand and usage count by this. A request with `n` and several prompts is as many
answers at once, of which each may reach the limit of the request.
"""

from __future__ import annotations

import math

import msgspec

from baton_router.cache.prompt_chunks import BYTES_PER_TOKEN

ANSWER_WEIGHT = 3.0
"""Cost of an answer token against a prompt token, for fair share."""


class RequestCost(msgspec.Struct, frozen=True):
    """The numbers of a request that decide its cost."""

    prompts: int = 1
    other_bytes: int = 0
    """Of its prompts but the first one, which alone decides where it goes."""
    choices: int = 1
    """Answers that it asks for; 0 if it generates nothing."""
    answer_limit: int | None = None
    """The most tokens of each choice; None if the request does not say."""

    def others(self, bytes_per_token: float = BYTES_PER_TOKEN) -> int:
        """Tokens of its prompts but the first one."""
        return math.ceil(self.other_bytes / bytes_per_token)

    def answer_tokens(self, usual: float) -> float:
        """Expected tokens of all choices; `usual` are those of an answer."""
        return self.choices * (usual if self.answer_limit is None else min(self.answer_limit, usual))

    def most_answer_tokens(self, usual: float, steps: float = 0.0) -> int:
        """
        The most tokens that all choices can have: what is charged for an answer that nobody has counted.

        Without a limit, a choice has the `usual` number, or one for each of the worker's `steps` meanwhile.
        """
        each = max(usual, steps) if self.answer_limit is None else self.answer_limit
        return self.choices * math.ceil(each)

    def fair_share(self, prompt_tokens: float, usual: float) -> float:
        """The charge to the tenant's share; `prompt_tokens` are those to compute."""
        return prompt_tokens + ANSWER_WEIGHT * self.answer_tokens(usual)


ONE_ANSWER = RequestCost()
"""One prompt and one answer, without a limit."""
