"""
Limits of attempts: timeouts of the first byte and of idle streams, and the budget of retries.

The first-byte timeout moves a request to another worker when this one takes several times as long as
predicted. That needs another worker and a retry in the budget. Otherwise it waits again, because a
prediction may be wrong. The idle timeout watches an answer for standstill and finds out which side causes it,
worker or client.

**Retries.** Overloaded and crashing workers may cause retries for a share of all requests, so that failures
cannot feed themselves. A crash costs one retry, however many requests were lost in it. A request that
crashes one worker after another costs one each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from baton_http.client_connection import ClientConnection
from baton_http.sse import EventStream
from baton_http.upstream import UpstreamExchange
from baton_router.engines.engine_request import OVERDUE
from baton_router.requests.picker import Grant

STEP_FACTOR = 10.0
"""Factor by which steps may be slower than the worker reports, for the tokens of an unstreamed response:
streams beside it slow it down."""

SLOW = "slow"
"""Cause of a loss after which another worker is tried."""

RETRY_S = 0.1
"""Seconds between two checks of an attempt that is still connecting."""


class CanFail(Protocol):
    """An exchange that a timeout can end."""

    def fail(self, cause: str) -> bool:
        """End it; False if nothing has begun."""
        ...


def first_byte_s(grant: Grant, tokens: int | None) -> float:
    """Seconds until another worker is tried, if the first byte comes with token `tokens`; 0 disables this."""
    if not grant.first_token_timeout_s or tokens is None:
        return 0.0
    return grant.first_token_timeout_s + STEP_FACTOR * grant.step_s * (tokens - 1)


class FirstByteTimeout:
    """The timeout of one attempt, from its start until `close`."""

    __slots__ = ("_attempt", "_loop", "_may_leave", "_slow_s", "_timer", "_until")

    def __init__(self, attempt: CanFail, slow_s: float, until: float, may_leave: Callable[[], bool]) -> None:
        """`slow_s` as from `first_byte_s`; at loop time `until` the attempt ends in any case."""
        self._attempt = attempt
        self._slow_s = slow_s
        self._until = until
        self._may_leave = may_leave
        self._loop = asyncio.get_running_loop()
        self._timer = self._next()

    def close(self) -> None:
        self._timer.cancel()

    def _next(self) -> asyncio.TimerHandle:
        loop = self._loop
        if 0 < self._slow_s < self._until - loop.time():
            return loop.call_later(self._slow_s, self._slow)
        return loop.call_at(self._until, self._over)

    def _slow(self) -> None:
        if self._may_leave():
            self._leave()
        else:
            self._timer = self._next()

    def _leave(self) -> None:
        if self._attempt.fail(SLOW):
            self._timer = self._loop.call_at(self._until, self._over)
        else:
            self._timer = self._loop.call_later(RETRY_S, self._leave)

    def _over(self) -> None:
        if not self._attempt.fail(OVERDUE):
            self._timer = self._loop.call_later(RETRY_S, self._over)


CHECKS = 4
"""Checks within the idle timeout."""


class IdleTimeout:
    """
    One timer for the life of a response.

    It reads the last progress only when it fires, so a forwarded piece costs nothing. A live worker that
    generates nothing sends `: keep-alive`: a sign of life, not a token.
    """

    def __init__(
        self,
        client: ClientConnection,
        exchange: UpstreamExchange,
        events: EventStream | None,
        silent_s: float,
        tokens_s: float,
    ) -> None:
        """`silent_s` is the limit without progress of worker or client, `tokens_s` without a token."""
        self._loop = asyncio.get_running_loop()
        self._client = client
        self._exchange = exchange
        self._events = events
        self._silent_s = silent_s
        self._tokens_s = tokens_s
        self._token = self._loop.time()
        """When a token last came."""
        self._timer = self._loop.call_later(silent_s / CHECKS, self._look)

    def _look(self) -> None:
        client, now = self._client, self._loop.time()
        alive = max(client.moved, self._exchange.progress)
        if client.sending:  # until the client has what there is, nothing is due: its pace is `baton_http`'s
            alive = self._token = now
        elif self._events is None or not self._events.idles:
            self._token = alive
        left = min(alive + self._silent_s, self._token + self._tokens_s) - now
        if left > 0:
            self._timer = self._loop.call_later(min(left, self._silent_s / CHECKS), self._look)
        else:
            self._exchange.fail("idle")

    def close(self) -> None:
        self._timer.cancel()


RESERVE = 10.0
"""Retries that are possible without requests before them: enough for a quiet router's bad moment."""

REFILL_PER_S = 1.0
"""Retries regained without new requests, so that a waiting retry succeeds on an idle router too."""


CRASH_S = 1.0
"""Seconds after a crash was paid for in which other losses of the same worker belong to it."""


class RetryBudget:
    """Each request earns a part of a retry, and so does time; a retry spends a whole one."""

    def __init__(self, ratio: float, clock: Callable[[], float]) -> None:
        self._ratio = ratio
        self._clock = clock
        self._saved = RESERVE
        self._looked = clock()
        self._paid: dict[str, float] = {}
        """When a crash of a worker was paid for, by its name."""

    def earn(self) -> None:
        self._saved = min(RESERVE, self._saved + self._ratio)

    def spend(self) -> bool:
        """Whether there was one to spend; never, if requests earn nothing."""
        now = self._clock()
        self._saved = min(RESERVE, self._saved + REFILL_PER_S * (now - self._looked))
        self._looked = now
        if self._saved < 1.0 or not self._ratio:
            return False
        self._saved -= 1.0
        return True

    def spend_after_crash(self, worker: str) -> bool:
        """Whether a request that was lost with `worker` may go to another one."""
        now = self._clock()
        self._paid = {name: at for name, at in self._paid.items() if now - at < CRASH_S}
        if worker in self._paid:
            return True
        if not self.spend():
            return False
        self._paid[worker] = now
        return True
