"""Events of the prefix cache: other readers can decode them, and none is lost."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from baton_api.errors import NotReady, SetupError
from baton_api.hashing import block_hashes, root_hash
from baton_api.kv_events import BlockRemoved, BlockStored, EventBatch, block_number
from baton_api.sampling import SamplingParams
from baton_engine.engine import Engine
from baton_engine.kv.block_pool import BlockPool
from baton_engine.kv.events import Change, KvEvents, KvSnapshot, Removed, Stored, events_of
from baton_engine.kv.publisher import KvPublisher
from baton_engine.requests import Output, Request
from baton_engine.scheduling.limits import EngineLimits
from tests.engine.fake_model import FakeModel, make_cache

SIZE = 4
ROOT = root_hash()
TIMEOUT_MS = 10_000

Tree = dict[int, int | None]


class Heard:
    """Collects what is handed on."""

    def __init__(self) -> None:
        self.batches: list[list[Change]] = []

    @property
    def last(self) -> int:
        return len(self.batches) - 1

    def publish(self, changes: Sequence[Change]) -> None:
        self.batches.append(list(changes))


def names(tokens: Sequence[int], root: bytes = ROOT) -> list[bytes]:
    return block_hashes(tokens, SIZE, root)


def stored(tokens: Sequence[int], root: bytes = ROOT) -> list[Change]:
    """The changes that a computed prompt brings."""
    chain = names(tokens, root)
    parents = [root, *chain]
    return [
        Stored(name, parents[index], tokens[index * SIZE : (index + 1) * SIZE])
        for index, name in enumerate(chain)
    ]


def apply(tree: Tree, events: Sequence[Any]) -> None:
    """As a reader of the events would."""
    for event in events:
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            for block in event.block_hashes:
                tree[block] = parent
                parent = block
        elif isinstance(event, BlockRemoved):
            for block in event.block_hashes:
                del tree[block]
        else:
            tree.clear()


def test_kv_events_adjacent_blocks_are_one_event() -> None:
    chain = [block_number(name) for name in names(range(12))]
    changes = [*stored(range(12)), Removed(names(range(12))[2]), Removed(names(range(12))[1])]
    first, second = events_of(changes, SIZE, tokens=True)
    assert first == BlockStored(chain, None, list(range(12)), SIZE, medium="GPU")
    assert second == BlockRemoved([chain[2], chain[1]], "GPU")


def test_kv_events_of_a_tier_have_its_medium() -> None:
    """A block can be in the pool and in a tier at once, and leaves them one by one."""
    first, second = names(range(8))
    changes: list[Change] = [
        Stored(first, ROOT, (1,) * 4),
        Stored(second, first, (), medium="CPU"),
        Stored(first, ROOT, (), medium="CPU"),
        Removed(first),
        Removed(first, "CPU"),
        Removed(second, "CPU"),
    ]
    pool, tier = [block_number(name) for name in (first, second)]
    assert list(events_of(changes, SIZE, tokens=True)) == [
        BlockStored([pool], None, [1] * 4, SIZE, medium="GPU"),
        BlockStored([tier], pool, [], SIZE, medium="CPU"),
        BlockStored([pool], None, [], SIZE, medium="CPU"),
        BlockRemoved([pool], "GPU"),
        BlockRemoved([pool, tier], "CPU"),
    ]


def test_another_prompt_is_another_event() -> None:
    events = list(events_of([*stored(range(8)), *stored(range(90, 98))], SIZE, tokens=True))
    assert [len(event.block_hashes) for event in events if isinstance(event, BlockStored)] == [2, 2]


def test_kv_events_salted_prompt_has_its_own_root() -> None:
    salted = root_hash("tenant")
    (event,) = events_of(stored(range(4), salted), SIZE, tokens=True)
    assert isinstance(event, BlockStored) and event.parent_block_hash == block_number(salted)


def test_tokens_can_be_kept_back() -> None:
    (event,) = events_of(stored(range(8)), SIZE, tokens=False)
    assert isinstance(event, BlockStored) and event.token_ids == []


@pytest.mark.parametrize("seed", range(10))
def test_kv_events_random_use_matches_the_pool(seed: int) -> None:
    """Any use of the pool, and any ends of the steps."""
    chance = random.Random(seed)
    heard, tree = Heard(), Tree()
    events = KvEvents(heard)
    pool = BlockPool(20, events.removed)
    held: list[list[int]] = []
    for _ in range(600):
        roll = chance.random()
        if roll < 0.5:
            tokens = [chance.randrange(2) for _ in range(SIZE * chance.randrange(1, 6))]
            chain = names(tokens)
            blocks = pool.match(chain)
            if len(chain) - len(blocks) + pool.unused(blocks) > pool.available:
                continue
            pool.take(blocks)
            for index, block in enumerate(pool.allocate(len(chain) - len(blocks)), start=len(blocks)):
                parent = chain[index - 1] if index else ROOT
                if pool.publish(block, chain[index], parent, index):
                    events.stored(chain[index], parent, tokens[index * SIZE : (index + 1) * SIZE])
                blocks.append(block)
            held.append(blocks)
        elif held:
            pool.release(held.pop(chance.randrange(len(held))))
        elif roll > 0.95:
            pool.clear()
        if chance.random() < 0.3:
            assert events.flush() == heard.last
            for batch in heard.batches:
                apply(tree, list(events_of(batch, SIZE, tokens=True)))
            heard.batches.clear()
            snapshot = KvSnapshot(0, *pool.published())
            assert tree == dict(snapshot.part(0, len(snapshot)))


# --- What others can read: their definitions, by the names and order of vLLM's events ---


class OtherStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class OtherRemoved(msgspec.Struct, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class OtherCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class OtherBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[OtherStored | OtherRemoved | OtherCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """Reads a publisher's two sockets."""

    def __init__(self, context: zmq.Context[Any], publisher: KvPublisher, topic: bytes = b"") -> None:
        self.events = context.socket(zmq.SUB)
        self.events.setsockopt(zmq.SUBSCRIBE, topic)
        self.events.connect(publisher.endpoint)
        self.replays = context.socket(zmq.DEALER)
        self.replays.connect(publisher.replay_endpoint)

    def read(self) -> tuple[bytes, int, bytes]:
        assert self.events.poll(TIMEOUT_MS), "no batch came"
        topic, seq, batch = self.events.recv_multipart()
        return topic, int.from_bytes(seq), batch

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        self.replays.send_multipart([b"", start.to_bytes(8)])
        batches: list[tuple[int, bytes]] = []
        while True:
            assert self.replays.poll(TIMEOUT_MS), "no replay came"
            _, _, seq, batch = self.replays.recv_multipart()
            if int.from_bytes(seq, signed=True) == -1:
                return batches
            batches.append((int.from_bytes(seq), batch))


@contextmanager
def publishing(**given: Any) -> Iterator[tuple[KvPublisher, Subscriber]]:
    fields: dict[str, Any] = {"block_size": SIZE, "heartbeat_s": 0.02, "clock": lambda: 7.5}
    publisher = KvPublisher("tcp://127.0.0.1:0", **fields | given)
    context: zmq.Context[Any] = zmq.Context()
    try:
        publisher.start()
        yield publisher, Subscriber(context, publisher)
    finally:
        context.destroy(linger=0)
        publisher.close()


def test_kv_events_batch_is_readable_as_vllms() -> None:
    with publishing(topic="kv@here@tiny") as (publisher, subscriber):
        subscriber.read()  # it is connected
        publisher.publish([*stored(range(8)), Removed(names(range(8))[1])])
        batch = OtherBatch(0.0, [])
        while not batch.events:
            topic, _, payload = subscriber.read()
            batch = msgspec.msgpack.decode(payload, type=OtherBatch)
        chain: list[bytes | int] = [block_number(name) for name in names(range(8))]
        assert topic == b"kv@here@tiny"
        assert batch == OtherBatch(
            7.5,
            [
                OtherStored(chain, None, list(range(8)), SIZE, None, "GPU", None),
                OtherRemoved(chain[1:], "GPU"),
            ],
            0,
        )


def test_block_number_is_the_names_last_64_bits() -> None:
    assert block_number(bytes.fromhex("00112233445566778899aabbccddeeff")) == 0x8899AABBCCDDEEFF


def test_kv_events_missed_batches_are_replayed_to_an_end_mark() -> None:
    with publishing(heartbeat_s=60) as (publisher, subscriber):
        for number in range(5):
            publisher.publish(stored([number] * SIZE))
        batches: list[tuple[int, bytes]] = []
        while len(batches) < 3:  # a batch exists once its thread has sent it
            batches = subscriber.replay(2)
        assert [seq for seq, _ in batches][:3] == [2, 3, 4]
        assert subscriber.replay(1 << 40) == []
        first = msgspec.msgpack.decode(subscriber.replay(0)[0][1], type=OtherBatch)
        assert isinstance(first.events[0], OtherCleared)


def test_kv_events_invalid_replay_request_is_ignored() -> None:
    with publishing() as (_, subscriber):
        subscriber.replays.send_multipart([b"", b"what?"])
        subscriber.replays.send(b"what?")
        assert subscriber.replay(1 << 40) == []


def test_kv_events_heartbeats_continue_the_numbers() -> None:
    with publishing() as (_, subscriber):
        numbers = [subscriber.read()[1] for _ in range(3)]
        assert numbers == list(range(numbers[0], numbers[0] + 3))


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1", "nonsense", "tcp://203.0.113.1:0"])
def test_kv_publisher_invalid_address_names_the_flag(endpoint: str) -> None:
    with pytest.raises(SetupError, match=f"--kv-events {endpoint}.*tcp://127.0.0.1:5557"):
        KvPublisher(endpoint, block_size=SIZE)
    with pytest.raises(SetupError, match="--kv-replay"):
        KvPublisher("tcp://127.0.0.1:0", "nonsense", block_size=SIZE)


# --- With an engine ---


@pytest.mark.parametrize("seed", range(3))
def test_kv_snapshot_equals_the_events_before_it(seed: int) -> None:
    chance = random.Random(seed)
    heard = Heard()
    ended = random.Random(seed)
    outputs: list[Any] = []
    engine = Engine(
        FakeModel(),
        make_cache(24, SIZE),
        EngineLimits(max_model_len=256, chunk_tokens=16, max_running=4),
        on_outputs=outputs.extend,
        kv_events=KvEvents(heard),
    )
    engine.start()
    try:
        for number in range(30):
            prompt = tuple(ended.randrange(3) for _ in range(ended.randrange(5, 40)))
            sampling = SamplingParams(temperature=0.0, max_tokens=chance.randrange(1, 9))
            engine.submit(Request(f"r{number}", prompt, sampling))
            snapshot = engine.kv_snapshot().result(300)
            tree = Tree()
            for batch in heard.batches[: snapshot.seq + 1]:
                apply(tree, list(events_of(batch, SIZE, tokens=True)))
            assert tree == dict(snapshot.part(0, len(snapshot)))
    finally:
        engine.stop()
    assert any(isinstance(change, Removed) for batch in heard.batches for change in batch)


def test_kv_events_include_generated_tokens() -> None:
    heard = Heard()
    outputs: list[Output] = []
    engine = Engine(
        FakeModel(), make_cache(24, SIZE), EngineLimits(max_model_len=64), on_outputs=outputs.extend,
        kv_events=KvEvents(heard),
    )  # fmt: skip
    request = Request("r", tuple(range(3, 9)), SamplingParams(temperature=0.0, max_tokens=8))
    engine.start()
    try:
        engine.submit(request)
        while not (outputs and outputs[-1].finish and engine.snapshot().running == 0):
            engine.kv_snapshot().result(300)
    finally:
        engine.stop()
    stored_changes = [change for batch in heard.batches for change in batch if isinstance(change, Stored)]
    tokens = [token for change in stored_changes for token in change.tokens]
    answer = [choice.token for output in outputs for choice in output.tokens]
    assert tokens == [*request.prompt, *answer][: len(tokens)] and len(tokens) == 12
    assert [output.tail for output in outputs] == [stored_changes[0].name, *[b""] * 7]


def test_without_events_there_is_no_snapshot() -> None:
    engine = Engine(
        FakeModel(), make_cache(8, SIZE), EngineLimits(max_model_len=64), on_outputs=lambda outputs: None
    )
    with pytest.raises(NotReady, match="--kv-events"):
        engine.kv_snapshot()


def test_kv_events_batch_is_read_back() -> None:
    batch = EventBatch(1.0, [BlockStored([1], None, [2], 16), BlockRemoved([1])], 0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=EventBatch) == batch
