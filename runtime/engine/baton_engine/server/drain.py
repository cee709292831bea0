"""Counts the requests that generate, and lets no more in once the worker is to stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from baton_api.errors import NotReady


class Drain:
    """How many requests are under way, and whether new ones are welcome."""

    def __init__(self) -> None:
        self.draining = False
        self.running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """One request; raises NotReady while draining."""
        if self.draining:
            raise NotReady("This worker is shutting down and takes no new requests; ask another one.")
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    async def drain(self, seconds: float) -> bool:
        """Let no more in and wait for those under way; false if some were left after `seconds`."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
