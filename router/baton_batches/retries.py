"""
Retries of failed lines: again, again alone, or recorded as an error.

Pure. A refusal for lack of room counts against nobody, and neither does a router that is away: the line waits
for as long as the batch may take. An error of the service is tried again: a few times while others are
answered, for a quarter of an hour while nobody is, because then it is not the line.

A line whose worker was lost may have ended that worker, or may only have been beside the line that did. After
a few losses it is therefore a suspect: suspects are sent in smaller and smaller groups, so that one harmful
line is found among hundreds in a few rounds. A line that loses workers when it is alone is given up.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, replace

from baton_api.errors import PoisonRequest, TransferFailed, WorkerLost

FAULTS = 5
"""Errors of the service after which the last of them is the line's answer."""

OUTAGES = 30
"""The same for errors since the one before which nobody at all was answered."""

TIMEOUTS = 3
"""Times that a line may take too long."""

LOSSES = 2
"""Losses of workers or connections after which a line is a suspect."""

GROUPS = (64, 8, 1, 1)
"""Suspects under way at once, nothing else beside them: after `LOSSES` losses, after one more, and so on. A
line that is lost in the last of them is given up."""

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0

TOO_MANY_REQUESTS, UNAVAILABLE = 429, 503
UNAUTHORIZED = 401
RETRY_STATUSES = frozenset({408, 499})
SERVER_ERRORS = 500

WORKER_LOST_CODES = frozenset({WorkerLost.code, TransferFailed.code})
"""Error codes of a 503 whose request had reached a worker that was lost, or that lost its partner."""


class TryOutcome(enum.Enum):
    """How a try ended."""

    ANSWERED = "answered"
    """With what the same line would be answered again."""
    BUSY = "busy"
    FAULT = "fault"
    OUTAGE = "outage"
    """A fault that others have as well, or that is not the line's."""
    LOST = "lost"
    """The worker, or the connection while the answer was awaited."""
    SLOW = "slow"
    AWAY = "away"
    """The router could not be reached."""


@dataclass(frozen=True, slots=True)
class LineTries:
    """What one line has been through, in this runner."""

    faults: int = 0
    outages: int = 0
    timeouts: int = 0
    losses: int = 0
    refusals: int = 0

    @property
    def group(self) -> int:
        """Most lines under way at once, this one among them, while it is tried; 0: no limit."""
        if self.losses < LOSSES:
            return 0
        return GROUPS[min(self.losses - LOSSES, len(GROUPS) - 1)]

    @property
    def failures(self) -> int:
        return self.faults + self.outages + self.timeouts + self.losses

    def after(self, outcome: TryOutcome) -> LineTries:
        match outcome:
            case TryOutcome.FAULT:
                return replace(self, faults=self.faults + 1)
            case TryOutcome.OUTAGE:
                return replace(self, outages=self.outages + 1)
            case TryOutcome.SLOW:
                return replace(self, timeouts=self.timeouts + 1)
            case TryOutcome.LOST:
                return replace(self, losses=self.losses + 1)
            case TryOutcome.BUSY | TryOutcome.AWAY:
                return replace(self, refusals=self.refusals + 1)
            case _:
                return self

    @property
    def exhausted(self) -> bool:
        """Whether it is not to be sent again."""
        return (
            self.faults >= FAULTS
            or self.outages >= OUTAGES
            or self.timeouts >= TIMEOUTS
            or self.losses >= LOSSES + len(GROUPS)
        )


def outcome_of(status: int, code: str | None) -> TryOutcome:
    """What an answer over HTTP means; `code` is that of its error."""
    if status == UNAVAILABLE and code in WORKER_LOST_CODES:
        return TryOutcome.LOST
    if status in (TOO_MANY_REQUESTS, UNAVAILABLE):
        return TryOutcome.BUSY
    if code == PoisonRequest.code:
        return TryOutcome.ANSWERED  # the router saw more workers die of it than a runner would try
    if status == UNAUTHORIZED:  # the runner's token, which is renewed, or a worker's key: never the line
        return TryOutcome.OUTAGE
    if status in RETRY_STATUSES or status >= SERVER_ERRORS:
        return TryOutcome.FAULT
    return TryOutcome.ANSWERED


def backoff_s(tries: int, rng: random.Random) -> float:
    """Seconds until the next try after so many: twice as long each time, and for everybody another."""
    longest = float(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(tries, 16)))
    return rng.uniform(longest / 2, longest)
