"""
The two queues of a runner: lines that wait to be sent, and results that wait to be recorded.

`PendingLines` is pure; times are passed in. New lines go in their order, failed lines when their wait is
over. A suspect, a line that was in flight during several worker losses, is sent after all other lines, in
groups limited by `retries`. While a group is in flight, no other line is sent.

`ResultOutbox` posts results in groups, one post at a time; results that arrive meanwhile form the next group.
A group without a reply is posted again; the ledger keeps the first result of each line, so a repeated post
changes nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from baton_batches.retries import LineAttempts
from baton_batches.values import LineResult
from baton_batches.wire import InputLine, ResultReceipt

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
        self.whole = False
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
        self.whole = last

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
        if not under_way and not self._later and (self.whole or full):
            self._group = max((size for size, lines in self._suspects.items() if lines), default=0)
        if under_way < self._group and (group := self._suspects[self._group]):
            return group.popleft()
        return None

    def due(self) -> float | None:
        """When the next failed line can be sent; None if none waits."""
        return self._later[0][0] if self._later else None


GROUP_RESULTS = 256
GROUP_BYTES = 1024 * 1024
GROUP_S = 0.2
"""A group is posted when it has this many results or bytes, or its first result has waited this long."""

POST_RESULTS = 2048
"""Maximum results of a group. Results that arrive during a post make the next group larger, because each
group waits for one commit to disk."""

FULL_RESULTS = 4096
FULL_BYTES = 32 * 1024 * 1024
"""Limits above which no more lines are sent: the ledger is slow or away."""


class ResultOutbox:
    """Results that are not yet in the ledger."""

    def __init__(self, post: Callable[[list[LineResult]], Awaitable[ResultReceipt]]) -> None:
        self._post = post
        self._results: list[LineResult] = []
        self._bytes = 0
        self._hurried = False
        self._news = asyncio.Event()
        self._gone = asyncio.Event()
        self._gone.set()

    @property
    def empty(self) -> bool:
        return not self._results

    @property
    def full(self) -> bool:
        return len(self._results) >= FULL_RESULTS or self._bytes >= FULL_BYTES

    def put(self, result: LineResult) -> None:
        self._results.append(result)
        self._bytes += len(result.body)
        self._gone.clear()
        self._news.set()

    async def emptied(self) -> None:
        """Post all results at once, and return when they are in the ledger."""
        self._hurried = True
        self._news.set()
        await self._gone.wait()

    async def run(self, posted: Callable[[ResultReceipt], None]) -> None:
        """Post results until cancelled; `posted` is called for each group."""
        while True:
            if not self._results:
                self._news.clear()
                await self._news.wait()
            await self._gathered()
            group = self._group()
            receipt = await self._post(group)
            del self._results[: len(group)]
            self._bytes -= sum(len(result.body) for result in group)
            if not self._results:
                self._gone.set()
            posted(receipt)

    async def _gathered(self) -> None:
        """Wait until a group is complete or has waited long enough."""
        loop = asyncio.get_running_loop()
        until = loop.time() + GROUP_S
        while not self._hurried and len(self._results) < GROUP_RESULTS and self._bytes < GROUP_BYTES:
            self._news.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._news.wait()
            except TimeoutError:
                return

    def _group(self) -> list[LineResult]:
        size = 0
        for number, result in enumerate(self._results[:POST_RESULTS]):
            size += len(result.body)
            if size > GROUP_BYTES and number:
                return self._results[:number]
        return self._results[:POST_RESULTS]
