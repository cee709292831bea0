"""
Tenants' quotas as requests meet them: reserved when one is admitted, settled once when it ends.

What a request will use is guessed: the prompt by its bytes, the answer by what answers usually have, or by
what it asks for if that is less. A request that goes on elsewhere was admitted before: it reserves again what
the first worker's end gave back, and is not asked whether it may.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from baton_api.errors import RateLimited
from baton_router.asks import Ask
from baton_router.buckets import Quota
from baton_router.knowledge import BYTES_PER_TOKEN


@dataclass(slots=True)
class Reservation:
    """What one request may use. It is cancelled or settled, once."""

    quota: Quota
    prompt: int
    answer: int
    anew: bool
    """Whether it was admitted here, and had not been before."""

    def cancel(self, now: float) -> None:
        """It was refused for another reason."""
        if self.anew:
            self.quota.cancel(self.prompt + self.answer, now)
        else:
            self.quota.settle(self.prompt + self.answer, 0, now)

    def settle(self, prompt: int, answer: int | None, now: float) -> None:
        """It has ended. `answer` is None if nobody has counted its tokens."""
        used = prompt + (self.answer if answer is None else answer)
        self.quota.settle(self.prompt + self.answer, used, now)


class Quotas:
    """Of all tenants that have limits."""

    def __init__(self, rejects: Counter[str], answer_tokens: Callable[[], float]) -> None:
        """Refusals are counted in `rejects`. `answer_tokens` says how many answers usually have."""
        self._rejects = rejects
        self._answer_tokens = answer_tokens
        self._quotas: dict[str, Quota] = {}

    def open(self, tenant: str) -> int:
        """How many requests of a tenant are admitted and have not ended."""
        quota = self._quotas.get(tenant)
        return quota.open if quota else 0

    def reserve(self, ask: Ask, now: float) -> Reservation:
        """Raises RateLimited."""
        assert ask.limits is not None
        quota = self._quotas.get(ask.tenant)
        if quota is None:
            quota = self._quotas[ask.tenant] = Quota(ask.limits, now)
        elif quota.limits != ask.limits:
            quota.limited(ask.limits, now)
        prompt = math.ceil(ask.prompt.bytes / BYTES_PER_TOKEN)
        expected = math.ceil(self._answer_tokens())
        answer = expected if ask.answer_tokens is None else min(expected, ask.answer_tokens)
        if ask.again:
            quota.reopen(prompt + answer, now)
        elif refusal := quota.admit(prompt + answer, now):
            self._rejects[refusal.limit] += 1
            raise RateLimited(refusal.limit, refusal.most, math.ceil(refusal.wait_s))
        return Reservation(quota, prompt, answer, not ask.again)
