"""
One worker without a model as a process: it starts slowly, drains, and exposes a worker's metrics.

Its work takes as long as in `model_worker`, divided by the scale. A decode worker asks a prefill worker by
HTTP, and notifies it when it has pulled the blocks. After SIGTERM it accepts no requests, and ends when its
streams have ended and its last blocks were pulled.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import aiohttp
import msgspec
import uvloop

from baton_api.workers import Load, Role
from benchmarks.model_cluster import Body, Cluster, ServedWorker
from benchmarks.model_server import Connection, _answer, _body
from benchmarks.model_worker import Computed, ModelWorker, Text
from benchmarks.scaling.case import BLOCK_TOKENS, BLOCKS, TIMING
from benchmarks.scaling.worker_metrics import WorkerMetrics

TICK_S = 0.02


class CountedModel(ModelWorker):
    """A model whose tokens are counted."""

    shown: WorkerMetrics

    async def generate(self, text: Text, tokens: int, emit: Callable[[int], None]) -> None:
        first = True

        def emitted(count: int) -> None:
            nonlocal first
            # Modeled time: a busy machine's late timers do not count for the worker.
            self.shown.generated(count, None if first else self.step_s)
            first = False
            emit(count)

        await super().generate(text, tokens, emitted)
        self.shown.ended()


class Worker(ServedWorker):
    """With its way to others, and what it has under way."""

    def __init__(self, cluster: Cluster, role: Role, port: int, scale: float) -> None:
        self._scale = scale
        self.draining = False
        self.running = 0
        self.held = 0
        super().__init__(cluster, role, port, TIMING.faster(scale), BLOCKS, BLOCK_TOKENS)

    def begin(self) -> None:
        super().begin()
        model = CountedModel(self._timing, self._capacity, self._block_tokens, self._tell)
        self.model = model
        self.shown = model.shown = WorkerMetrics(self, self._scale)

    @property
    def load(self) -> Load:
        return msgspec.structs.replace(super().load, draining=self.draining)

    async def observe(self) -> None:
        """Count as steps what a worker would spend in them: whenever it computes or generates."""
        busy, at = 0.0, time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            if self.model.streams:
                self.shown.worked(now - at)
            elif self.model.busy_s > busy:
                self.shown.worked(self.model.busy_s - busy)
            busy, at = self.model.busy_s, now


class Served(Connection):
    """The same worker's connections, with the paths that this one has beside."""

    _worker: Worker

    def on_message_complete(self) -> None:
        worker = self._worker
        match self._parser.get_method(), self._path:
            case b"GET", b"/metrics":
                self._transport.write(_answer(worker.shown.text, b"text/plain; version=0.0.4"))
            case b"GET", b"/ready" if worker.draining:
                self._transport.write(_answer(b"{}", status=b"503 Service Unavailable"))
            case b"POST", b"/compute":
                request = msgspec.json.decode(b"".join(self._parts))
                text = Text(request["tokens"], tuple(request["blocks"]))
                self._task = asyncio.create_task(self._compute(text))
            case b"POST", b"/pulled":
                worker.held -= 1
                self._transport.write(_answer(b"{}"))
            case b"POST", b"/v1/chat/completions" if worker.draining:
                error = {"error": {"message": "It ends.", "type": "server_error", "code": "not_ready"}}
                self._transport.write(_answer(msgspec.json.encode(error), status=b"503 Service Unavailable"))
            case b"POST", b"/v1/chat/completions":
                self._task = asyncio.create_task(self._counted(_body.decode(b"".join(self._parts))))
            case _:
                super().on_message_complete()

    async def _compute(self, text: Text) -> None:
        worker = self._worker
        worker.running += 1
        try:
            done = await worker.model.compute(text)
            worker.held += 1
        finally:
            worker.running -= 1
        report = {one.name: getattr(done, one.name) for one in fields(done)}
        self._transport.write(_answer(msgspec.json.encode(report)))

    async def _counted(self, body: Body) -> None:
        worker = self._worker
        worker.running += 1
        try:
            control = self._prefill.decode()
            remote: Any = worker.cluster.at(control) if control else None
            await self._serve(body, remote)
        finally:
            worker.running -= 1


class Remote:
    """A prefill worker in another process."""

    def __init__(self, session: aiohttp.ClientSession, control: str, move_s: float) -> None:
        self._session = session
        self._url = f"http://{control}"
        self._move_s = move_s
        self.model = self

    async def compute(self, text: Text) -> Computed:
        given = msgspec.json.encode({"tokens": text.tokens, "blocks": text.blocks})
        async with self._session.post(f"{self._url}/compute", data=given) as answer:
            answer.raise_for_status()
            report = msgspec.json.decode(await answer.read())
        await asyncio.sleep(self._move_s)
        async with self._session.post(f"{self._url}/pulled") as answer:
            answer.raise_for_status()
        return Computed(report["cached"], report["queue_s"], report["compute_s"])


class SingleWorker(Cluster):
    """Of one worker; all others are elsewhere."""

    def __init__(self, session: aiohttp.ClientSession, move_s: float) -> None:
        super().__init__(renders=False)
        self._session = session
        self._move_s = move_s

    def at(self, control: str) -> Any:
        return Remote(self._session, control, self._move_s)


async def serve(role: Role, port: int, scale: float, ready_at: float) -> None:
    """Serve from `ready_at` on (by the monotonic clock) until SIGTERM."""
    await asyncio.sleep(ready_at - time.monotonic())
    ends = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ends.set)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        cluster = SingleWorker(session, TIMING.move_s / scale)
        worker = Worker(cluster, role, port, scale)
        cluster.workers.append(worker)
        server = await loop.create_server(lambda: Served(worker), "127.0.0.1", port)
        observing = asyncio.create_task(worker.observe())
        await ends.wait()
        worker.draining = True
        while worker.running or worker.held:  # noqa: ASYNC110
            await asyncio.sleep(TICK_S)
        observing.cancel()
        server.close()
        worker.publisher.close()


def run(role: Role, port: int, scale: float, ready_at: float) -> None:
    """Entry point of a worker's process."""
    uvloop.run(serve(role, port, scale, ready_at))
