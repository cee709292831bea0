"""
One worker without a model in a process of its own: it starts slowly, drains, and shows a worker's metrics.

    python -m benchmarks.scaled_worker --role prefill --port 9301 --scale 15 --startup-s 240

What it computes takes as long as `model_worker` says, so many times faster than meant. A decode worker asks a
prefill worker by HTTP, and tells it when it has pulled the blocks. With SIGTERM it takes nothing new, and
ends when its streams have ended and its last blocks were pulled.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from dataclasses import fields
from typing import Any

import aiohttp
import msgspec
import uvloop
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from baton_api import metrics
from baton_api.metrics import Metric
from baton_api.workers import Load, Role
from benchmarks.model_cluster import Body, Cluster, ServedWorker
from benchmarks.model_server import Connection, _answer, _body
from benchmarks.model_worker import Computed, Text, Timing

MEANT = Timing(
    start_s=0.02, token_s=1 / 2000, move_s=0.01, step_s=0.03, stream_step_s=0.003, context_step_s=1e-7
)
"""About a model of 70 billion parameters."""

BLOCK_TOKENS, BLOCKS = 512, 640
TICK_S = 0.02


class Figures:
    """The metrics of one worker under their contract's names. Times from token to token are as meant."""

    def __init__(self, worker: Worker, scale: float) -> None:
        self._worker = worker
        self.registry = CollectorRegistry()
        self.generated = self._counter(metrics.WORKER_GENERATION_TOKENS)
        self.ended = self._counter(metrics.WORKER_REQUESTS).labels("length")
        self.tokens = Histogram(
            metrics.WORKER_TOKEN.name, "x", buckets=metrics.WORKER_TOKEN.buckets, registry=self.registry
        )
        self._computed = self._counter(metrics.WORKER_PROMPT_TOKENS).labels("computed")
        self.step = Histogram(metrics.WORKER_STEP.name, "x", registry=self.registry)
        model = worker.model
        for metric, value in (
            (metrics.WORKER_RUNNING, lambda: worker.running),
            (metrics.WORKER_QUEUED, lambda: 0),
            (metrics.WORKER_HELD, lambda: worker.held),
            (metrics.WORKER_QUEUED_TOKENS, lambda: model.queued_tokens),
            (metrics.WORKER_KV_USAGE, lambda: min(1.0, model.context / (BLOCKS * BLOCK_TOKENS))),
        ):
            Gauge(metric.name, "x", registry=self.registry).set_function(value)
        self._scale = scale
        self._seen = 0

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.name, "x", metric.labels, registry=self.registry)

    def text(self) -> bytes:
        model = self._worker.model
        computed = model.prompt_tokens - model.cached_tokens
        self._computed.inc(computed - self._seen)
        self._seen = computed
        return generate_latest(self.registry)

    def generating(self, tokens: int, step_s: float) -> None:
        self.generated.inc(tokens)
        for _ in range(tokens):
            self.tokens.observe(step_s * self._scale)


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
            made = msgspec.json.decode(await answer.read())
        await asyncio.sleep(self._move_s)
        async with self._session.post(f"{self._url}/pulled") as answer:
            answer.raise_for_status()
        return Computed(made["cached"], made["queue_s"], made["compute_s"])


class Worker(ServedWorker):
    """With its way to others, and what it has under way."""

    def __init__(self, cluster: Cluster, role: Role, port: int, scale: float) -> None:
        timing = MEANT.faster(scale)
        super().__init__(cluster, role, port, timing, BLOCKS, BLOCK_TOKENS)
        self.draining = False
        self.running = 0
        self.held = 0
        """Prompts that were computed and not pulled."""
        self.figures_ = Figures(self, scale)
        generate = self.model.generate

        async def counted(text: Text, tokens: int, emit: Any) -> None:
            made, at = 0, time.perf_counter()

            def emitted(count: int) -> None:
                nonlocal made, at
                now = time.perf_counter()
                if made:
                    # As the model has it: how late a busy machine's timers are is no worker's.
                    self.figures_.generating(count, self.model.step_s)
                else:
                    self.figures_.generated.inc(count)
                made, at = made + count, now
                emit(count)

            await generate(text, tokens, emitted)
            self.figures_.ended.inc()

        self.model.generate = counted  # type: ignore[method-assign]

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
                self.figures_.step.observe(now - at)
            elif self.model.busy_s > busy:
                self.figures_.step.observe(self.model.busy_s - busy)
            busy, at = self.model.busy_s, now


class Served(Connection):
    """The same worker's connections, with the paths that this one has beside."""

    _worker: Worker

    def on_message_complete(self) -> None:
        worker = self._worker
        match self._parser.get_method(), self._path:
            case b"GET", b"/metrics":
                self._transport.write(_answer(worker.figures_.text(), b"text/plain; version=0.0.4"))
            case b"GET", b"/ready" if worker.draining:
                self._transport.write(_answer(b"{}", status=b"503 Service Unavailable"))
            case b"POST", b"/compute":
                asked = msgspec.json.decode(b"".join(self._parts))
                text = Text(asked["tokens"], tuple(asked["blocks"]))
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
        made = {one.name: getattr(done, one.name) for one in fields(done)}
        self._transport.write(_answer(msgspec.json.encode(made)))

    async def _counted(self, body: Body) -> None:
        worker = self._worker
        worker.running += 1
        try:
            control = self._prefill.decode()
            remote: Any = worker.cluster.at(control) if control else None
            await self._serve(body, remote)
        finally:
            worker.running -= 1


class Alone(Cluster):
    """Of one worker; all others are elsewhere."""

    def __init__(self, session: aiohttp.ClientSession, move_s: float) -> None:
        super().__init__(renders=False)
        self._session = session
        self._move_s = move_s

    def at(self, control: str) -> Any:
        return Remote(self._session, control, self._move_s)


async def serve(role: Role, port: int, scale: float, startup_s: float) -> None:
    await asyncio.sleep(startup_s / scale)
    ends = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ends.set)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        cluster = Alone(session, MEANT.faster(scale).move_s)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--role", type=Role, choices=list(Role), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--scale", type=float, default=1.0, help="times faster than meant")
    parser.add_argument("--startup-s", type=float, default=240.0, help="as meant")
    options = parser.parse_args()
    uvloop.run(serve(options.role, options.port, options.scale, options.startup_s))


if __name__ == "__main__":
    main()
