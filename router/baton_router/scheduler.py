"""
The one place that knows the workers and gives requests to them.

A process that holds clients' connections asks it through `picker.Picker` and is told an address. What the
workers hold, do and cost (`knowledge`), what was decided (`dispatcher`), how they are (`workers`): it is
all here, so that decisions made for one client count for the next.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from baton_api.errors import NotReady
from baton_api.reports import PromptReport
from baton_router import checks
from baton_router.asks import Ask, Grant
from baton_router.dispatcher import Dispatch, Dispatcher
from baton_router.kv_subscriber import Feeds
from baton_router.settings import RouterSettings
from baton_router.workers import Workers


class Scheduler:
    """The Picker of its own process. Belongs to one event loop."""

    def __init__(
        self, settings: RouterSettings, workers: Workers, rng: random.Random, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._clock = clock
        self.workers = workers
        self.dispatcher = Dispatcher(workers, rng, settings.alone_tokens)
        self.feeds = Feeds(workers, self.dispatcher.knowledge, settings, clock)
        self._granted: dict[int, Dispatch] = {}

    async def watch(self) -> None:
        """Look at the workers and hear their events, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(checks.watch(self.workers, self._settings, self._clock))
            group.create_task(self.feeds.watch())

    async def pick(self, ask: Ask) -> Grant:
        made = self.dispatcher.dispatch(ask.model, ask.prompt, ask.tried, self._clock())
        if made is None:
            raise NotReady("Every worker that serves this model was tried for this request.")
        decode, prefill = made.pair.decode, made.pair.prefill
        decode.in_flight += 1
        if prefill is not None:
            prefill.in_flight += 1
        self._granted[made.number] = made
        return Grant(
            made.number,
            decode.name,
            prefill.name if prefill else "",
            prefill.control if prefill else "",
            made.summary.encode(),
        )

    def began(self, grant: Grant, report: PromptReport | None) -> None:
        made = self._granted[grant.number]
        made.pair.decode.health = made.pair.decode.health.served()
        self._computed(made)
        self.dispatcher.began(made, report, self._clock())

    def failed(self, grant: Grant) -> None:
        worker = self._granted[grant.number].pair.decode
        worker.health = worker.health.struck(self._clock())

    def let_go(self, grant: Grant, *, complete: bool) -> None:
        made = self._granted.pop(grant.number)
        made.pair.decode.in_flight -= 1
        self._computed(made)
        self.dispatcher.let_go(made, self._clock(), complete=complete)

    def _computed(self, made: Dispatch) -> None:
        """The prefill worker has done its part, or will not."""
        if made.pair.prefill is not None and made.first_byte is None and made.ended is None:
            made.pair.prefill.in_flight -= 1
