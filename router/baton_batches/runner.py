"""
The batch runner: sends the lines of one batch through the router and records their results.

It has no state of its own: it fetches lines slice by slice and posts results in groups. If it dies, another
runner continues from the ledger; lines in flight are sent again, and the first result of a line stays. So it
may be killed at any time, and its memory does not depend on the size of the batch.

`SendWindow` says how many lines may be in flight, `PendingLines` which line is next, and `ResultOutbox` when
results are posted.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace

from baton_batches import values
from baton_batches.pending_lines import PendingLine, PendingLines
from baton_batches.result_outbox import ResultOutbox
from baton_batches.retries import AttemptOutcome, backoff_s
from baton_batches.runner_gateway import LeaseLost, RunnerGateway, TokenRejected
from baton_batches.send_window import SendWindow
from baton_batches.values import LineResult
from baton_batches.wire import ResultReceipt, RunnerLease, RunnerOrder, RunnerProgress

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
        while not self._waiting.complete:
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
        while not self._stopping and not (
            self._waiting.complete and not self._waiting and not self._under_way
        ):
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
