"""
When requests are sent: a closed loop, an open one, or a trace.

In a closed loop so many clients each ask again once they were answered; that finds how much a server serves.
In an open one requests come by chance at a rate, answered or not; that is how people come, and what waits
then waits truly.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from baton_cli.bench.outcomes import Outcome
from baton_cli.bench.prompts import BenchRequest

Send = Callable[[BenchRequest, float, float], Awaitable[Outcome]]
"""Asks one request; when it was due and how late it is goes into the outcome."""

LOOK_S = 0.02
"""From one look at the event loop's lag to the next."""


@dataclass(frozen=True, slots=True)
class ClientCost:
    """What the measuring itself took."""

    cpu_share: float
    """Of one core."""
    lag_p99_s: float
    """How late the event loop came to what was due."""
    late_p99_s: float
    """How late requests were sent."""

    CPU_LIMIT = 0.8
    LATE_LIMIT_S = 0.05

    @property
    def is_bottleneck(self) -> bool:
        """Whether the figures are about the client rather than the server."""
        return self.cpu_share > self.CPU_LIMIT or max(self.lag_p99_s, self.late_p99_s) > self.LATE_LIMIT_S


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A load that is over."""

    seconds: float
    """From the first request to the last answer."""
    outcomes: list[Outcome]
    client: ClientCost


async def closed(requests: Iterable[BenchRequest], clients: int, send: Send) -> LoadResult:
    """Each of `clients` takes the next request once its last one is answered."""
    waiting = iter(requests)

    async def client(began: float) -> list[Outcome]:
        done = []
        for asked in waiting:
            done.append(await send(asked, time.perf_counter() - began, 0.0))
        return done

    async def play(began: float) -> list[Outcome]:
        each = await asyncio.gather(*(client(began) for _ in range(clients)))
        return sorted(itertools.chain.from_iterable(each), key=lambda one: one.due_s)

    return await _watched(play)


async def open_(arrivals: Iterable[tuple[float, BenchRequest]], send: Send) -> LoadResult:
    """Each request at its second, whatever became of the others."""

    async def play(began: float) -> list[Outcome]:
        running: list[asyncio.Task[Outcome]] = []
        async with asyncio.TaskGroup() as group:
            for due_s, asked in arrivals:
                await asyncio.sleep(max(0.0, began + due_s - time.perf_counter()))
                late_s = time.perf_counter() - began - due_s
                running.append(group.create_task(_sent(send, asked, due_s, late_s)))
        return [one.result() for one in running]

    return await _watched(play)


async def _sent(send: Send, asked: BenchRequest, due_s: float, late_s: float) -> Outcome:
    return await send(asked, due_s, late_s)


def poisson(rng: random.Random, per_s: float) -> Iterator[float]:
    """Seconds at which people come who know nothing of each other, without end."""
    at_s = 0.0
    while True:
        at_s += rng.expovariate(per_s)
        yield at_s


async def _watched(play: Callable[[float], Awaitable[list[Outcome]]]) -> LoadResult:
    lags: list[float] = []
    watch = asyncio.create_task(_watch(lags))
    cpu, began = time.process_time(), time.perf_counter()
    try:
        outcomes = await play(began)
    finally:
        watch.cancel()
    seconds = time.perf_counter() - began
    late = [one.late_s for one in outcomes]
    cost = ClientCost((time.process_time() - cpu) / seconds, _p99(lags), _p99(late))
    return LoadResult(seconds, outcomes, cost)


async def _watch(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + LOOK_S
        await asyncio.sleep(LOOK_S)
        lags.append(time.perf_counter() - due)


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))] if values else 0.0
