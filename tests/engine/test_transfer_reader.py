"""The transfer thread against an agent whose every step the test decides: no library, no other process."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton_api.errors import TransferFailed
from baton_api.messages import PoolLayout
from baton_engine.transfer import Pulled
from baton_engine.transfer.pool_reader import SLICE_BYTES
from baton_engine.transfer.reader import KNOWN_LIMIT, WINDOW, AgentError, BlockReader, Read
from baton_engine.transfer.reads import PullFuture, runs, slices
from tests.decode.pair import TIMEOUT_S, eventually

POOL = PoolLayout(address=4096, block_bytes=10, blocks=1000)
POOLS = (POOL,)


@dataclass(eq=False, slots=True)
class Handle:
    """A slice, as the agent sees it. The test says how it fares."""

    peer: str
    remote: list[int]
    state: str = "new"  # new, in progress, done, failed


@dataclass(slots=True)
class FakeAgent:
    """Obeys the rules of NIXL and notes who breaks them. `fate` decides the state of what is posted."""

    fate: Callable[[Handle], str] = lambda handle: "in progress"
    handles: list[Handle] = field(default_factory=list)
    connected: set[str] = field(default_factory=set)
    removed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    looks: int = 0
    closed: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, metadata: bytes) -> str:
        if metadata == b"bad":
            raise AgentError("bad metadata")
        self.connected.add(metadata.decode())
        return metadata.decode()

    def prepare(self, peer: str, pools: tuple[PoolLayout, ...]) -> Any:
        if pools[0].address == 1:
            raise AgentError("not its memory")
        return peer

    def make(self, theirs: Any, remote: Sequence[int], local: Sequence[int]) -> Handle:
        return Handle(theirs, list(remote))

    def post(self, handle: Handle) -> bool:
        handle.state = self.fate(handle)
        with self.changed:
            self.handles.append(handle)
            self.changed.notify_all()
        if handle.state == "failed":
            raise AgentError("cut off")
        return handle.state == "done"

    def done(self, handle: Handle) -> bool:
        self.looks += 1
        if handle.state == "failed":
            raise AgentError("cut off")
        return handle.state == "done"

    def release(self, handle: Handle) -> None:
        if handle.state == "in progress":
            self.broken.append(f"released in progress: {handle}")
        self.handles.remove(handle)

    def remove(self, peer: str, blocks: Any) -> None:
        if any(handle.peer == peer and handle.state == "in progress" for handle in self.handles):
            self.broken.append(f"removed with a read under way: {peer}")
        self.connected.discard(peer)
        self.removed.append(peer)

    def progress(self) -> None:
        self.looks += 1

    def transport(self, pools: tuple[PoolLayout, ...], copied: bool) -> str:
        return "copied" if copied else "sent"

    def close(self) -> None:
        self.closed.set()

    async def posted(self, count: int) -> list[Handle]:
        """The handles, once there are `count`."""

        def wait() -> list[Handle]:
            with self.changed:
                assert self.changed.wait_for(lambda: len(self.handles) >= count, TIMEOUT_S)
                return self.handles.copy()

        return await asyncio.to_thread(wait)


class Bench:
    """A reader over a fake agent."""

    def __init__(self) -> None:
        self.agent = FakeAgent()
        self.reader = BlockReader(self.agent)

    async def connect(
        self, peer: str, near: bool = False, epoch: str = "1", pools: tuple[PoolLayout, ...] = POOLS
    ) -> str:
        return await self.reader.call(lambda: self.reader.connect(peer.encode(), pools, epoch, near))

    async def disconnect(self, peer: str) -> None:
        await self.reader.call(lambda: self.reader.disconnect(peer))

    def pull(self, peer: str, blocks: Sequence[int], per_slice: int = 1) -> PullFuture:
        end = PullFuture()
        read = Read(
            peer=peer,
            bytes=len(blocks) * POOL.block_bytes,
            end=end,
            waiting=deque(slices(blocks, blocks, per_slice)),
            sample=(list(blocks[:1]), list(blocks[:1])),
        )
        self.reader.post(lambda: self.reader.begin(read))
        return end

    async def turn(self) -> None:
        """Return when the thread has looked at every read at least once again."""
        for _ in range(2):
            await self.reader.call(lambda: None)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.reader.stop()
    for handle in bench.agent.handles.copy():
        handle.state = "failed"
    assert bench.reader.join(TIMEOUT_S)
    assert bench.agent.closed.is_set()
    assert not bench.agent.broken


async def failure(end: PullFuture) -> str:
    with pytest.raises(TransferFailed) as caught:
        await asyncio.wait_for(end.settled(), TIMEOUT_S)
    return str(caught.value)


async def success(end: PullFuture) -> Pulled:
    return await asyncio.wait_for(end.settled(), TIMEOUT_S)


async def test_reader_slices_under_way_are_bounded(bench: Bench) -> None:
    await bench.connect("p")
    end = bench.pull("p", range(20))
    first = await bench.agent.posted(WINDOW)
    assert WINDOW * SLICE_BYTES == 64 * 1024 * 1024, "beside a busy Python thread, 16 MiB lasted half as long"
    await bench.turn()
    assert len(bench.agent.handles) == WINDOW
    first[0].state = "done"
    await bench.turn()
    assert [handle.remote for handle in bench.agent.handles] == [[block] for block in range(1, WINDOW + 1)]
    bench.agent.fate = lambda handle: "done"
    for handle in bench.agent.handles.copy():
        handle.state = "done"
    assert (await success(end)).bytes == 200


async def test_reads_that_are_done_where_they_are_posted_take_turns(bench: Bench) -> None:
    order: list[int] = []

    def copy(handle: Handle) -> str:
        order.append(handle.remote[0])
        return "done"

    bench.agent.fate = copy
    await bench.connect("p")
    ends = await bench.reader.call(lambda: [bench.pull("p", range(begin, begin + 5)) for begin in (0, 100)])
    await asyncio.gather(*(success(end) for end in ends))
    assert order == [block for pair in zip(range(5), range(100, 105), strict=True) for block in pair]


async def test_reader_read_ends_only_when_each_slice_has_ended(bench: Bench) -> None:
    await bench.connect("p")
    end = bench.pull("p", range(3))
    handles = await bench.agent.posted(3)
    handles[1].state = "failed"
    await bench.turn()
    assert not end.settled().done(), "two slices may still be writing"
    handles[0].state = "done"
    handles[2].state = "failed"
    assert "cut off" in await failure(end)


async def test_reader_failure_ends_the_peer_and_its_pending_reads(bench: Bench) -> None:
    await bench.connect("p")
    ends = [bench.pull("p", range(100)), bench.pull("p", range(200, 300))]
    handles = await bench.agent.posted(2 * WINDOW)
    handles[0].state = "failed"
    await bench.turn()
    assert "gone" in await failure(bench.pull("p", [1]))
    with pytest.raises(TransferFailed, match="has failed before, or is from an earlier start"):
        await bench.connect("p")
    for handle in bench.agent.handles.copy():
        handle.state = "failed"
    for end in ends:
        await failure(end)
    assert bench.agent.removed == ["p"]
    await bench.connect("p")  # once nothing is under way, it may try again


async def test_reader_disconnected_peer_is_read_to_the_end(bench: Bench) -> None:
    await bench.connect("p")
    end = bench.pull("p", [1])
    (handle,) = await bench.agent.posted(1)
    await bench.disconnect("p")
    assert "gone" in await failure(bench.pull("p", [2]))
    handle.state = "done"
    assert (await success(end)).bytes == 10


async def test_reader_peer_is_removed_after_its_last_disconnect(bench: Bench) -> None:
    bench.agent.fate = lambda handle: "done"
    await bench.connect("p")
    await bench.connect("p")
    await bench.disconnect("p")
    await success(bench.pull("p", [1]))
    await bench.disconnect("p")
    await bench.disconnect("p")
    assert "gone" in await failure(bench.pull("p", [1]))


async def test_reader_unused_peers_are_removed_beyond_a_limit(bench: Bench) -> None:
    for number in range(KNOWN_LIMIT + 5):
        await bench.connect(f"p{number}")
        await bench.disconnect(f"p{number}")
    assert bench.agent.removed == [f"p{number}" for number in range(5)]


async def test_reader_rejected_metadata_or_pool_fails_the_connect(bench: Bench) -> None:
    with pytest.raises(TransferFailed, match="bad metadata"):
        await bench.connect("bad")
    with pytest.raises(TransferFailed, match="not its memory"):
        await bench.connect("p", pools=(PoolLayout(address=1, block_bytes=10, blocks=10),))
    assert bench.agent.removed == ["p"]


async def test_another_epoch_of_a_known_name_is_refused(bench: Bench) -> None:
    await bench.connect("p", epoch="1")
    with pytest.raises(TransferFailed):
        await bench.connect("p", epoch="2")


@pytest.mark.parametrize(
    ("near", "fates", "transport"),
    [
        (True, ["done"], "copied"),
        (True, ["in progress", "done"], "copied"),  # the first includes connection setup
        (True, ["in progress", "in progress", "done"], "copied"),
        (True, ["in progress"], "sent"),
        (True, ["in progress", "done", "in progress", "in progress", "in progress"], "sent"),
        (False, ["done"], "sent"),  # another machine: chance
    ],
)
async def test_reader_transport_is_that_of_most_reads(
    bench: Bench, near: bool, fates: list[str], transport: str
) -> None:
    coming = itertools.chain(fates, itertools.repeat(fates[-1]))

    def fate(handle: Handle) -> str:
        state = next(coming)
        if state == "in progress":
            threading.Timer(0.005, finish, (handle,)).start()
        return state

    def finish(handle: Handle) -> None:
        while handle.state == "new":  # on a busy machine, its fate is written later than this begins
            time.sleep(0.001)
        handle.state = "done"

    bench.agent.fate = fate
    await bench.connect("p", near=near)
    assert (await success(bench.pull("p", [1]))).transport == transport


async def test_reader_thread_is_idle_without_reads(bench: Bench) -> None:
    bench.agent.fate = lambda handle: "done"
    await bench.connect("p")
    await success(bench.pull("p", [1]))
    await bench.turn()
    before = bench.agent.looks
    await asyncio.sleep(0.05)
    assert bench.agent.looks == before
    await bench.reader.call(lambda: bench.reader.serve(1))
    await eventually(lambda: bench.agent.looks > before)
    await bench.reader.call(lambda: bench.reader.serve(-1))


async def test_reader_stop_posts_no_slice_and_waits_for_posted_ones(bench: Bench) -> None:
    await bench.connect("p")
    end = bench.pull("p", range(WINDOW + 6))
    handles = await bench.agent.posted(WINDOW)
    bench.reader.stop()
    assert not bench.reader.join(0.05)
    for handle in handles:
        handle.state = "done"
    assert "closing" in await failure(end)
    assert bench.reader.join(TIMEOUT_S)


@pytest.mark.parametrize("seed", range(30))
async def test_reader_random_faults_settle_each_read_once(bench: Bench, seed: int) -> None:
    chance = random.Random(seed)
    bench.agent.fate = lambda handle: chance.choice(
        ["in progress"] * 6 + ["done"] * 3 + ["failed"] * (seed % 2)
    )
    ends: list[tuple[str, int, PullFuture]] = []
    for _ in range(60):
        peer = f"p{chance.randrange(3)}"
        match chance.randrange(5):
            case 0:
                with suppress(TransferFailed):  # it failed, and something of it is under way
                    await bench.connect(peer, near=chance.random() < 0.5)
            case 1:
                await bench.disconnect(peer)
            case 2 | 3:
                count = chance.randrange(30)
                ends.append((peer, count, bench.pull(peer, range(count), chance.randint(1, 5))))
            case 4:
                for handle in bench.agent.handles.copy():
                    if handle.state == "in progress" and chance.random() < 0.5:
                        handle.state = chance.choice(["done"] * 9 + ["failed"] * (seed % 2))
    bench.agent.fate = lambda handle: "done"
    waiting = asyncio.gather(*(end.settled() for _, _, end in ends), return_exceptions=True)
    while not waiting.done():
        for handle in bench.agent.handles.copy():
            handle.state = "done"
        await bench.turn()
    for (_, count, _), end in zip(ends, await waiting, strict=True):
        assert isinstance(end, TransferFailed) or (isinstance(end, Pulled) and end.bytes == 10 * count)
    for number in range(3):
        await bench.connect(f"p{number}")
        await success(bench.pull(f"p{number}", [1]))


def test_runs_and_slices_cover_the_same_pairs() -> None:
    chance = random.Random(1)
    for _ in range(200):
        count = chance.randrange(20)
        remote = [chance.randrange(8) for _ in range(count)]
        local = [chance.randrange(8) for _ in range(count)]
        pairs = list(zip(remote, local, strict=True))
        spread = [
            (peer_start + i, here + i)
            for peer_start, here, length in runs(remote, local)
            for i in range(length)
        ]
        assert spread == pairs
        cut = [pair for piece in slices(remote, local, 3) for pair in zip(*piece, strict=True)]
        assert cut == pairs
    assert list(runs([4, 5, 6, 1], [0, 1, 2, 3])) == [(4, 0, 3), (1, 3, 1)]
