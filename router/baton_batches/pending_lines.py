"""
The lines of a batch that wait to be sent: new lines in their order, failed lines at their time, and suspects.

Pure: times are passed in. A suspect, a line that was under way at several losses of workers, is sent once
all other lines are through, in groups as `retrying` bounds them. While a group is under way, nothing else is
sent.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from baton_batches.retries import Tries
from baton_batches.wire import Line

UNTRIED = Tries()


@dataclass(frozen=True, slots=True)
class Pending:
    """A line, and what it has been through."""

    line: Line
    tries: Tries = UNTRIED
    failed_at: float = -math.inf
    """When the last try came back."""


class Waiting:
    """What a runner holds of its batch's lines besides those under way."""

    def __init__(self) -> None:
        self.whole = False
        """Whether the batch's last line has come."""
        self._new: deque[Pending] = deque()
        self._later: list[tuple[float, int, Pending]] = []
        self._suspects: defaultdict[int, deque[Pending]] = defaultdict(deque)
        """By the size of the group that each may be sent in."""
        self._group = 0
        """The size of the group that is under way; 0 if the lines under way are not suspects."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._new) + len(self._later) + sum(map(len, self._suspects.values()))

    @property
    def new(self) -> int:
        """Lines that can be sent now and are no suspects."""
        return len(self._new)

    def add(self, lines: Iterable[Line], last: bool) -> None:
        """The next ones of the input; with `last` they are all."""
        self._new.extend(Pending(line) for line in lines)
        self.whole = last

    def again(self, pending: Pending, at: float) -> None:
        """To be sent once more, not before that time."""
        heapq.heappush(self._later, (at, next(self._numbers), pending))

    def next(self, now: float, under_way: int, full: bool = False) -> Pending | None:
        """
        The line to send now beside so many others; None if there is none.

        With `full` no more lines come before some of these are through.
        """
        while self._later and self._later[0][0] <= now:
            pending = heapq.heappop(self._later)[2]
            if pending.tries.group:
                self._suspects[pending.tries.group].append(pending)
            else:
                self._new.appendleft(pending)
        if not under_way:
            self._group = 0
        if self._new and not self._group:
            return self._new.popleft()
        if not under_way and not self._later and (self.whole or full):
            self._group = max((size for size, lines in self._suspects.items() if lines), default=0)
        if under_way < self._group and (group := self._suspects[self._group]):
            return group.popleft()
        return None

    def due(self) -> float | None:
        """When there is something to send again; None if that is not a matter of time."""
        return self._later[0][0] if self._later else None
