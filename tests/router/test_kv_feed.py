"""A feed that loses, doubles and shuffles batches still ends with what the worker holds."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Sequence

import pytest

from baton_api.hashing import block_hashes, root_hash
from baton_api.kv_events import BlockStored, Event
from baton_engine.kv.block_pool import BlockPool
from baton_engine.kv.events import Change, KvEvents, KvSnapshot, events_of
from baton_router.cache.block_map import Tree
from baton_router.cache.kv_feed import BUFFER_LIMIT, REPLAY_S, RETRY_S, SILENCE_S, FeedRequest, KvEventFeed


class View:
    """The router's view: stored blocks by number."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def apply(self, events: Sequence[Event]) -> None:
        for event in events:
            assert isinstance(event, BlockStored)
            self.blocks += event.block_hashes

    def replace(self, tree: Tree) -> None:
        self.blocks = list(tree)


def batch(number: int) -> list[Event]:
    """It stores the block of its own number."""
    return [BlockStored([number], None, [], 16)]


def whole(upto: int) -> Tree:
    return dict.fromkeys(range(upto + 1))


def begun(upto: int = -1) -> tuple[KvEventFeed, View]:
    """A feed that is whole up to that batch."""
    view = View()
    feed = KvEventFeed(view, 0.0)
    assert feed.due(0.0) is FeedRequest.SNAPSHOT
    feed.snapshot(upto, whole(upto), 0.0)
    assert feed.whole and feed.due(0.0) is None
    return feed, view


def test_feed_begins_with_a_snapshot() -> None:
    view = View()
    feed = KvEventFeed(view, 0.0)
    for number in (3, 4, 5):
        feed.batch(number, batch(number), 0.0)
    assert view.blocks == [] and not feed.whole
    assert feed.due(0.0) is FeedRequest.SNAPSHOT
    assert feed.due(0.0) is None  # it was requested once
    feed.snapshot(4, whole(4), 0.1)
    assert view.blocks == [0, 1, 2, 3, 4, 5] and feed.whole and feed.gaps == 0


def test_batches_are_applied_in_order() -> None:
    feed, view = begun(0)
    for number in (1, 2, 3):
        feed.batch(number, batch(number), 1.0)
    assert view.blocks == [0, 1, 2, 3]


def test_earlier_batches_are_not_applied_twice() -> None:
    feed, view = begun(0)
    for number in (1, 1, 0, 2, 1):
        feed.batch(number, batch(number), 1.0)
    assert view.blocks == [0, 1, 2] and feed.whole


def test_gap_is_requested_and_closed_by_a_replay() -> None:
    feed, view = begun(0)
    feed.batch(4, batch(4), 1.0)
    assert feed.due(1.0) is FeedRequest.REPLAY and feed.next == 1 and feed.gaps == 1
    feed.batch(5, batch(5), 1.1)
    for number in range(1, 6):
        feed.batch(number, batch(number), 1.2)
    feed.replay_ended(1.2)
    assert view.blocks == [0, 1, 2, 3, 4, 5]
    assert feed.whole and feed.due(9.0) is None and feed.gaps == 1


def test_late_batch_closes_the_gap() -> None:
    feed, view = begun(0)
    feed.batch(2, batch(2), 1.0)
    feed.batch(1, batch(1), 1.0)
    assert view.blocks == [0, 1, 2] and feed.whole


def test_replay_that_starts_too_late_is_followed_by_a_snapshot() -> None:
    feed, view = begun(0)
    feed.batch(9, batch(9), 1.0)
    assert feed.due(1.0) is FeedRequest.REPLAY
    for number in (7, 8, 9):
        feed.batch(number, batch(number), 1.1)
    feed.replay_ended(1.1)
    assert feed.due(1.1) is FeedRequest.SNAPSHOT
    feed.batch(10, batch(10), 1.2)
    feed.snapshot(8, whole(8), 1.3)
    assert view.blocks == list(range(11)) and feed.whole


def test_missing_replay_is_followed_by_a_snapshot() -> None:
    feed, _ = begun(0)
    feed.batch(2, batch(2), 1.0)
    assert feed.due(1.0) is FeedRequest.REPLAY
    assert feed.due(1.0 + REPLAY_S) is None
    assert feed.due(1.1 + REPLAY_S) is FeedRequest.SNAPSHOT


def test_snapshot_older_than_waiting_batches_needs_a_replay() -> None:
    view = View()
    feed = KvEventFeed(view, 0.0)
    feed.due(0.0)
    feed.batch(6, batch(6), 0.0)
    feed.snapshot(3, whole(3), 0.1)
    assert feed.due(0.1) is FeedRequest.REPLAY and feed.next == 4


def test_failed_snapshot_is_retried_with_delays() -> None:
    feed = KvEventFeed(View(), 0.0)
    now, attempts = 0.0, []
    for _ in range(5):
        while feed.due(now) is not FeedRequest.SNAPSHOT:
            now += 0.1
        attempts.append(now)
        feed.failed(now)
    pauses = [after - before for before, after in itertools.pairwise(attempts)]
    assert pauses == pytest.approx([RETRY_S * 2**n for n in range(4)], abs=0.11)


def test_feed_is_degraded_without_events() -> None:
    feed, _ = begun()
    assert not feed.degraded(SILENCE_S)
    assert feed.degraded(SILENCE_S + 0.1)
    feed.batch(0, [], SILENCE_S + 0.2)
    assert not feed.degraded(SILENCE_S + 0.3)


def test_feed_is_degraded_when_it_stays_broken() -> None:
    feed, _ = begun(0)
    for second in range(1, 20):
        feed.batch(second + 1, [], float(second))
    assert feed.degraded(SILENCE_S + 1)


def test_waiting_batches_are_bounded() -> None:
    feed, view = begun(0)
    last = BUFFER_LIMIT + 10
    for number in range(2, last + 1):
        feed.batch(number, batch(number), 1.0)
    assert feed.due(1.0) is FeedRequest.SNAPSHOT  # too much for a replay
    feed.snapshot(2, whole(2), 1.0)
    assert not feed.whole  # those in between were given up
    for number in range(3, last + 1):
        feed.batch(number, batch(number), 1.0)
    assert view.blocks == list(range(last + 1)) and feed.whole


# --- The law ---

SIZE = 4
ROOT = root_hash()


class Process:
    """A worker: a pool in which something happens, and the memory of its publisher."""

    def __init__(self, chance: random.Random, kept: int) -> None:
        self._chance = chance
        self.batches: list[list[Event]] = []
        self.kept = kept
        self._events = KvEvents(self)
        self.pool = BlockPool(16, self._events.removed)
        self._held: deque[list[int]] = deque()

    @property
    def last(self) -> int:
        return len(self.batches) - 1

    def publish(self, changes: Sequence[Change]) -> None:
        self.batches.append(list(events_of(changes, SIZE, tokens=False)))

    def step(self) -> None:
        """A prompt more or less, and what came of it is published."""
        chance, pool = self._chance, self.pool
        if self._held and chance.random() < 0.5:
            pool.release(self._held.popleft())
        tokens = [chance.randrange(3) for _ in range(SIZE * chance.randrange(1, 5))]
        chain = block_hashes(tokens, SIZE, ROOT)
        blocks = pool.match(chain)
        if len(chain) - len(blocks) + pool.unused(blocks) <= pool.available:
            pool.take(blocks)
            for index, block in enumerate(pool.allocate(len(chain) - len(blocks)), start=len(blocks)):
                parent = chain[index - 1] if index else ROOT
                if pool.publish(block, chain[index], parent, index):
                    self._events.stored(chain[index], parent, ())
                blocks.append(block)
            self._held.append(blocks)
        if chance.random() < 0.02:
            pool.clear()
        self._events.flush()

    def snapshot(self) -> tuple[int, Tree]:
        seq = self._events.flush()
        taken = KvSnapshot(seq, *self.pool.published())
        return seq, dict(taken.part(0, len(taken)))


class Trees:
    """The router's view of one process."""

    def __init__(self) -> None:
        self.tree: Tree = {}

    def apply(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                for block in event.block_hashes:
                    self.tree[block] = parent
                    parent = block
            else:
                for block in event.block_hashes:  # type: ignore[union-attr]
                    del self.tree[block]

    def replace(self, tree: Tree) -> None:
        self.tree = dict(tree)


@pytest.mark.parametrize("seed", range(40))
def test_law_view_converges_to_the_worker_after_any_loss(seed: int) -> None:
    """Batches, replays and snapshots are lost, duplicated and late; processes restart."""
    chance = random.Random(seed)
    now = 0.0
    kept = chance.choice([3, 30])
    loss = chance.choice([0.0, 0.1, 0.5])
    process, view = Process(chance, kept), Trees()
    feed = KvEventFeed(view, now)
    network: list[tuple[float, str, int, object]] = []
    """(when it arrives, what, its number, what is in it)"""
    answered = 0

    def send(what: str, number: int = 0, content: object = None) -> None:
        for _ in range(chance.choice([1, 1, 1, 2]) if what == "batch" else 1):
            if chance.random() >= loss:
                network.append((now + chance.expovariate(5), what, number, content))

    def arrive() -> None:
        nonlocal answered
        for item in sorted((one for one in network if one[0] <= now), key=lambda one: one[0]):
            network.remove(item)
            _, what, number, content = item
            if what == "batch":
                assert isinstance(content, list)
                feed.batch(number, content, now)
            elif what == "end":
                feed.replay_ended(now)
            else:
                assert isinstance(content, dict)
                feed.snapshot(number, content, now)
                answered += 1

    def ask() -> None:
        match feed.due(now):
            case FeedRequest.REPLAY:
                for number in range(max(feed.next, process.last + 1 - kept), process.last + 1):
                    send("batch", number, process.batches[number])
                send("end")
            case FeedRequest.SNAPSHOT:
                if chance.random() < loss:
                    feed.failed(now)
                else:
                    network.append((now + chance.expovariate(5), "snapshot", *process.snapshot()))

    for _ in range(300):
        now += chance.expovariate(4)
        if chance.random() < 0.01:
            process, view = Process(chance, kept), Trees()
            feed = KvEventFeed(view, now)
            network.clear()  # its connections are gone with it
        before = process.last
        process.step()
        for number in range(before + 1, process.last + 1):
            send("batch", number, process.batches[number])
        arrive()
        ask()
    loss = 0.0
    for _ in range(200):  # quiet: only heartbeats, nothing is lost any more
        now += 0.5
        process.publish(())
        send("batch", process.last, process.batches[-1])
        arrive()
        ask()
    now += 60
    arrive()
    assert feed.whole
    assert view.tree == process.snapshot()[1]
    assert answered
