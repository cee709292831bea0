"""
Background loops of a router process: health checks, discovery, batches.

An exception never ends a loop: it is logged with its address and counted, and the loop continues. If a loop
ends anyway, `/ready` fails. Otherwise the router would work with old state, unnoticed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from baton_api.errors import BatonError
from baton_api.metrics import ROUTER_BACKGROUND_ERRORS, BackgroundTask
from baton_api.metrics.counters import LabeledCounter

log = logging.getLogger(__name__)

RESTART_S = 1.0
"""Seconds after which a loop that has failed as a whole starts again."""

REPEATED_S = 60.0
"""Seconds in which one error of one address is logged once; the metric counts all of them."""

REMEMBERED = 1000
"""Errors whose log time is remembered."""


class BackgroundTasks:
    """The loops of one process. Belongs to one event loop."""

    def __init__(self, restart_s: float = RESTART_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.errors = LabeledCounter(ROUTER_BACKGROUND_ERRORS)
        self._restart_s = restart_s
        self._clock = clock
        self._tasks: dict[BackgroundTask, asyncio.Task[None]] = {}
        self._logged: dict[tuple[str, str, str], float] = {}
        """Loop, address and error -> when that was last logged."""

    def start(self, name: BackgroundTask, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run this loop until `stop`, and again whenever it fails."""
        self._tasks[name] = asyncio.create_task(self._keep(name, run), name=name)

    @contextmanager
    def guard(self, name: BackgroundTask, address: str = "") -> Iterator[None]:
        """Keep an exception in the body from ending the loop `name`. `address`: what the body is about."""
        try:
            yield
        except Exception as error:
            self.errors.add(name)
            self._log(name, address, error)

    def ended(self) -> str | None:
        """Return a sentence with the loops that ended without a call of `stop`; None if all run."""
        ended = ", ".join(name for name, task in self._tasks.items() if task.done())
        return f"Background tasks of the router have ended: {ended}. Restart it." if ended else None

    async def stop(self, *names: BackgroundTask) -> None:
        """Cancel these loops, or all, and wait for their end."""
        tasks = [self._tasks.pop(name) for name in names or tuple(self._tasks) if name in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, name: BackgroundTask, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            with self.guard(name):
                await run()
                raise RuntimeError("the loop returned")
            await asyncio.sleep(self._restart_s)

    def _log(self, name: BackgroundTask, address: str, error: Exception) -> None:
        now, key = self._clock(), (name, address, repr(error))
        if now - self._logged.get(key, -REPEATED_S) < REPEATED_S:
            return
        if len(self._logged) >= REMEMBERED:
            self._logged.clear()
        self._logged[key] = now
        about = f" for {address}" if address else ""
        trace = None if isinstance(error, BatonError) else error
        log.error("The background task %s failed%s and continues: %s", name, about, error, exc_info=trace)
