"""
Whether what became of its requests speaks against a new generation of workers: a pure decision.

A few that went wrong say nothing, and neither does what goes wrong as often on the generation before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton_operator.kinds.service_policies import Rollout

FAILURES = 5
"""Requests that must have failed on a new generation, or been slow, before their share says anything."""

SLOW_PERCENT = 5
"""Streams that may be slow."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of the requests that a generation was lately given, whoever answered them in the end."""

    requests: int = 0
    failed: int = 0
    begun: Mapping[float, int] = field(default_factory=dict)
    """Streams whose first token came within so many seconds, for some numbers of seconds; all by infinity."""

    @property
    def failing(self) -> float:
        """The share of them that failed, from 0 to 1."""
        return self.failed / self.requests if self.requests else 0.0

    @property
    def streams(self) -> int:
        """Those of which the first token came."""
        return self.begun.get(math.inf, 0)

    def slow(self, limit_s: float) -> int:
        """Streams that surely took longer: than the next number from the limit on that was counted by."""
        within = min((bound for bound in self.begun if bound >= limit_s), default=math.inf)
        return self.streams - self.begun.get(within, 0)

    def slowing(self, limit_s: float) -> float:
        """The share of them, from 0 to 1."""
        return self.slow(limit_s) / self.streams if self.streams else 0.0


def fault(policy: Rollout, new: Tried, old: Sequence[Tried]) -> str:
    """
    What speaks against a new generation, of what became of its requests; empty if nothing does.

    What is as bad on one of the old ones is not the new one's fault.
    """
    least = min((one.failing for one in old), default=0.0)
    if new.failed >= FAILURES and 100 * new.failing > policy.max_failed_percent and new.failing > least:
        return f"{new.failed} of {new.requests} requests failed on it"
    limit_s = policy.max_ttft_s
    if limit_s is None:
        return ""
    slow, share = new.slow(limit_s), new.slowing(limit_s)
    least = min((one.slowing(limit_s) for one in old), default=0.0)
    if slow >= FAILURES and 100 * share > SLOW_PERCENT and share > least:
        within = f"longer than {policy.max_ttft} to their first token"
        return f"{slow} of {new.streams} streams took {within} on it"
    return ""
