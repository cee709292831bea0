"""
Send requests in a closed loop, in an open loop, or by a trace.

In a closed loop each client sends its next request after a response; that measures maximum throughput. In an
open loop requests arrive at random times at a given rate, so queueing is realistic.
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
"""Sends a request, given its scheduled start and its delay."""

LAG_INTERVAL_S = 0.02
"""Interval of the measurements of the event loop's lag."""


@dataclass(frozen=True, slots=True)
class ClientCost:
    """The cost of the client itself."""

    cpu_share: float
    """Ratio of one core."""
    lag_p99_s: float
    """Lag of the event loop."""
    late_p99_s: float
    """Delay of requests."""

    CPU_LIMIT = 0.8
    LATE_LIMIT_S = 0.05

    @property
    def is_bottleneck(self) -> bool:
        """Whether the client limited the results."""
        return self.cpu_share > self.CPU_LIMIT or max(self.lag_p99_s, self.late_p99_s) > self.LATE_LIMIT_S


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The outcomes of a load."""

    seconds: float
    """From the first request to the last response."""
    outcomes: list[Outcome]
    client: ClientCost


async def closed(requests: Iterable[BenchRequest], clients: int, send: Send) -> LoadResult:
    """Run a closed loop."""
    waiting = iter(requests)

    async def client(began: float) -> list[Outcome]:
        done = []
        for request in waiting:
            done.append(await send(request, time.perf_counter() - began, 0.0))
        return done

    async def play(began: float) -> list[Outcome]:
        by_client = await asyncio.gather(*(client(began) for _ in range(clients)))
        return sorted(itertools.chain.from_iterable(by_client), key=lambda outcome: outcome.due_s)

    return await _watched(play)


async def open_(arrivals: Iterable[tuple[float, BenchRequest]], send: Send) -> LoadResult:
    """Run an open loop: send each request at its time, independent of the others."""

    async def play(began: float) -> list[Outcome]:
        running: list[asyncio.Task[Outcome]] = []
        async with asyncio.TaskGroup() as group:
            for due_s, request in arrivals:
                await asyncio.sleep(max(0.0, began + due_s - time.perf_counter()))
                late_s = time.perf_counter() - began - due_s
                running.append(group.create_task(_sent(send, request, due_s, late_s)))
        return [task.result() for task in running]

    return await _watched(play)


async def _sent(send: Send, request: BenchRequest, due_s: float, late_s: float) -> Outcome:
    return await send(request, due_s, late_s)


def poisson(rng: random.Random, per_s: float) -> Iterator[float]:
    """Yield the times of a Poisson process, without end."""
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
    late = [outcome.late_s for outcome in outcomes]
    cost = ClientCost((time.process_time() - cpu) / seconds, _p99(lags), _p99(late))
    return LoadResult(seconds, outcomes, cost)


async def _watch(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        lags.append(time.perf_counter() - due)


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))] if values else 0.0
