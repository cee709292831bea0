"""
Results of a runner on their way to the ledger.

They are posted in groups, one post at a time; results that arrive meanwhile form the next group. A group
without a reply is posted again; the ledger keeps the first result of each line, so a repeated post changes
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from baton_batches.values import LineResult
from baton_batches.wire import ResultReceipt

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
