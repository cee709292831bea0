"""How late the event loop is: everything that a process serves is at least as late as that."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from baton_api import metrics
from baton_router.tallies import Spread

EVERY_S = 0.1
"""Seconds between two looks: a standstill of that length is seen, whenever it comes."""


class LoopLag(Collector):
    """Looks while its `watch` runs."""

    def __init__(self) -> None:
        self._lag = Spread(metrics.ROUTER_LOOP_LAG)

    async def watch(self) -> None:
        """Look until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self._lag.observe(max(0.0, clock() - due))

    def collect(self) -> Iterator[Family]:
        yield from self._lag.collect()
