"""
The scheduler's side of the Unix socket: frontends connect, request workers, and release them.

If a frontend dies, all its grants are released. All frontends get the list of workers as soon as it changes;
they end requests on workers that are down.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress

import msgspec

from baton_api.background import BackgroundTasks
from baton_api.errors import BatonError, InternalError
from baton_api.metrics import BackgroundTask
from baton_http.link import LinkProtocol
from baton_router.frontends import link
from baton_router.frontends.link import (
    AnswerBegan,
    FrontendMessage,
    FrontendMetrics,
    PickGranted,
    PickMessage,
    PickQueued,
    RegisteredWorker,
    RequestReleased,
    WorkerFailed,
    WorkerFull,
    WorkerRegistry,
)
from baton_router.metrics.registry import MetricFamily
from baton_router.requests.picker import Grant, Picker, RequestEnd
from baton_router.workers.worker import ACCEPTING, Worker, WorkerStatus

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between two checks of the list of workers."""

_decoder = msgspec.msgpack.Decoder(FrontendMessage)


class SchedulerService:
    """Serves one Picker to frontends."""

    def __init__(
        self, picker: Picker, workers: Callable[[], tuple[Worker, ...]], clock: Callable[[], float]
    ) -> None:
        self._picker = picker
        self._workers = workers
        self._clock = clock
        self._frontends: set[_FrontendConnection] = set()
        self._registry: tuple[RegisteredWorker, ...] = ()
        self._down_since: dict[str, float] = {}

    async def serve(self, path: str, background: BackgroundTasks) -> None:
        """Listen until cancelled. The socket of an earlier process is replaced."""
        loop = asyncio.get_running_loop()
        with suppress(FileNotFoundError):
            os.unlink(path)
        server = await loop.create_unix_server(lambda: _FrontendConnection(self), path)
        try:
            while True:
                with background.guard(BackgroundTask.SCHEDULER_SERVICE):
                    self._publish_workers(loop.time())
                await asyncio.sleep(POLL_S)
        finally:
            server.close()
            for frontend in list(self._frontends):
                frontend.transport.abort()

    def metrics(self) -> dict[str, list[MetricFamily]]:
        """The last metrics of each frontend."""
        return {
            f"front-{number}": frontend.families
            for number, frontend in enumerate(sorted(self._frontends, key=lambda one: one.number))
        }

    def add(self, frontend: _FrontendConnection) -> None:
        self._frontends.add(frontend)
        frontend.send(WorkerRegistry(self._registry))

    def remove(self, frontend: _FrontendConnection) -> None:
        self._frontends.discard(frontend)

    @property
    def picker(self) -> Picker:
        return self._picker

    def _publish_workers(self, now: float) -> None:
        registry = tuple(self._entry(worker, now) for worker in self._workers())
        if registry != self._registry:
            self._registry = registry
            for frontend in self._frontends:
                frontend.send(WorkerRegistry(registry))

    def _entry(self, worker: Worker, now: float) -> RegisteredWorker:
        state = worker.state(self._clock())
        if state is not WorkerStatus.DOWN:
            self._down_since.pop(worker.name, None)
        elif worker.name not in self._down_since:
            self._down_since[worker.name] = now
        return RegisteredWorker(
            worker.name,
            state in ACCEPTING,
            self._down_since.get(worker.name, 0.0),
            worker.expired,
            worker.upstream.secure,
        )


class _FrontendConnection(LinkProtocol):
    """The connection of one frontend."""

    _count = 0

    def __init__(self, service: SchedulerService) -> None:
        super().__init__()
        self._service = service
        self._picks: dict[int, asyncio.Task[None]] = {}
        self._granted: dict[int, Grant] = {}
        """By the frontend's numbers; grants have the scheduler's."""
        self.families: list[MetricFamily] = []
        _FrontendConnection._count += 1
        self.number = _FrontendConnection._count

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._service.add(self)

    def on_frame(self, frame: memoryview) -> None:
        message = _decoder.decode(frame)
        picker = self._service.picker
        match message:
            case PickMessage():
                self._picks[message.number] = self._loop.create_task(self._pick(message))
                self._loop.call_soon(self._send_queued, message.number)  # after the task's first step
            case AnswerBegan():
                picker.began(self._granted[message.number], message.report)
            case WorkerFailed():
                picker.failed(self._granted[message.number], message.loss)
            case WorkerFull():
                picker.full(self._granted[message.number])
            case RequestReleased():
                self._release(message)
            case FrontendMetrics():
                self.families = message.families

    def on_closed(self) -> None:
        self._service.remove(self)
        for task in self._picks.values():
            task.cancel()
        for grant in self._granted.values():
            self._service.picker.release(grant, RequestEnd(complete=False))
        self._granted.clear()

    async def _pick(self, message: PickMessage) -> None:
        number = message.number
        try:
            grant = await self._service.picker.pick(message.request)
        except BatonError as error:
            self.send(link.rejection_of(number, error))
        except Exception:
            log.exception("The scheduler failed to choose workers for a request.")
            self.send(link.rejection_of(number, InternalError()))
        else:
            self._granted[number] = grant
            self.send(PickGranted(msgspec.structs.replace(grant, number=number)))
        finally:
            del self._picks[number]

    def _send_queued(self, number: int) -> None:
        if number in self._picks:
            self.send(PickQueued(number))

    def _release(self, message: RequestReleased) -> None:
        task = self._picks.get(message.number)
        if task is not None:
            task.cancel()
        grant = self._granted.pop(message.number, None)
        if grant is not None:
            self._service.picker.release(grant, message.end)
