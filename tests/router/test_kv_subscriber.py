"""KV events over real sockets: from a publisher to what the router believes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from baton_api import headers, metrics
from baton_api.background import BackgroundTasks
from baton_api.hashing import block_hashes, root_hash
from baton_api.kv_events import BlockStored, SnapshotFrame, block_number, frame, sequence_bytes
from baton_api.prompt_report import PromptReport
from baton_api.workers import EngineKind, Role
from baton_engine.kv.events import Change, Removed, Stored
from baton_engine.kv.publisher import KvPublisher
from baton_http.upstream import Upstream
from baton_router.cache.block_map import Tree
from baton_router.cache.kv_feed import SILENCE_S
from baton_router.cache.prompt_chunks import PromptChunks, PromptMessage, chunk_messages, root_name
from baton_router.cache.tiers import MEDIA, Tier
from baton_router.cache.token_blocks import prompt_tail
from baton_router.settings import RouterSettings
from baton_router.workers.kv_subscriber import KvSubscribers, reachable_at
from baton_router.workers.worker import Worker
from baton_router.workers.worker_list import Workers
from baton_router.workers.worker_state import WorkerStates
from tests.router.fake_worker import FakeWorker, WorkerRequest, plain, whole_answer
from tests.router.running import CONNECT_S, running_router, until

SIZE = 4
ROOT = root_hash()


def chain(seed: int, blocks: int) -> list[bytes]:
    return block_hashes([seed, *range(SIZE * blocks - 1)], SIZE, ROOT)


def storing(names: Sequence[bytes]) -> list[Change]:
    return [Stored(name, parent, ()) for name, parent in zip(names, [ROOT, *names], strict=False)]


def as_tree(names: Sequence[bytes]) -> Tree:
    numbers = [block_number(name) for name in names]
    return dict(zip(numbers, [None, *numbers], strict=False))


class Telling:
    """A fake worker with a real publisher, and a snapshot that a test sets."""

    def __init__(self, worker: FakeWorker, publisher: KvPublisher) -> None:
        self.http = worker
        self.publisher = publisher
        self.held: Tree = {}
        self.requests = 0
        worker.pages["/kv/snapshot"] = self._snapshot
        self.at(publisher.endpoint, publisher.replay_endpoint)

    def at(self, events: str, replay: str, epoch: str = "1") -> None:
        self.http.load = msgspec.structs.replace(
            self.http.load, kv_events=events, kv_replay=replay, epoch=epoch, block_size=SIZE
        )

    def publish(self, changes: Sequence[Change]) -> None:
        for change in changes:
            number = block_number(change.name)
            if isinstance(change, Stored):
                self.held[number] = None if change.parent == ROOT else block_number(change.parent)
            else:
                del self.held[number]
        self.publisher.publish(changes)

    def _snapshot(self) -> bytes:
        self.requests += 1
        epoch, seq = self.http.load.epoch, self.publisher.last
        parts = [list(self.held.items()), []]
        frames = [SnapshotFrame(epoch, seq, SIZE, part, not part) for part in parts]
        return b"".join(frame(msgspec.msgpack.encode(one)) for one in frames)


@asynccontextmanager
async def telling(worker: FakeWorker, **given: Any) -> AsyncIterator[Telling]:
    publisher = KvPublisher("tcp://127.0.0.1:0", **{"block_size": SIZE, "heartbeat_s": 0.05} | given)
    publisher.start()
    try:
        yield Telling(worker, publisher)
    finally:
        publisher.close()


class FollowedWorker:
    """Feeds of one worker, at a clock that the test moves."""

    def __init__(self, http: FakeWorker) -> None:
        self.http = http
        self.now = 0.0
        self.worker = Worker(Upstream("127.0.0.1", http.port, CONNECT_S), Role.DECODE)
        self.worker.answered(http.load)
        self.worker_states = WorkerStates()
        self.background = BackgroundTasks()
        self.kv_subscribers = KvSubscribers(
            Workers((self.worker,), ()),
            self.worker_states,
            RouterSettings(),
            lambda: self.now,
            self.background,
        )

    @property
    def tree(self) -> Tree:
        subscriber = self.kv_subscribers.subscribers.get(self.worker.name)
        return subscriber._blocks.tree if subscriber is not None else {}

    @property
    def heard(self) -> bool:
        """Whether a batch has come, be it an empty one."""
        subscriber = self.kv_subscribers.subscribers.get(self.worker.name)
        return subscriber is not None and subscriber.lag_s > 0

    @property
    def gaps(self) -> int:
        return self.kv_subscribers.subscribers[self.worker.name].feed.gaps


@asynccontextmanager
async def followed(http: FakeWorker) -> AsyncIterator[FollowedWorker]:
    followed = FollowedWorker(http)
    watching = asyncio.create_task(followed.kv_subscribers.watch())
    try:
        yield followed
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        followed.worker.upstream.close()


class Lossy:
    """Passes a publisher's messages on, but for those that a test has lost."""

    def __init__(self, source: KvPublisher) -> None:
        self.lose: set[int] = set()
        self._context = zmq.asyncio.Context()
        self._in = self._context.socket(zmq.SUB)
        self._in.setsockopt(zmq.SUBSCRIBE, b"")
        self._in.connect(source.endpoint)
        self._out = self._context.socket(zmq.PUB)
        self._out.bind("tcp://127.0.0.1:0")
        self.endpoint = self._out.getsockopt_string(zmq.LAST_ENDPOINT)
        self._task = asyncio.create_task(self._pass())

    async def _pass(self) -> None:
        while True:
            topic, seq, batch = await self._in.recv_multipart()
            number = int.from_bytes(seq)
            if number not in self.lose:
                await self._out.send_multipart([topic, seq, batch])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)


@asynccontextmanager
async def lossy(source: KvPublisher) -> AsyncIterator[Lossy]:
    relay = Lossy(source)
    try:
        yield relay
    finally:
        await relay.close()


async def test_existing_and_new_blocks_are_known() -> None:
    async with FakeWorker() as http, telling(http) as worker:
        worker.publish(storing(chain(1, 3)))
        async with followed(http) as router:
            await until(lambda: router.tree == as_tree(chain(1, 3)))
            more = chain(2, 5)
            worker.publish(storing(more))
            worker.publish([Removed(chain(1, 3)[2])])
            await until(lambda: router.tree == as_tree(chain(1, 2)) | as_tree(more))
            assert worker.requests == 1


@pytest.mark.parametrize("remembered", [True, False])
async def test_lost_events_are_replayed_or_read_as_a_snapshot(remembered: bool) -> None:
    async with FakeWorker() as http, telling(http) as worker, lossy(worker.publisher) as relay:
        worker.at(relay.endpoint, worker.publisher.replay_endpoint if remembered else "")
        async with followed(http) as router:
            await until(lambda: router.heard)
            worker.publish(storing(chain(1, 3)))
            await until(lambda: router.tree == as_tree(chain(1, 3)))
            before = worker.requests
            relay.lose = set(range(worker.publisher.last + 1, worker.publisher.last + 4))
            worker.publish([Removed(chain(1, 3)[2])])
            worker.publish(storing(chain(2, 2)))
            await until(lambda: router.gaps == 1)
            await until(lambda: router.tree == as_tree(chain(1, 2)) | as_tree(chain(2, 2)))
            assert worker.requests == before + (not remembered)


async def test_restarted_process_holds_no_earlier_blocks() -> None:
    async with FakeWorker() as http, telling(http) as worker:
        worker.publish(storing(chain(1, 3)))
        async with followed(http) as router:
            await until(lambda: router.tree == as_tree(chain(1, 3)))
            async with telling(http) as second:
                second.at(second.publisher.endpoint, second.publisher.replay_endpoint, epoch="2")
                router.worker.answered(http.load)
                await until(lambda: second.requests and router.tree == {})
                second.publish(storing(chain(7, 2)))
                await until(lambda: router.tree == as_tree(chain(7, 2)))


async def test_snapshot_of_another_process_is_ignored() -> None:
    async with FakeWorker() as http, telling(http) as worker:
        worker.publish(storing(chain(1, 3)))
        async with followed(http) as router:
            http.load = msgspec.structs.replace(http.load, epoch="2")  # not seen by the router yet
            await until(lambda: worker.requests)
            await asyncio.sleep(0)
            assert router.tree == {}
            router.worker.answered(http.load)
            await until(lambda: router.tree == as_tree(chain(1, 3)))


async def test_silent_worker_counts_half_until_events_arrive() -> None:
    async with FakeWorker() as http, telling(http, heartbeat_s=60) as worker, followed(http) as router:
        state = router.worker_states.of(router.worker)
        await until(lambda: worker.requests)
        await until(lambda: router.kv_subscribers.subscribers[router.worker.name].feed.whole)
        assert state.cache_weight == 1.0
        router.now += SILENCE_S + 1
        await until(lambda: state.degraded)
        assert state.cache_weight == 0.5

        def recovered() -> bool:
            worker.publish([])
            return not state.degraded

        await until(recovered)


async def test_invalid_endpoint_is_logged_once_and_counts_half(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with FakeWorker() as http:
        http.load = msgspec.structs.replace(http.load, kv_events="nonsense")
        async with followed(http) as router:
            await until(lambda: router.worker_states.of(router.worker).degraded)
            assert ["nonsense" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("endpoint", "host", "at"),
    [
        ("tcp://127.0.0.1:5557", "10.0.0.7", "tcp://127.0.0.1:5557"),
        ("tcp://0.0.0.0:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://[::]:5557", "fd00::7", "tcp://[fd00::7]:5557"),
        ("ipc:///run/kv", "10.0.0.7", "ipc:///run/kv"),
    ],
)
def test_wildcard_endpoint_is_reached_at_the_host_of_the_worker(endpoint: str, host: str, at: str) -> None:
    assert reachable_at(endpoint, host) == at


async def test_tiers_of_a_vllm_worker_are_known_from_its_events() -> None:
    context = zmq.asyncio.Context()
    async with FakeWorker() as http:
        with context, context.socket(zmq.PUB) as publisher:
            publisher.setsockopt(zmq.LINGER, 0)
            port = publisher.bind_to_random_port("tcp://127.0.0.1")
            http.load = msgspec.structs.replace(
                http.load, engine=EngineKind.VLLM, kv_events=f"tcp://127.0.0.1:{port}", block_size=SIZE
            )
            number = 0

            async def publish(*events: dict[str, Any]) -> None:
                nonlocal number
                frames = [b"", sequence_bytes(number), msgspec.msgpack.encode([0.0, events, None])]
                await publisher.send_multipart(frames)
                number += 1

            tokens = list(range(2 * SIZE))
            stored: dict[str, Any] = {"type": "BlockStored", "block_hashes": [7, 8]}
            stored["parent_block_hash"] = None
            stored |= {"token_ids": tokens, "block_size": SIZE, "lora_id": None, "lora_name": None}
            async with followed(http) as router:
                while not router.heard:
                    await publish()
                    await asyncio.sleep(0.01)
                feed = router.kv_subscribers.subscribers[router.worker.name].feed
                await until(lambda: feed.whole)
                await publish(stored | {"medium": "GPU"}, stored | {"medium": "CPU", "group_idx": 0})
                prompt = PromptChunks((1, 2), (512, 1024))
                states = router.worker_states
                slot = states.of(router.worker).slot
                await until(lambda: len(router.tree) == 2)
                states.blocks.place(prompt, int(prompt_tail(tokens, SIZE), 16), 2, 0, [slot])
                await publish({"type": "BlockRemoved", "block_hashes": [8, 7], "medium": "GPU"})
                await until(lambda: router.tree == {})
                assert states.reach(prompt) == {slot: [(Tier.MEMORY, 1024)]}
                await publish(stored | {"medium": "STORAGE", "locality": "REMOTE"})
                other = states.blocks.open(slot + 1)  # of another kind
                other.apply([BlockStored([1], None, [], SIZE, medium=MEDIA[Tier.SHARED])])
                await until(lambda: states.tier_chunks.get(Tier.SHARED) == 2)
                assert list(states.reach(prompt)) == [slot]


async def test_evicted_blocks_are_not_expected_at_the_worker() -> None:
    """The whole way: a request, its report, an eviction, and what the metrics say of it."""
    names = chain(3, 40)
    report = PromptReport(
        tokens=SIZE * 40 + 1, cached=0, held=0, queue_s=0.0, compute_s=0.1, transfer_s=0.0, remote=False,
        tail=f"{block_number(names[-1]):016x}",
    )  # fmt: skip

    async def answer(worker: FakeWorker, before: WorkerRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(200, whole_answer(), (headers.PROMPT, report.encode())))

    async with FakeWorker(answer) as http, telling(http) as worker, running_router([http]) as running:
        router = running.router
        name, feeds = router.workers.all[0].name, router.scheduler.kv_subscribers
        await until(lambda: name in feeds.subscribers and feeds.subscribers[name].feed.whole)
        worker.publish(storing(names))
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 5120}]}
        assert (await running.post(body)).status_code == 200
        prompt = chunk_messages([PromptMessage("user", "x" * 5120)], None, root_name("", "tiny"))
        states = router.scheduler.planner.worker_states
        await until(lambda: len(states.blocks) == 10)
        assert list(states.held(prompt, states.match(prompt)).values()) == [5120]
        worker.publish([Removed(name) for name in reversed(names[10:])])

        def held() -> list[int]:
            return list(states.held(prompt, states.match(prompt)).values())

        await until(lambda: held() == [1024])  # 10 of 40 blocks
        assert running.metric(metrics.ROUTER_INDEX_CHUNKS.name) == 2
        assert running.metric(metrics.ROUTER_KV_EVENTS.name, worker=name) >= 2
        assert running.metric(metrics.ROUTER_KV_DEGRADED.name, worker=name) == 0
        assert running.metric(metrics.ROUTER_CACHE_ACCURACY.name, worker=name) == 1
        assert 0 <= running.metric(metrics.ROUTER_KV_LAG.name, worker=name) < 60
    assert not [one for one in threading.enumerate() if one.name == "baton-kv-events"]
