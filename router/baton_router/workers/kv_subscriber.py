"""
Listening to the KV events of all workers that publish some: sockets and tasks around `kv_feed`.

A worker's reported load has the endpoint of its events. One task per worker process reads the events,
requests lost ones, and logs when none arrive; a restarted process gets a new task.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from baton_api.background import BackgroundTasks
from baton_api.errors import BatonError
from baton_api.kv_events import REPLAY_END, EventBatch, Frames, SnapshotFrame, sequence_bytes
from baton_api.metrics import BackgroundTask
from baton_api.workers import EngineKind, Load
from baton_http.upstream import request_head
from baton_router.cache.block_map import Tree
from baton_router.cache.kv_feed import FeedRequest, KvEventFeed
from baton_router.cache.token_blocks import TokenBlockSink
from baton_router.engines.heads import WorkerCredentials
from baton_router.engines.registry import ENGINES
from baton_router.settings import RouterSettings
from baton_router.workers.worker import Worker
from baton_router.workers.worker_list import Workers
from baton_router.workers.worker_state import WorkerStates

log = logging.getLogger(__name__)

CHECK_S = 0.5
"""Seconds between two checks of which workers publish, and of what is due."""

SNAPSHOT_S = 30.0

RETRY_S = 10.0
"""Seconds after which a feed that cannot be followed at all is tried again."""

QUEUE_LIMIT = 10_000
"""Batches that wait to be read; further ones are lost, and requested again."""

MESSAGE_LIMIT = 64 * 1024**2
"""Bytes of one message."""

YIELD_EVERY = 64
"""Batches that are read before the other tasks have their turn."""

_batches = msgspec.msgpack.Decoder(EventBatch)
_frames = msgspec.msgpack.Decoder(SnapshotFrame)


class KvSubscribers:
    """The feeds of all workers. `watch` runs as long as the router."""

    def __init__(
        self,
        workers: Workers,
        worker_states: WorkerStates,
        settings: RouterSettings,
        clock: Callable[[], float],
        background: BackgroundTasks,
    ) -> None:
        self._workers = workers
        self._worker_states = worker_states
        self._trust = WorkerCredentials.of(settings)
        self._clock = clock
        self._background = background
        self.subscribers: dict[str, KvSubscriber] = {}
        """By the worker's name."""

    async def watch(self) -> None:
        context = zmq.asyncio.Context()
        try:
            while True:
                with self._background.guard(BackgroundTask.KV_EVENTS):
                    self._tend(context)
                await asyncio.sleep(CHECK_S)
        finally:
            await asyncio.gather(*(subscriber.end() for subscriber in self.subscribers.values()))
            self.subscribers.clear()
            context.destroy(linger=0)

    def _tend(self, context: zmq.asyncio.Context) -> None:
        workers = {worker.name: worker for worker in self._workers.listed}
        for name, subscriber in list(self.subscribers.items()):
            worker = workers.get(name)
            if worker is None or not subscriber.follows(worker, self._worker_states):
                subscriber.cancel()
                del self.subscribers[name]
        for name, worker in workers.items():
            load = worker.health.load
            if load is not None and load.kv_events and name not in self.subscribers:
                with self._background.guard(BackgroundTask.KV_EVENTS, name):
                    subscriber = KvSubscriber(
                        worker, load, self._worker_states, self._trust, self._clock, self._background
                    )
                    self.subscribers[name] = subscriber
                    subscriber.start(context)


class KvSubscriber:
    """The feed of one process."""

    def __init__(
        self,
        worker: Worker,
        load: Load,
        worker_states: WorkerStates,
        trust: WorkerCredentials,
        clock: Callable[[], float],
        background: BackgroundTasks,
    ) -> None:
        self.worker = worker
        self.state = worker_states.of(worker)
        self.events = 0
        self.lag_s = 0.0
        """Seconds from the creation of the last batch at the worker to its arrival, if their clocks agree."""
        self._trust = trust
        self._clock = clock
        self._background = background
        self._events_at, self._replay_at = load.kv_events, load.kv_replay
        kind = f"{load.engine} {load.model} {load.compatibility}"
        self._blocks = worker_states.blocks.open(self.state.slot, kind)
        self._named_by_tokens = load.engine is not EngineKind.BATON
        """Whether the events are those of another engine: without heartbeats and snapshots."""
        cleared = ENGINES[load.engine].cleared_tiers
        sink = TokenBlockSink(self._blocks, cleared) if self._named_by_tokens else self._blocks
        self.feed = KvEventFeed(sink, clock(), heartbeats=not self._named_by_tokens)
        self._begun = False
        self._task: asyncio.Task[None] | None = None

    def follows(self, worker: Worker, worker_states: WorkerStates) -> bool:
        """Whether the worker is still the process that this one follows, and following it has not failed."""
        load = worker.health.load
        same = (
            load is not None and load.kv_events == self._events_at and worker_states.of(worker) is self.state
        )
        return same and self._task is not None and not self._task.done()

    def start(self, context: zmq.asyncio.Context) -> None:
        self._task = asyncio.create_task(self._run(context), name=f"KV events of {self.worker.name}")

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def end(self) -> None:
        self.cancel()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, context: zmq.asyncio.Context) -> None:
        with (
            self._background.guard(BackgroundTask.KV_EVENTS, f"{self.worker.name} at {self._events_at}"),
            context.socket(zmq.SUB) as events,
            context.socket(zmq.DEALER) as replays,
        ):
            self._connect(events, replays)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(events, self._take))
                group.create_task(self._read(replays, self._replayed))
                group.create_task(self._ask(replays))
        self.state.degraded = True  # it ends only by an exception
        await asyncio.sleep(RETRY_S)

    def _connect(self, events: zmq.asyncio.Socket, replays: zmq.asyncio.Socket) -> None:
        for one in (events, replays):
            one.set_hwm(QUEUE_LIMIT)
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.IPV6, 1)
            one.setsockopt(zmq.MAXMSGSIZE, MESSAGE_LIMIT)
        events.setsockopt(zmq.SUBSCRIBE, b"")
        host = self.worker.upstream.host
        events.connect(reachable_at(self._events_at, host))
        if self._replay_at:
            replays.connect(reachable_at(self._replay_at, host))

    async def _read(self, source: zmq.asyncio.Socket, take: Callable[[list[bytes]], None]) -> None:
        count = 0
        while True:
            take(await source.recv_multipart())
            count += 1
            if count % YIELD_EVERY == 0:
                await asyncio.sleep(0)  # messages that have arrived are returned without yielding

    def _replayed(self, frames: list[bytes]) -> None:
        if len(frames) >= 2 and frames[-2] == REPLAY_END:
            self.feed.replay_ended(self._clock())
        else:
            self._take(frames)

    def _take(self, frames: list[bytes]) -> None:
        """Take a message, which ends with number and batch. A batch that cannot be decoded counts as lost."""
        try:
            *_, number, message = frames
            batch = _batches.decode(message)
        except ValueError:  # msgspec's are ValueErrors
            return
        self.feed.batch(int.from_bytes(number), batch.events, self._clock())
        self.events += len(batch.events)
        self.lag_s = max(0.0, time.time() - batch.ts)

    async def _ask(self, replays: zmq.asyncio.Socket) -> None:
        """Request what is due, and record whether the feed is degraded."""
        while True:
            now = self._clock()
            due = self.feed.due(now)
            if due is FeedRequest.SNAPSHOT:
                await self._snapshot()
            elif due is FeedRequest.REPLAY and self._replay_at:
                await replays.send_multipart([b"", sequence_bytes(self.feed.next)])
            elif due is FeedRequest.REPLAY:
                self.feed.replay_ended(now)
            degraded = self.feed.degraded(now)
            if degraded is not self.state.degraded:
                self.state.degraded = degraded
                if degraded:
                    log.warning("No KV events from %s: its cached prefixes count half.", self.worker.title)
                else:
                    log.info("KV events from %s have resumed.", self.worker.title)
            await asyncio.sleep(CHECK_S)

    async def _snapshot(self) -> None:
        if self._named_by_tokens:
            if self._begun or not self._replay_at:
                self.feed.restart(self._clock())
            else:
                self.feed.snapshot(-1, {}, self._clock())  # the first batch makes it ask for all before it
            self._begun = True
            return
        try:
            async with asyncio.timeout(SNAPSHOT_S):
                seq, tree = await self._fetch()
        except (BatonError, TimeoutError, ValueError) as error:
            self.feed.failed(self._clock())
            log.debug("No snapshot of %s: %r", self.worker.name, error)
        else:
            self.feed.snapshot(seq, tree, self._clock())

    async def _fetch(self) -> tuple[int, Tree]:
        """All blocks, and the number of the last batch that is in. Raises what `_snapshot` catches."""
        worker, tree = self.worker, Tree()
        head = request_head("GET", "/kv/snapshot", [("host", worker.name), *self._trust.headers])
        exchange = await worker.upstream.request(head)
        try:
            if exchange.status != 200:
                raise ValueError(f"status {exchange.status}")
            frames = Frames()
            while piece := await exchange.read():
                for message in frames.push(piece):
                    frame = _frames.decode(message)
                    if frame.epoch != self.state.epoch:
                        raise ValueError("another process's")
                    tree.update(frame.blocks)
                    if frame.last:
                        return frame.seq, tree
                    await asyncio.sleep(0)
            raise ValueError("it ends too soon")
        finally:
            exchange.close()


def reachable_at(endpoint: str, host: str) -> str:
    """
    The address at which an endpoint of a worker on `host` is reachable.

    >>> reachable_at("tcp://0.0.0.0:5557", "10.0.0.7"), reachable_at("ipc:///run/kv", "localhost")
    ('tcp://10.0.0.7:5557', 'ipc:///run/kv')
    """
    for all_addresses in ("tcp://0.0.0.0:", "tcp://*:", "tcp://[::]:"):
        if endpoint.startswith(all_addresses):
            named = f"[{host}]" if ":" in host else host
            return f"tcp://{named}:{endpoint.removeprefix(all_addresses)}"
    return endpoint
