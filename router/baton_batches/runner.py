"""
The batch runner: sends the lines of one batch through the router and records their results.

It has no state of its own: it fetches lines slice by slice and posts results in groups. If it dies, another
runner continues from the ledger; lines in flight are sent again, and the first result of a line stays. So it
may be killed at any time, and its memory does not depend on the size of the batch.

**The window** is how many lines are in flight. A round is the time in which as many lines are answered as the
window is wide. Without rejections, the window doubles while that brings more lines per second, and then
widens by less. From then on, probes of a slightly wider and a slightly narrower window alternate. The window
stays where one more line brings a quarter of the gain of the first lines, because a wider one only makes
other requests wait.

A rejection (429, 503) halves the window and stops sending for the seconds of `Retry-After`. From there it
grows as TCP's window does: quickly to half of the rejected size, and then by a little per round.

**Queues.** `PendingLines` sends new lines in their order and failed lines when their wait is over. A suspect,
a line that was in flight during several worker losses, is sent after all other lines, in groups limited by
`retries`. While a group is in flight, no other line is sent.

`ResultOutbox` posts results in groups, one post at a time; results that arrive meanwhile form the next group.
A group without a reply is posted again; the ledger keeps the first result of each line, so a repeated post
changes nothing.

Window and queues are pure: times are passed in.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from baton_batches import values
from baton_batches.retries import (
    AttemptOutcome,
    LineAttempts,
    backoff_s,
)
from baton_batches.runner_gateway import LeaseLost, RunnerGateway, TokenRejected
from baton_batches.values import LineResult
from baton_batches.wire import InputLine, ResultReceipt, RunnerLease, RunnerOrder, RunnerProgress

FIRST = 32
MOST = 512

ROUND_S = 0.25
"""Seconds of the shortest round: fast answers make shorter ones too noisy."""

GAIN = 0.25
"""Of the lines per second that a wider window would bring if nothing limited it, what it must bring."""

WIDEST_STEP = 2.0
STEP = 1.25
"""Factors of the first and of the last probes; the excess over 1 is halved from one to the next."""

REST_ROUNDS = 8
"""Rounds between two probes, once a good width is found."""

SMOOTHING = 0.3
"""Weight of the last round in the rate of the current width."""


class SendWindow:
    """The window of one runner."""

    def __init__(self, now: float, first: int = FIRST, most: int = MOST) -> None:
        self.size = min(first, most)
        self.open_at = now
        """Time before which no line may be sent."""
        self._most = most
        self._began = now
        self._answered = 0
        self._cut_at = now
        self._served = True
        """Whether anything was answered since the last cut."""
        self._half = 0
        """Half of the rejected size; 0 before a rejection. After one, rejections bound the window."""
        self._kept: tuple[int, float] | None = None
        """The best width so far and its lines per second, with which probes are compared."""
        self._step = WIDEST_STEP
        self._narrower = False
        """Whether the next probe is narrower."""
        self._resting = 0
        self._doubted = False
        """Whether the probed width has failed once: it gets two rounds, because each one is noisy."""

    def bound(self, most: int) -> None:
        """Set the maximum width."""
        if most == self._most:
            return
        self._most = most
        self.size = min(self.size, most)
        self._kept = None
        self._step = WIDEST_STEP
        self._narrower = False
        self._doubted = False
        self._resting = 0

    def answered(self, now: float) -> None:
        """Count a response other than a rejection."""
        self._answered += 1
        self._served = True
        seconds = now - self._began
        if self._answered < self.size or seconds < ROUND_S:
            return
        self._turn(self._answered / seconds)
        self._began = now
        self._answered = 0

    def refused(self, sent: float, now: float, wait_s: float) -> None:
        """Count a rejection with `Retry-After: wait_s` of a line that was sent at `sent`."""
        self.pause(now, wait_s)
        if sent < self._cut_at:
            return  # it was sent before the last cut, which accounts for it
        if self._served:  # without any answer, the size was not the cause
            self._half = max(1, self.size // 2)
        self.size = max(1, self.size // 2)
        self._served = False
        self._cut_at = now
        self._began = now
        self._answered = 0

    def pause(self, now: float, wait_s: float) -> None:
        """Send nothing for so long."""
        self.open_at = max(self.open_at, now + wait_s)

    def _turn(self, rate: float) -> None:
        """Choose the width of the next round after one with `rate` lines per second."""
        if self._half:
            step = self.size if self.size < self._half else max(1, self.size // 16)
            self.size = min(self._most, self.size + step)
            return
        if self._kept is None:
            self._kept = (self.size, rate)
            self._try_another()
        elif self.size == self._kept[0]:
            before = self._kept[1]
            self._kept = (self.size, before + SMOOTHING * (rate - before))
            if self._resting:
                self._resting -= 1
            else:
                self._try_another()
        else:
            self._judge(rate, *self._kept)

    def _judge(self, rate: float, size: int, before: float) -> None:
        """Compare a probe's `rate` with that of `size`, which had `before` lines per second."""
        wanted = before * (1 + GAIN * (self.size / size - 1))
        if rate < wanted and not self._doubted:
            self._doubted = True
            return
        self._doubted = False
        settled = self._step <= STEP
        if rate >= wanted:
            self._kept = (self.size, rate)
        else:
            self.size = size
            if not settled:
                self._step = 1 + (self._step - 1) / 2
        if settled:
            self._resting = REST_ROUNDS
            self._narrower = not self._narrower
        else:
            self._try_another()

    def _try_another(self) -> None:
        """Probe another width in the next round."""
        if self._narrower:
            self.size = max(1, math.floor(self.size / self._step))
        else:
            self.size = min(self._most, math.ceil(self.size * self._step))
        if self._kept is not None and self.size == self._kept[0]:  # at the limit of this side
            self._narrower = not self._narrower
            self._resting = REST_ROUNDS


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


HEARTBEAT_S = 1.0
"""Maximum seconds between heartbeats, so that a cancellation is noticed soon."""

HELD_BYTES = 32 * 1024 * 1024
"""Bytes of waiting and in-flight lines above which no more are fetched."""

MAX_REJECTION_BACKOFF = 2
"""Rejections after which the backoff stops growing: a rejection is not the line's fault."""


class BatchRunner:
    """One run of one batch, from lease to end."""

    def __init__(
        self,
        batch: str,
        gateway: RunnerGateway,
        lease: RunnerLease,
        rng: random.Random,
        max_in_flight: int | None = None,
    ) -> None:
        """`max_in_flight`: maximum lines in flight, whatever the router allows."""
        self._batch = batch
        self._gateway = gateway
        self._lease = lease
        self._rng = rng
        self._clock = asyncio.get_running_loop().time
        self._max_in_flight = max_in_flight
        self._window = SendWindow(self._clock(), most=self._bounded(lease.window))
        self._waiting = PendingLines()
        self._outbox = ResultOutbox(gateway.record)
        self._answered_at = -math.inf
        """When a line last succeeded."""
        self._under_way: set[asyncio.Task[None]] = set()
        self._held = 0
        self._retried: Counter[str] = Counter()
        """Retried lines since the last heartbeat, by outcome."""
        self._sends = itertools.count()
        self._stopping = False
        self._to_send = asyncio.Event()
        self._to_fetch = asyncio.Event()
        """Set when something has changed."""

    def stop(self) -> None:
        """Send nothing more and cancel lines in flight; finished results are still posted."""
        self._stopping = True
        self._wake()

    async def run(self) -> None:
        """
        Return when every line has a result in the ledger, or after `stop`.

        Raises LeaseLost or TokenRejected.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                tasks = [
                    self._tasks.create_task(self._send_heartbeats()),
                    self._tasks.create_task(self._fetch()),
                    self._tasks.create_task(self._outbox.run(self._posted)),
                ]
                await self._send()
                for task in self._under_way:
                    task.cancel()
                await self._outbox.emptied()
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as group:
            for error in group.exceptions:
                if isinstance(error, LeaseLost | TokenRejected):
                    raise error from None
            raise

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(min(HEARTBEAT_S, self._lease.lease_s / 3))
            retried, self._retried = self._retried, Counter()
            renewal = await self._gateway.renew(RunnerProgress(dict(retried)))
            self._window.bound(self._bounded(renewal.window))
            self._obey(renewal.order)

    async def _fetch(self) -> None:
        cursor = ""
        while not self._waiting.whole:
            part = await self._gateway.lines(cursor)
            cursor = part.cursor
            self._held += sum(len(line.text) for line in part.lines)
            self._waiting.add(part.lines, part.last)
            self._to_send.set()
            if not part.lines and not part.last:
                await self._give_suspects_back()
            while self._waiting.new > self._window.size or self._held >= HELD_BYTES:
                await _wait_for(self._to_fetch)

    async def _give_suspects_back(self) -> None:
        """With only suspects, let one runner send those of all runners, while the others send nothing."""
        if not self._under_way and self._outbox.empty and self._waiting.only_suspects:
            await self._gateway.give_back()
            self._waiting.forget()
            self._held = 0

    async def _send(self) -> None:
        while not self._stopping and not (self._waiting.whole and not self._waiting and not self._under_way):
            now = self._clock()
            if len(self._under_way) >= self._window.size or self._outbox.full:
                await _wait_for(self._to_send)
            elif now < self._window.open_at:
                await _wait_for(self._to_send, self._window.open_at - now)
            elif (pending := self._next(now)) is not None:
                task = self._tasks.create_task(self._attempt(pending))
                self._under_way.add(task)
                task.add_done_callback(self._on_try_done)
            else:
                due = self._waiting.due()
                await _wait_for(self._to_send, None if due is None else due - now)

    def _next(self, now: float) -> PendingLine | None:
        return self._waiting.next(now, len(self._under_way), self._held >= HELD_BYTES)

    async def _attempt(self, pending: PendingLine) -> None:
        number = pending.line.number
        name = values.request_id(self._batch, number)
        body = values.body_of(pending.line.text)
        sent = self._clock()
        # Unique per attempt: an earlier attempt may still run at the same worker.
        request_id = f"{name}-{self._lease.epoch}-{next(self._sends)}"
        answer = await self._gateway.send(self._lease.endpoint, body, request_id, self._lease.line_s)
        outcome, result = answer.outcome, None
        if answer.events:
            result = values.stream_result(number, name)
        elif outcome is AttemptOutcome.ANSWERED:
            result = values.answered_result(number, name, answer.status, answer.body)
            outcome = outcome if result else AttemptOutcome.FAULT
        none_answered = pending.attempts.failures and self._answered_at < pending.failed_at
        if outcome is AttemptOutcome.FAULT and none_answered:
            outcome = AttemptOutcome.OUTAGE
        attempts = pending.attempts.after(outcome)
        if result is None and attempts.exhausted:
            result = values.failed_result(number, name, outcome, attempts, answer.status, answer.body)
        now = self._clock()
        if result is not None:
            if outcome is AttemptOutcome.ANSWERED:
                self._answered_at = now
                self._window.answered(now)
            self._done(pending, result)
        else:
            self._retry_later(
                replace(pending, attempts=attempts, failed_at=now), outcome, sent, answer.retry_s
            )

    def _done(self, pending: PendingLine, result: LineResult) -> None:
        self._held -= len(pending.line.text)
        self._outbox.put(result)

    def _retry_later(
        self, pending: PendingLine, outcome: AttemptOutcome, sent: float, retry_s: float
    ) -> None:
        now, attempts = pending.failed_at, pending.attempts
        self._retried[outcome.value] += 1
        if outcome in (AttemptOutcome.BUSY, AttemptOutcome.AWAY):
            wait = max(retry_s, backoff_s(min(attempts.refusals, MAX_REJECTION_BACKOFF), self._rng))
            self._window.refused(sent, now, wait)
        else:
            wait = backoff_s(attempts.failures - 1, self._rng)
        self._waiting.again(pending, now + wait)

    def _on_try_done(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._wake()

    def _posted(self, receipt: ResultReceipt) -> None:
        self._window.bound(self._bounded(receipt.window))
        self._obey(receipt.order)
        self._wake()

    def _bounded(self, window: int) -> int:
        return window if self._max_in_flight is None else min(window, self._max_in_flight)

    def _obey(self, order: RunnerOrder) -> None:
        if order is RunnerOrder.STOP:
            self.stop()

    def _wake(self) -> None:
        self._to_send.set()
        self._to_fetch.set()


async def _wait_for(news: asyncio.Event, seconds: float | None = None) -> None:
    """Wait until the event is set, for `seconds` at most, and clear it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await news.wait()
    news.clear()
