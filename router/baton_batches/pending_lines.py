"""
Which line of a batch is sent next.

New lines are sent in their order, and failed lines when their wait is over. A suspect, a line that was in
flight during several worker losses, is sent after all other lines, in groups limited by `retries`. While a
group is in flight, no other line is sent. Pure: times are passed in.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from baton_batches.retries import LineAttempts
from baton_batches.wire import InputLine

NO_ATTEMPTS = LineAttempts()


@dataclass(frozen=True, slots=True)
class PendingLine:
    """A line and its failed attempts."""

    line: InputLine
    attempts: LineAttempts = NO_ATTEMPTS
    failed_at: float = -math.inf
    """When the last attempt failed."""


class PendingLines:
    """A runner's lines that are not in flight."""

    def __init__(self) -> None:
        self.complete = False
        """Whether the last line of the batch has been fetched."""
        self._new: deque[PendingLine] = deque()
        self._later: list[tuple[float, int, PendingLine]] = []
        self._suspects: defaultdict[int, deque[PendingLine]] = defaultdict(deque)
        """By the group size that each may be sent in."""
        self._group = 0
        """Size of the group in flight; 0 if lines in flight are not suspects."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._new) + len(self._later) + sum(map(len, self._suspects.values()))

    @property
    def only_suspects(self) -> bool:
        """Whether there are suspects and no other lines."""
        waiting = [pending for _, _, pending in self._later]
        return not self._new and len(self) > 0 and all(pending.attempts.group for pending in waiting)

    def forget(self) -> None:
        """Drop all lines."""
        self._new.clear()
        self._later.clear()
        self._suspects.clear()

    @property
    def new(self) -> int:
        """Lines that can be sent now and are not suspects."""
        return len(self._new)

    def add(self, lines: Iterable[InputLine], last: bool) -> None:
        """Add the next lines of the input; `last` if they complete it."""
        self._new.extend(PendingLine(line) for line in lines)
        self.complete = last

    def again(self, pending: PendingLine, at: float) -> None:
        """Send a line again at `at` or later."""
        heapq.heappush(self._later, (at, next(self._numbers), pending))

    def next(self, now: float, under_way: int, full: bool = False) -> PendingLine | None:
        """
        The next line to send beside `under_way` others, or None.

        `full`: no more lines are fetched before some of these are done.
        """
        while self._later and self._later[0][0] <= now:
            pending = heapq.heappop(self._later)[2]
            if pending.attempts.group:
                self._suspects[pending.attempts.group].append(pending)
            else:
                self._new.appendleft(pending)
        if not under_way:
            self._group = 0
        if self._new and not self._group:
            return self._new.popleft()
        if not under_way and not self._later and (self.complete or full):
            self._group = max((size for size, lines in self._suspects.items() if lines), default=0)
        if under_way < self._group and (group := self._suspects[self._group]):
            return group.popleft()
        return None

    def due(self) -> float | None:
        """When the next failed line can be sent; None if none waits."""
        return self._later[0][0] if self._later else None
