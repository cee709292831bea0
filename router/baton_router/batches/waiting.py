"""
The lines of a batch that wait to be sent: new ones in their order, failed ones at their time, and set aside.

Pure: times are passed in. A line that was there when workers were lost goes alone, once all others are
through, so that it takes nobody with it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from baton_router.batches.retrying import Tries
from baton_router.batches.wire import Line

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
        self._alone: deque[Pending] = deque()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._new) + len(self._later) + len(self._alone)

    @property
    def new(self) -> int:
        """Lines that were not sent yet."""
        return len(self._new)

    def add(self, lines: Iterable[Line], last: bool) -> None:
        """The next ones of the input; with `last` they are all."""
        self._new.extend(Pending(line) for line in lines)
        self.whole = last

    def again(self, pending: Pending, at: float) -> None:
        """To be sent once more, not before that time."""
        heapq.heappush(self._later, (at, next(self._numbers), pending))

    def next(self, now: float, under_way: int) -> Pending | None:
        """The line to send now beside so many others; None if there is none."""
        while self._later and self._later[0][0] <= now:
            pending = heapq.heappop(self._later)[2]
            if not pending.tries.alone:
                return pending
            self._alone.append(pending)
        if self._new:
            return self._new.popleft()
        if self._alone and self.whole and not self._later and not under_way:
            return self._alone.popleft()
        return None

    def due(self) -> float | None:
        """When there is something to send again; None if that is not a matter of time."""
        return self._later[0][0] if self._later else None
