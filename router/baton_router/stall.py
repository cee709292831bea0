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
    costs it nothing. A worker that lives but generates nothing still says so now and then
    (`: keep-alive`): that is a sign of life, and no token.
    """

    def __init__(
        self, client: Client, exchange: Exchange, events: EventStream | None, silent_s: float, tokens_s: float
    ) -> None:
        """`silent_s` may pass without a sign of life, of worker or client, and `tokens_s` without a token."""
        self._loop = asyncio.get_running_loop()
        self._client = client
        self._exchange = exchange
        self._events = events
        self._silent_s = silent_s
        self._tokens_s = tokens_s
        self._token = self._loop.time()
        """When a token came, as far as was seen."""
        self._timer = self._loop.call_later(silent_s / LOOKS, self._look)

    def _look(self) -> None:
        client, now = self._client, self._loop.time()
        alive = client.moved if client.sending else max(client.moved, self._exchange.progress)
        if client.sending:
            self._token = now  # until the client has what there is, no token is due
        elif self._events is None or not self._events.idles:
            self._token = alive
        left = min(alive + self._silent_s, self._token + self._tokens_s) - now
        if left > 0:
            self._timer = self._loop.call_later(min(left, self._silent_s / LOOKS), self._look)
        elif client.sending:
            client.abort()
        else:
            self._exchange.fail("idle")

    def close(self) -> None:
        self._timer.cancel()
