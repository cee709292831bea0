"""
The end of one read, told from the thread that runs it to whoever waits on an event loop.

A read cannot be called off, so neither can its end: every waiter has a future of its own, and one that
is cancelled or timed out takes nothing with it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from baton_api.errors import TransferFailed
from baton_engine.transfer import Pulled


class Settlement:
    """A `Pull` that is settled by its owner, once, from any thread."""

    def __init__(self) -> None:
        self._end: Future[Pulled] = Future()
        # A running future refuses to be cancelled, so a waiter's cancellation stops at the waiter.
        self._end.set_running_or_notify_cancel()

    def settled(self) -> asyncio.Future[Pulled]:
        waiter = asyncio.wrap_future(self._end)
        # One that stopped listening at its deadline is no error that asyncio should write of.
        waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
        return waiter

    def succeed(self, pulled: Pulled) -> None:
        self._end.set_result(pulled)

    def fail(self, error: TransferFailed) -> None:
        self._end.set_exception(error)
