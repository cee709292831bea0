"""
What services are held to, and how fast they may use up what is allowed to go wrong.

These are the objectives of services that no operator tells of; of others they are those of their spec
(`spec.autoscaling.slo`). The bounds are those of histograms' buckets: what lies between two of them is only
guessed at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Objective:
    """A share of requests that has to be well, over thirty days."""

    share: float

    @property
    def budget(self) -> float:
        """The share that may not be."""
        return 1 - self.share


AVAILABLE = Objective(0.999)
"""Of requests, those that neither failed nor were cut off; what clients did wrong does not count."""

STREAMS = Objective(0.95)
"""Of streams, those whose first byte came in time, and those whose tokens did, in the mean over each."""

FIRST_TOKEN_S = 2.5
TOKEN_S = 0.05


@dataclass(frozen=True, slots=True)
class Burn:
    """The budget of thirty days is used up `times` faster than it may be, over both windows."""

    times: float
    long: str
    short: str
    """So that the alert ends soon after the trouble has."""
    severity: Literal["page", "ticket"]


BURNS = (Burn(14.4, "1h", "5m", "page"), Burn(6, "6h", "30m", "ticket"))
"""2 % of the budget in an hour; 5 % in six: https://sre.google/workbook/alerting-on-slos/."""

MOST = 0.9
"""A share of streams that are late at which the budget is used up too fast, however large it is."""

LEAST_REQUESTS = 20
"""Within the long window: of fewer, a share says nothing."""

LEAST_FAILURES = 4
"""Within the long window, so that a few failures in a quiet night wake nobody."""
