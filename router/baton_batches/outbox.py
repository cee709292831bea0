"""
Results on their way to the ledger: gathered for a moment and posted in groups, in one place at a time.

A group that was posted and not answered is posted again, which changes nothing if it had arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from baton_batches.values import Result
from baton_batches.wire import Receipt

GROUP = 256
GROUP_BYTES = 1024 * 1024
GROUP_S = 0.2
"""A group is posted when it has so many results, or bytes of them, or when its first has waited so long."""

FULL = 4096
FULL_BYTES = 32 * 1024 * 1024
"""Beyond this nothing should be sent that would bring more: the ledger is slow, or away."""


class Outbox:
    """Results that are not in the ledger yet."""

    def __init__(self, post: Callable[[list[Result]], Awaitable[Receipt]]) -> None:
        self._post = post
        self._results: list[Result] = []
        self._bytes = 0
        self._hurried = False
        self._news = asyncio.Event()
        self._gone = asyncio.Event()
        self._gone.set()

    @property
    def full(self) -> bool:
        return len(self._results) >= FULL or self._bytes >= FULL_BYTES

    def put(self, result: Result) -> None:
        self._results.append(result)
        self._bytes += len(result.body)
        self._gone.clear()
        self._news.set()

    async def emptied(self) -> None:
        """Post what is there without waiting for more, and return when it is in the ledger."""
        self._hurried = True
        self._news.set()
        await self._gone.wait()

    async def run(self, posted: Callable[[Receipt], None]) -> None:
        """Post what is put, until cancelled; `posted` hears of each group."""
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
        """A group is whole, or has waited long enough."""
        loop = asyncio.get_running_loop()
        until = loop.time() + GROUP_S
        while not self._hurried and len(self._results) < GROUP and self._bytes < GROUP_BYTES:
            self._news.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._news.wait()
            except TimeoutError:
                return

    def _group(self) -> list[Result]:
        size = 0
        for number, result in enumerate(self._results[:GROUP]):
            size += len(result.body)
            if size > GROUP_BYTES and number:
                return self._results[:number]
        return self._results[:GROUP]
