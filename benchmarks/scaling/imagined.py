"""
The same cluster without processes, in virtual time: three hours in a second, to estimate the effect of a
change.

Workers are `model_worker`'s, as in the processes. The router is one queue of requests for the next free
prefill worker. It assigns each to the decode worker with the fewest requests, which queues those without a
slot. In some cases decode workers compute short prompts by themselves. No message is late or lost, so
processes have slightly worse results.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from baton_operator.rollout.decision import RoleName
from baton_operator.scaling.signals import ServiceMetrics
from benchmarks.model_worker import ModelWorker, Text
from benchmarks.scaling.case import BLOCK_TOKENS, BLOCKS, NOTICE_S, ROLES, TIMING, Case
from benchmarks.scaling.day import MINUTE, Request
from benchmarks.scaling.imagined_metrics import Counter, Counters
from benchmarks.scaling.score import Answer, Ends
from benchmarks.scaling.world import Life, Pod, Sight, replica_hours

PULSE_S = 5.0
"""How often it is looked at who works."""

BUSY_S = 60.0


@dataclass(slots=True, eq=False)
class Imagined:
    """A worker."""

    role: RoleName
    name: str
    model: ModelWorker
    started_s: float
    slots: asyncio.Semaphore
    ready_s: float | None = None
    ends: bool = False
    requests: int = 0
    """That it was given and has not done."""
    queued: int = 0
    """Of them, those that wait for a slot."""
    busy: Counter = field(default_factory=lambda: Counter(BUSY_S))

    @property
    def usage(self) -> float:
        """Of its KV blocks."""
        return min(1.0, self.model.context / (BLOCKS * BLOCK_TOKENS))


Pair = tuple[Imagined | None, Imagined]
"""Prefill, unless decode computes the prompt by itself, and decode."""


class ImaginedWorld:
    """A `World`. Belongs to the loop of virtual time that runs when it is made: `async with` it."""

    def __init__(self, case: Case) -> None:
        self.ends = Ends()
        self._case = case
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._workers: list[Imagined] = []
        self._lives: dict[Imagined, Life] = {}
        self._created = 0
        self._line: deque[tuple[Request, asyncio.Future[Pair]]] = deque()
        self._counters = Counters()
        self._lit = True
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ImaginedWorld:
        self._do(self._pulse())
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def replica_hours(self) -> float:
        return replica_hours(self._lives.values(), self._now)

    async def ready(self) -> None:
        await asyncio.sleep(self._case.startup_s)

    def begin(self) -> None:
        self._began = self._loop.time()
        self._lives = {one: Life(0.0) for one in self._workers}

    async def darken(self) -> None:
        self._lit = False

    async def lighten(self) -> None:
        self._lit = True

    async def ask(self, request: Request) -> Answer:
        phase, answer = request.phase, Answer(request.phase.name)
        counters, came = self._counters, self._now
        local = phase.prompt <= self._case.local_tokens
        counters.requested(came, phase.prompt, phase.answer, local=local)
        given: asyncio.Future[Pair] = self._loop.create_future()
        self._line.append((request, given))
        self._give()
        prefill, decode = await given
        text = Text(phase.prompt, ())
        if prefill is None:
            await decode.model.compute(text)
        else:
            done = await prefill.model.compute(text)
            counters.computed.add(self._now, text.tokens)
            counters.computing_s.add(self._now, done.compute_s)
            self._done(prefill)
            await asyncio.sleep(TIMING.move_s)
        decode.queued += 1
        await decode.slots.acquire()
        decode.queued -= 1
        answer.first = self._now - came
        counters.first.add(self._now, answer.first)

        def emit(count: int) -> None:
            counters.generated.add(self._now, count)
            counters.token.add(self._now, decode.model.step_s)

        await decode.model.generate(text, phase.answer, emit)
        decode.slots.release()
        self._done(decode)
        counters.answered(self._now, phase.prompt, phase.answer)
        answer.token = (self._now - came - answer.first) / (phase.answer - 1)
        answer.ok = True
        return answer

    async def scale(self, role: RoleName, count: int) -> None:
        workers = self._wanted(role)
        for _ in range(count - len(workers)):
            self._created += 1
            model = ModelWorker(TIMING, BLOCKS, BLOCK_TOKENS, lambda changed: None)
            slots = asyncio.Semaphore(self._case.slots)
            worker = Imagined(role, f"{role}-{self._created}", model, self._now, slots)
            self._workers.append(worker)
            self._lives[worker] = Life(self._now)
            self._do(self._start(worker))
        workers.sort(key=lambda one: (one.ready_s is not None, one.requests))
        for worker in workers[: max(0, len(workers) - count)]:
            worker.ends = True
            self._do(self._end(worker))

    async def see(self) -> Sight:
        pods = {
            role: [Pod(one.name, one.started_s, one.ready_s) for one in self._wanted(role)] for role in ROLES
        }
        if any(pods.values()) and not self._lit:
            return Sight(self._now, pods, ServiceMetrics({}, "Prometheus is away"), {})
        prefills, decodes = self._ready("prefill"), self._ready("decode")
        metrics = self._counters.metrics(
            self._now,
            line=[request.phase.prompt for request, _ in self._line],
            held=0 if prefills and decodes else len(self._line),
            in_flight=sum(one.requests for one in self._workers),
            prefill=len(prefills),
            usages=[one.usage for one in decodes],
            streams=[one.model.streams for one in decodes],
            queued=[one.queued for one in decodes],
            slots=self._case.slots,
            sample=self._now >= self._case.unseen * MINUTE,
        )
        busy = {one.name: one.busy.rate(self._now) for one in self._workers}
        return Sight(self._now, pods, metrics, busy)

    @property
    def _now(self) -> float:
        return self._loop.time() - self._began

    def _wanted(self, role: RoleName) -> list[Imagined]:
        return [one for one in self._workers if one.role == role and not one.ends]

    def _ready(self, role: RoleName) -> list[Imagined]:
        return [one for one in self._wanted(role) if one.ready_s is not None]

    def _do(self, what: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, worker: Imagined) -> None:
        await asyncio.sleep(self._case.startup_s)
        worker.ready_s = self._now
        self._give()

    async def _end(self, worker: Imagined) -> None:
        await asyncio.sleep(NOTICE_S)
        while worker.requests:  # noqa: ASYNC110  (it costs nothing in virtual time)
            await asyncio.sleep(1)
        if worker.ready_s is not None:
            self.ends.count(well=True)
        self._lives[worker].ended_s = self._now
        self._workers.remove(worker)

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            for one in self._workers:
                one.busy.add(self._now, PULSE_S * bool(one.requests))

    def _give(self) -> None:
        """Assign the oldest requests to idle prefill workers."""
        decodes = self._ready("decode")
        free = [one for one in self._ready("prefill") if not one.requests]
        while self._line and decodes:
            local = self._line[0][0].phase.prompt <= self._case.local_tokens
            if not (local or free):
                return
            pair = None if local else free.pop(), min(decodes, key=lambda one: one.requests)
            for worker in pair:
                if worker is not None:
                    worker.requests += 1
            self._line.popleft()[1].set_result(pair)

    def _done(self, worker: Imagined) -> None:
        worker.requests -= 1
        self._give()
