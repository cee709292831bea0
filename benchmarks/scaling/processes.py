"""
The cluster of processes: workers that start, are listed, scraped and drained, behind a real router.

They end as in Kubernetes: the least busy first, listed as terminating, then SIGTERM and a wait.
They are forked from a process that has loaded their modules. Loading takes seconds of processor time, which
all others would lack whenever a role grows; on real nodes it does not slow down routers.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import aiohttp

from baton_api.workers import Role
from baton_operator.rollout.decision import RoleName
from baton_operator.scaling import prometheus
from baton_operator.scaling.signals import ServiceMetrics
from benchmarks.scaling import programs, worker
from benchmarks.scaling.asking import ask
from benchmarks.scaling.case import NOTICE_S, ROLES, STARTUP_S
from benchmarks.scaling.day import Request
from benchmarks.scaling.measured import Measured
from benchmarks.scaling.score import Answer, Ends
from benchmarks.scaling.world import Life, Pod, Sight, replica_hours
from tests.router.fake_kubernetes import FakeKubernetes, a_slice

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["benchmarks.scaling.worker"])

LOOK_S = 0.1
"""Between two looks whether something has become ready."""

NOTHING = ("demand_prompt", "demand_answer", "queued_prompt", "in_flight", "waiting", "age")
"""Metrics of a service without workers, besides the requests held in its router."""


@dataclass(slots=True, eq=False)
class Process:
    """A worker. Times are those of the machine's steady clock."""

    role: RoleName
    port: int
    process: BaseProcess
    started: float
    ready: float | None = None
    ends: bool = False

    @property
    def name(self) -> str:
        return f"{self.role}-{self.port}"

    async def ended(self) -> int | None:
        """Wait for its end, and give its status."""
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.process.sentinel, gone.set)
        await gone.wait()
        loop.remove_reader(self.process.sentinel)
        self.process.join()
        return self.process.exitcode


class ProcessWorld:
    """A `World`: `async with` it. Ports from `port` on are its own."""

    def __init__(self, folder: Path, api: FakeKubernetes, port: int, scale: float) -> None:
        self.ends = Ends()
        self._folder, self._api, self._scale = folder, api, scale
        self._router_port, self._prometheus_port, self._ports = port, port + 1, port + 1
        self._url = f"http://127.0.0.1:{port}"
        self._measured = Measured(f"http://127.0.0.1:{self._prometheus_port}", scale)
        self._workers: list[Process] = []
        self._lives: dict[Process, Life] = {}
        self._began = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ProcessWorld:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        self._target()
        await self.lighten()
        self._router = await programs.router(self._folder, self._api, self._router_port)
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._watching.cancel()
        await asyncio.gather(*self._tasks)
        for one in self._workers:
            one.process.terminate()
            await one.ended()
        for program in (self._router, self._prometheus):
            if program.returncode is None:
                program.terminate()
                await program.wait()
        await self._measured.close()
        await self._session.close()

    @property
    def replica_hours(self) -> float:
        return replica_hours(self._lives.values(), self._now)

    async def ready(self) -> None:
        while not await self._is_up(self._router_port) or not await self._all_are_seen():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    def begin(self) -> None:
        self._began = time.monotonic()
        self._lives = {one: Life(0.0) for one in self._workers}

    async def see(self) -> Sight:
        pods = {
            role: [
                Pod(one.name, self._meant(one.started), one.ready and self._meant(one.ready))
                for one in workers
            ]
            for role, workers in ((role, self._wanted(role)) for role in ROLES)
        }
        metrics = await self._measured.metrics() if any(pods.values()) else await self._asleep()
        return Sight(self._now, pods, metrics, await self._measured.busy())

    async def ask(self, request: Request) -> Answer:
        return await ask(self._session, self._url, request, self._scale)

    async def scale(self, role: RoleName, count: int) -> None:
        workers = self._wanted(role)
        for _ in range(count - len(workers)):
            self._start(role)
        if count < len(workers):
            running = await self._measured.running()
            # The unready ones first, then those with least to do.
            workers.sort(key=lambda one: (one.ready is not None, running.get(one.name, 0.0)))
            for one in workers[: len(workers) - count]:
                one.ends = True
                self._list(one)
                self._do(self._end(one))
        self._target()

    async def darken(self) -> None:
        self._prometheus.kill()
        await self._prometheus.wait()

    async def lighten(self) -> None:
        self._prometheus = await programs.prometheus(self._folder, self._prometheus_port)

    @property
    def _now(self) -> float:
        return self._meant(time.monotonic())

    def _meant(self, clock: float) -> float:
        return (clock - self._began) * self._scale

    def _wanted(self, role: RoleName) -> list[Process]:
        return [one for one in self._workers if one.role == role and not one.ends]

    async def _asleep(self) -> ServiceMetrics:
        """Return the router's own report, which the operator reads when no worker runs."""
        held = await prometheus.held_requests([self._url])
        return ServiceMetrics({**dict.fromkeys(NOTHING, 0.0), "routers": 1.0, "held": held.value or 0.0})

    async def _watch(self) -> None:
        """List who has become ready."""
        while True:
            for one in self._workers:
                if one.ready is None and not one.ends and await self._is_up(one.port):
                    one.ready = time.monotonic()
                    self._list(one)
            await asyncio.sleep(LOOK_S)

    async def _is_up(self, port: int) -> bool:
        try:
            async with self._session.get(f"http://127.0.0.1:{port}/ready") as answer:
                return bool(answer.status == 200)
        except (aiohttp.ClientError, OSError):
            return False

    async def _all_are_seen(self) -> bool:
        values = (await self._measured.metrics()).values
        sample = values.get("prefill_workers", 0.0) + values.get("decode_workers", 0.0)
        return bool(values.get("routers")) and sample == len(self._workers)

    def _start(self, role: RoleName) -> None:
        self._ports += 1
        started = time.monotonic()
        ready_at = started + STARTUP_S / self._scale
        process = FORKS.Process(target=worker.run, args=(Role(role), self._ports, self._scale, ready_at))
        process.start()
        one = Process(role, self._ports, process, started)
        self._workers.append(one)
        self._lives[one] = Life(self._meant(started))
        self._list(one)

    async def _end(self, one: Process) -> None:
        if one.ready is not None:
            await asyncio.sleep(NOTICE_S / self._scale)
            one.process.terminate()
        else:
            one.process.kill()
        status = await one.ended()
        if one.ready is not None:
            self.ends.count(well=status == 0)
        self._lives[one].ended_s = self._now
        self._workers.remove(one)
        self._api.delete(one.name)

    def _do(self, what: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _list(self, one: Process) -> None:
        serves = one.ready is not None
        item = a_slice(
            one.name, "127.0.0.1", role=one.role, ready=serves, serving=serves, terminating=one.ends
        )
        item["ports"] = [{"name": "http", "port": one.port}]
        self._api.put(item)

    def _target(self) -> None:
        workers = [(one.role, one.port, one.name) for one in self._workers if not one.ends]
        programs.write_targets(self._folder, [("router", self._router_port, "router"), *workers])
