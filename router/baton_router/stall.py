"""Watches one answer for standstill, and finds who is to blame: the worker or the client."""

from __future__ import annotations

import asyncio

from baton_router.client import Client
from baton_router.upstream import Exchange


class Stall:
    """
    One timer for the life of an answer.

    It looks at the time of the last movement only when it fires, so that a piece passing through
    costs it nothing.
    """

    def __init__(self, client: Client, exchange: Exchange, limit_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._client = client
        self._exchange = exchange
        self._limit_s = limit_s
        self._timer = self._loop.call_later(limit_s, self._look)

    def _look(self) -> None:
        client = self._client
        moved = client.moved if client.sending else max(client.moved, self._exchange.progress)
        left = moved + self._limit_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        elif client.sending:
            client.abort()
        else:
            self._exchange.fail("idle")

    def close(self) -> None:
        self._timer.cancel()
