"""
How long one attempt may keep a client waiting for the first byte: a timer, and what happens when it fires.

Another worker is asked when this one takes several times as long as was predicted, if there is another one
and the budget for retries allows it, else so much later again: a prediction may be wrong, and then asking
twice makes it worse. Whoever has nobody else to ask waits on, up to the limit of all waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from baton_router.asks import Grant

TIMES = 3.0
"""What a prediction may be wrong by before it counts as a fault, besides the predicted time itself."""

STEPS = 10.0
"""The same for the tokens of an answer that comes as a whole: streams beside it slow it down."""

SLOW = "slow"
OVERDUE = "overdue"
"""The cause of a loss after which nobody else is asked."""

RETRY_S = 0.1
"""From a look at an attempt that is just connecting to the next."""


class Failing(Protocol):
    """What can be told that its time is over."""

    def fail(self, cause: str) -> bool:
        """End it; False if there is nothing yet to end."""
        ...


def patience_s(predicted_s: float, least_s: float) -> float:
    """Seconds for a first token that was predicted to take `predicted_s`."""
    return max(TIMES * predicted_s, least_s) + predicted_s


def first_byte_s(grant: Grant, tokens: int | None) -> float:
    """Seconds until another worker is asked, if the first byte comes with token `tokens`; 0 for never."""
    if not grant.patience_s or tokens is None:
        return 0.0
    return grant.patience_s + STEPS * grant.step_s * (tokens - 1)


class Patience:
    """One attempt's, from its start until `close`."""

    __slots__ = ("_attempt", "_loop", "_may_leave", "_slow_s", "_timer", "_until")

    def __init__(self, attempt: Failing, slow_s: float, until: float, may_leave: Callable[[], bool]) -> None:
        """`slow_s` as `first_byte_s` gives it; `until` is the loop time at which it is over in any case."""
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
            self._fail(SLOW)
        else:
            self._timer = self._next()

    def _over(self) -> None:
        self._fail(OVERDUE)

    def _fail(self, cause: str) -> None:
        if not self._attempt.fail(cause):
            self._timer = self._loop.call_later(RETRY_S, self._fail, cause)
