"""
A Picker whose scheduler is another process, reached over a Unix socket.

The scheduler owns the queue, the classes and the quotas. A request waits here until the scheduler has
acknowledged it: while the scheduler is busy, and while it restarts. The number of requests that wait here is
bounded, and each tenant may only use a share. A request that is not acknowledged in time is rejected. After
a restart of either process, the frontend reconnects and resends the requests that were not granted.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from baton_api.errors import NotReady, Overloaded
from baton_api.prompt_report import PromptReport
from baton_http.link import LinkProtocol
from baton_http.upstream import UpstreamPool
from baton_router.frontends import link
from baton_router.frontends.link import (
    AnswerBegan,
    FrontendMetrics,
    PickGranted,
    PickMessage,
    PickQueued,
    RegisteredWorker,
    RequestReleased,
    SchedulerMessage,
    WorkerFailed,
    WorkerFull,
)
from baton_router.metrics.registry import MetricFamily
from baton_router.requests.picker import UNREACHABLE, Grant, PickRequest, RequestEnd, WorkerLoss
from baton_router.scheduling.admission import QueueCapacity
from baton_router.scheduling.queue import ENTRY_BYTES

log = logging.getLogger(__name__)

RECONNECT_S = 0.1
RECONNECT_LIMIT_S = 1.0

_decoder = msgspec.msgpack.Decoder(SchedulerMessage)


class RemotePicker:
    """Belongs to one event loop. `keep` holds the connection."""

    def __init__(
        self,
        path: str,
        upstreams: UpstreamPool,
        timeout_s: float,
        capacity: QueueCapacity,
        count_rejected: Callable[[str], None],
    ) -> None:
        """
        `capacity` limits requests that wait for the scheduler, for `timeout_s` each.

        `count_rejected` counts rejections by reason: scheduler "away" or "late", or `capacity` "full".
        """
        self._path = path
        self._upstreams = upstreams
        self._timeout_s = timeout_s
        self._capacity = capacity
        self._count_rejected = count_rejected
        self._numbers = itertools.count(1)
        self._wire: _SchedulerConnection | None = None
        self._waiting: dict[int, _PendingPick] = {}
        self._granted: set[int] = set()
        """Numbers of requests that the connected scheduler knows, and must release."""
        self.busy: Counter[str] = Counter()
        """Requests at each worker, by name."""
        self._removed: set[str] = set()
        """Workers that the scheduler no longer lists."""
        self.workers: tuple[RegisteredWorker, ...] = ()
        """As last sent by the scheduler."""
        self.scheduler_known = asyncio.Event()
        """Set with the first list of workers."""

        self._away_since = -math.inf
        """Loop time at which the last connection closed."""

    @property
    def connected(self) -> bool:
        return self._wire is not None

    @property
    def serving(self) -> bool:
        """Whether a new request can expect to be scheduled."""
        return self.connected or asyncio.get_running_loop().time() - self._away_since < self._timeout_s

    async def keep(self) -> None:
        """Stay connected to the scheduler until cancelled."""
        loop = asyncio.get_running_loop()
        pause = RECONNECT_S
        while True:
            try:
                _, wire = await loop.create_unix_connection(lambda: _SchedulerConnection(self), self._path)
            except OSError:
                await asyncio.sleep(pause)
                pause = min(RECONNECT_LIMIT_S, 2 * pause)
                continue
            pause = RECONNECT_S
            try:
                await wire.closed
            finally:
                wire.transport.abort()
            log.warning("The router's scheduler is away; requests wait until it is back.")

    def send_metrics(self, families: Sequence[MetricFamily]) -> None:
        """Send this frontend's metrics to the scheduler."""
        if self._wire is not None:
            self._wire.send(FrontendMetrics(list(families)))

    # The methods of `picker.Picker`.

    async def pick(self, request: PickRequest) -> Grant:
        waiting = _PendingPick(next(self._numbers), request)
        try:
            self._capacity.refuse(waiting)
        except Overloaded:
            self._count_rejected("full")
            raise
        self._waiting[waiting.number] = waiting
        self._occupy(waiting)
        if self._wire is not None:
            self._send(waiting.number, request, self._wire)
        try:
            grant = await waiting.outcome
        except BaseException:
            self._forget(waiting.number)
            if waiting.outcome.done() and not waiting.outcome.cancelled():
                waiting.outcome.exception()  # retrieve it: the caller is gone, and asyncio would warn
            raise
        finally:
            self._vacate(waiting)
            del self._waiting[waiting.number]
        return self._count_grant(grant)

    def began(self, grant: Grant, report: PromptReport | None) -> None:
        if grant.number in self._granted:
            self._send_message(AnswerBegan(grant.number, report))

    def failed(self, grant: Grant, loss: WorkerLoss = UNREACHABLE) -> None:
        if grant.number in self._granted:
            self._send_message(WorkerFailed(grant.number, loss))

    def full(self, grant: Grant) -> None:
        if grant.number in self._granted:
            self._send_message(WorkerFull(grant.number))

    def release(self, grant: Grant, end: RequestEnd) -> None:
        self.busy[grant.decode] -= 1
        if grant.prefill:
            self.busy[grant.prefill] -= 1
        if grant.number in self._granted:
            self._granted.discard(grant.number)
            self._send_message(RequestReleased(grant.number, end))
        if self._removed:
            self._drop_removed()

    # Called by the connection.

    def on_connected(self, wire: _SchedulerConnection) -> None:
        self._wire = wire
        now = asyncio.get_running_loop().time()
        for number, waiting in self._waiting.items():
            if not waiting.outcome.done():
                waited_s = waiting.request.waited_s + now - waiting.since
                self._send(number, msgspec.structs.replace(waiting.request, waited_s=waited_s), wire)

    def on_disconnected(self, wire: _SchedulerConnection) -> None:
        """The connection closed; another scheduler does not know what this one granted or queued."""
        self._wire = None
        self._away_since = asyncio.get_running_loop().time()
        self._granted.clear()
        for waiting in self._waiting.values():
            if waiting.timer is None and not waiting.outcome.done():
                self._occupy(waiting)

    def on_message(self, message: SchedulerMessage) -> None:
        if isinstance(message, link.WorkerRegistry):
            self._on_workers(message.workers)
            return
        number = message.grant.number if isinstance(message, PickGranted) else message.number
        waiting = self._waiting.get(number)
        if waiting is None or waiting.outcome.done():
            return  # it was released, and the scheduler will be notified
        if isinstance(message, PickQueued):
            self._vacate(waiting)
        elif isinstance(message, PickGranted):
            waiting.outcome.set_result(message.grant)
        else:
            self._granted.discard(number)
            waiting.outcome.set_exception(message.error.error())

    def _on_workers(self, workers: tuple[RegisteredWorker, ...]) -> None:
        before = {worker.name: worker for worker in self.workers}
        self.workers = workers
        self.scheduler_known.set()
        for worker in workers:
            previous = before.pop(worker.name, None)
            self._upstreams.set_tls(worker.name, worker.secure)
            if worker.down_since and not (previous and previous.down_since):
                self._upstreams.get(worker.name).fail_silent(worker.down_since)
            if worker.expired and not (previous and previous.expired):
                self._upstreams.get(worker.name).fail_all("drained")
        self._removed.update(before)
        self._removed.difference_update(worker.name for worker in workers)
        self._drop_removed()

    def _drop_removed(self) -> None:
        """Drop removed workers once they have no request here; a new scheduler may list them soon."""
        for name in [name for name in self._removed if not self.busy[name]]:
            self._removed.discard(name)
            del self.busy[name]
            self._upstreams.drop(name)

    def _send(self, number: int, request: PickRequest, wire: LinkProtocol) -> None:
        self._granted.add(number)
        wire.send(PickMessage(number, request))

    def _occupy(self, waiting: _PendingPick) -> None:
        self._capacity.take(waiting)
        waiting.timer = asyncio.get_running_loop().call_later(self._timeout_s, self._give_up, waiting)

    def _vacate(self, waiting: _PendingPick) -> None:
        if waiting.timer is not None:
            waiting.timer.cancel()
            waiting.timer = None
            self._capacity.leave(waiting)

    def _give_up(self, waiting: _PendingPick) -> None:
        if not waiting.outcome.done():
            self._count_rejected("late" if self.connected else "away")
            waiting.outcome.set_exception(
                NotReady(f"The router's scheduler did not answer within {self._timeout_s:g} s.")
            )

    def _count_grant(self, grant: Grant) -> Grant:
        self.busy[grant.decode] += 1
        if grant.prefill:
            self.busy[grant.prefill] += 1
        return grant

    def _forget(self, number: int) -> None:
        """Release a request that no client waits for."""
        if number in self._granted:
            self._granted.discard(number)
            self._send_message(RequestReleased(number, RequestEnd(complete=False)))

    def _send_message(self, message: link.FrontendMessage) -> None:
        if self._wire is not None:
            self._wire.send(message)


class _PendingPick:
    """A request without a grant."""

    __slots__ = ("number", "outcome", "request", "since", "size", "tenant", "timer")

    def __init__(self, number: int, request: PickRequest) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.request = request
        self.tenant = request.tenant
        self.size = request.size + ENTRY_BYTES
        self.since = loop.time()
        self.outcome: asyncio.Future[Grant] = loop.create_future()
        self.timer: asyncio.TimerHandle | None = None
        """Timeout of the acknowledgment, while the request counts against the capacity here."""


class _SchedulerConnection(LinkProtocol):
    """The frontend's end."""

    def __init__(self, picker: RemotePicker) -> None:
        super().__init__()
        self._picker = picker
        self.closed: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._picker.on_connected(self)

    def on_frame(self, frame: memoryview) -> None:
        self._picker.on_message(_decoder.decode(frame))

    def on_closed(self) -> None:
        self._picker.on_disconnected(self)
        if not self.closed.done():
            self.closed.set_result(None)
