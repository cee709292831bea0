"""Watches one answer for standstill, and finds who is to blame: the worker or the client."""

from __future__ import annotations

import asyncio

from baton_router.client import Client
from baton_router.sse import EventStream
from baton_router.upstream import Exchange

LOOKS = 4
"""In the time after which an answer stands still."""


class Stall:
    """
    One timer for the life of an answer.

    It looks at the time of the last movement only when it fires, so that a piece passing through
    costs it nothing. A worker that lives and computes nothing still says so now and then
    (`: keep-alive`): where another one could go on, that is no movement.
    """

    def __init__(
        self, client: Client, exchange: Exchange, limit_s: float, events: EventStream | None = None
    ) -> None:
        """`events` is what passes, if only tokens count."""
        self._loop = asyncio.get_running_loop()
        self._client = client
        self._exchange = exchange
        self._limit_s = limit_s
        self._events = events
        self._spoke = self._loop.time()
        """When the worker moved last, as far as it counts."""
        self._pause_s = limit_s if events is None else limit_s / LOOKS
        self._timer = self._loop.call_later(self._pause_s, self._look)

    def _look(self) -> None:
        client, now = self._client, self._loop.time()
        if client.sending:
            moved, self._spoke = client.moved, now  # the worker is not to blame for this while
        else:
            if self._events is None or not self._events.idles:
                self._spoke = max(client.moved, self._exchange.progress)
            moved = self._spoke
        left = moved + self._limit_s - now
        if left > 0:
            self._timer = self._loop.call_later(min(left, self._pause_s), self._look)
        elif client.sending:
            client.abort()
        else:
            self._exchange.fail("idle")

    def close(self) -> None:
        self._timer.cancel()
