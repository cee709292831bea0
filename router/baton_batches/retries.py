"""
Retries of failed lines: send again, send again alone, or record an error.

Pure. Rejections for lack of capacity and an unreachable router do not count: the line waits for as long as
the batch may take. A line with a server error is sent again. It gets a few attempts while other lines are
answered, and a quarter of an hour while no line is, because then the line is not the cause.

A line whose worker was lost may have crashed that worker, or may only have been in flight beside the line
that did. After a few losses it is therefore a suspect. Suspects are sent in smaller and smaller groups, so
that one harmful line is found among hundreds in a few rounds. A line that loses workers when it is alone is
given up.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, replace

from baton_api.errors import PoisonRequest, TransferFailed, WorkerLost

FAULTS = 5
"""Server errors of a line, after which its last error is recorded as its result."""


OUTAGES = 30
"""The same for errors during an outage, when no other line was answered either."""


TIMEOUTS = 3
"""Timeouts after which a line fails."""


LOSSES = 2
"""Losses of workers or connections after which a line is a suspect."""


GROUPS = (64, 8, 1, 1)
"""Maximum suspects in flight, without other lines: after `LOSSES` losses, after one more, and so on. A line
that is lost in the last of them is given up."""


FIRST_WAIT_S = 0.5


LONGEST_WAIT_S = 30.0


TOO_MANY_REQUESTS, UNAVAILABLE = 429, 503


UNAUTHORIZED = 401


RETRY_STATUSES = frozenset({408, 499})


SERVER_ERRORS = 500


WORKER_LOST_CODES = frozenset({WorkerLost.code, TransferFailed.code})
"""Error codes of a 503 whose request had reached a worker that was lost, or that lost its partner."""


class AttemptOutcome(enum.Enum):
    """The outcome of one attempt at a line."""

    ANSWERED = "answered"
    """With a final answer: another attempt would get the same."""
    BUSY = "busy"
    FAULT = "fault"
    OUTAGE = "outage"
    """A failure that the line did not cause."""
    LOST = "lost"
    """The worker, or the connection while the answer was awaited."""
    SLOW = "slow"
    AWAY = "away"
    """The router could not be reached."""


@dataclass(frozen=True, slots=True)
class LineAttempts:
    """The failed attempts at one line, by this runner."""

    faults: int = 0
    outages: int = 0
    timeouts: int = 0
    losses: int = 0
    refusals: int = 0

    @property
    def group(self) -> int:
        """Maximum lines in flight together with this one; 0: no limit."""
        if self.losses < LOSSES:
            return 0
        return GROUPS[min(self.losses - LOSSES, len(GROUPS) - 1)]

    @property
    def failures(self) -> int:
        return self.faults + self.outages + self.timeouts + self.losses

    def after(self, outcome: AttemptOutcome) -> LineAttempts:
        match outcome:
            case AttemptOutcome.FAULT:
                return replace(self, faults=self.faults + 1)
            case AttemptOutcome.OUTAGE:
                return replace(self, outages=self.outages + 1)
            case AttemptOutcome.SLOW:
                return replace(self, timeouts=self.timeouts + 1)
            case AttemptOutcome.LOST:
                return replace(self, losses=self.losses + 1)
            case AttemptOutcome.BUSY | AttemptOutcome.AWAY:
                return replace(self, refusals=self.refusals + 1)
            case _:
                return self

    @property
    def exhausted(self) -> bool:
        """Whether the line must not be sent again."""
        return (
            self.faults >= FAULTS
            or self.outages >= OUTAGES
            or self.timeouts >= TIMEOUTS
            or self.losses >= LOSSES + len(GROUPS)
        )


def outcome_of(status: int, code: str | None) -> AttemptOutcome:
    """Classify an HTTP response; `code` is the code of its error."""
    if status == UNAVAILABLE and code in WORKER_LOST_CODES:
        return AttemptOutcome.LOST
    if status in (TOO_MANY_REQUESTS, UNAVAILABLE):
        return AttemptOutcome.BUSY
    if code == PoisonRequest.code:
        return AttemptOutcome.ANSWERED  # the router saw it crash more workers than a runner would use
    if status == UNAUTHORIZED:  # the runner's token, which is renewed, or a worker's key: never the line
        return AttemptOutcome.OUTAGE
    if status in RETRY_STATUSES or status >= SERVER_ERRORS:
        return AttemptOutcome.FAULT
    return AttemptOutcome.ANSWERED


def backoff_s(attempts: int, rng: random.Random) -> float:
    """Return the seconds until the next attempt: doubled each time, and random per line."""
    longest = float(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(attempts, 16)))
    return rng.uniform(longest / 2, longest)
