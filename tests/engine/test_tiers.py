"""A tier behind the pool: what comes back is what was computed, and every failure is a computation."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from baton_api.errors import SetupError
from baton_api.hashing import block_hashes, root_hash
from baton_api.kv_events import HOST_MEMORY, IN_USE
from baton_api.messages import TokenChoice
from baton_api.sampling import SamplingParams
from baton_engine.api.streaming import Usage
from baton_engine.client import AsyncEngine
from baton_engine.kv.block_pool import BlockPool
from baton_engine.kv.cache import KVCache
from baton_engine.kv.events import Change, KvEvents, Stored
from baton_engine.kv.new_memory import populate
from baton_engine.model.decoder import Model
from baton_engine.requests import Fetch, FetchResult, FinishReason, LoadedAdapter, Output, Request
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.tiers import index as tier_index
from baton_engine.tiers.index import Place, TierIndex
from baton_engine.tiers.slab import Bytes
from baton_engine.tiers.store import Copy, MemoryStore, Read
from baton_engine.tiers.tier import Tier, Tiers, TierSnapshot
from tests.engine.fake_model import make_cache
from tests.engine.greedy import CPU
from tests.engine.serving import Serving, prompt_of, request_of
from tests.engine.test_new_memory import resident
from tests.seeds import seeds

POOL = 17
"""Blocks of the pools, of which 16 of 4 tokens are for prompts."""

STRANGERS = [
    pytest.param({"namespace": b"1" * 16}, {"namespace": b"2" * 16}, id="another namespace"),
    pytest.param({}, {"adapter": LoadedAdapter("one", "", "1" * 64, 1, 11)}, id="adapter"),
    pytest.param({"salt": "one"}, {"salt": "other"}, id="salt"),
    pytest.param({"salt": ""}, {"salt": "a tenant"}, id="no salt"),
]
"""Of a tier and a request: what was put by the first is not found by the second."""


class UnkindStore(MemoryStore):
    """Memory that can lie, fail and stall."""

    def __init__(self, slots: int, block_bytes: int) -> None:
        super().__init__(slots * block_bytes, block_bytes, None)
        self.read_error: Exception | None = None
        self.write_error: Exception | None = None
        self.go = threading.Event()
        """Cleared, reads and writes stop until it is set."""
        self.go.set()
        self.stuck = threading.Event()
        """Set while one does."""
        self.lies: Callable[[Bytes], None] | None = None
        """Changes the bytes of each slot that is read."""

    def write(self, copies: Sequence[Copy], read: Read) -> list[int | None]:
        self._wait()
        if self.write_error is not None:
            raise self.write_error
        return super().write(copies, read)

    def read(self, slot: int) -> Bytes:
        data = super().read(slot).copy()
        self._wait()
        if self.read_error is not None:
            raise self.read_error
        if self.lies is not None:
            self.lies(data)
        return data

    def flip(self, slot: int) -> None:
        """Change a bit of a slot for good."""
        super().read(slot)[0] ^= 1

    def _wait(self) -> None:
        if not self.go.is_set():
            self.stuck.set()
            assert self.go.wait(60)


class SlowPasses:
    """A clock by which each pass takes long, so that restoring is sooner."""

    def __init__(self, seconds: float = 0.5) -> None:
        """`seconds` between two calls. A restore may take so much the longer."""
        self._times = itertools.count()
        self._seconds = seconds

    def __call__(self) -> float:
        return next(self._times) * self._seconds


class Tiered(Serving):
    """An engine whose pool has room for 64 tokens, with a tier."""

    store: UnkindStore

    def __init__(self, slots: int = 64, **given: Any) -> None:
        def tiers(cache: KVCache) -> list[Tier]:
            self.store = UnkindStore(slots, cache.block_bytes)
            return [Tier(self.store, cache)]

        super().__init__(blocks=POOL, clock=SlowPasses(), tiers=tiers, **given)

    @property
    def state(self) -> TierSnapshot:
        return self.engine.snapshot().tiers[0]

    def copied(self, blocks: int) -> None:
        """Wait until the tier has so many blocks."""
        self.until(lambda now: now.tiers[0].blocks >= blocks)

    def away(self, request: Request) -> list[int]:
        """Answer a request, and then others until the pool has none of its blocks."""
        (tokens,) = self.run(request)
        self.copied(len(request.prompt) // 4)
        self.flood()
        return tokens

    def flood(self, start: int = 1000) -> None:
        for number in range(3):
            self.run(request_of(f"flood-{start}-{number}", 40, seed=start + number, max_tokens=1))


@pytest.fixture
def tiered() -> Iterator[Tiered]:
    with Tiered() as tiered:
        yield tiered
        tiered.store.go.set()


def sources(serving: Serving, name: str) -> dict[str, int]:
    return dict(serving.outputs[name][0].tier_tokens)


@pytest.mark.parametrize("length", [4, 5, 17, 33, 40])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tier_restored_prompt_has_the_tokens_of_a_computed_one(
    tiered: Tiered, length: int, temperature: float
) -> None:
    """The fake model reads positions and tokens back from the cache: a wrong block gives other tokens."""
    fields: dict[str, Any] = {"temperature": temperature, "seed": 0}
    prompt = prompt_of(length, 5)
    expected = tiered.away(request_of("a", prompt=prompt, **fields))
    before = tiered.engine.snapshot().totals.prompt_tokens_computed
    assert tiered.run(request_of("b", prompt=prompt, **fields)) == [expected]
    restored = (length - 1) // 4 * 4
    assert sources(tiered, "b") == ({"memory": restored} if restored else {})
    first = tiered.outputs["b"][0]
    assert (first.cached_tokens, first.peer_tokens) == (restored, 0)
    totals = tiered.at_rest().totals
    assert totals.prompt_tokens_computed - before == length - restored
    assert totals.prompt_tokens_restored["memory"] == restored
    assert tiered.state.totals.hits == restored // 4


def test_tier_keeps_generated_blocks_too(tiered: Tiered) -> None:
    prompt = prompt_of(12, 3)
    answer = tiered.away(request_of("a", prompt=prompt, max_tokens=20))
    turn = (*prompt, *answer, 5, 6, 7)
    request = request_of("b", prompt=turn)
    assert tiered.run(request) == [tiered.reference(request)]
    assert sources(tiered, "b") == {"memory": 28}, "31 tokens have KV: the last one was only sampled"


def test_tier_continues_what_the_pool_has(tiered: Tiered) -> None:
    prompt = prompt_of(40, 2)
    expected = tiered.away(request_of("a", prompt=prompt))
    tiered.run(request_of("part", prompt=prompt[:18], max_tokens=1))
    assert tiered.run(request_of("b", prompt=prompt)) == [expected]
    first = tiered.outputs["b"][0]
    assert (first.cached_tokens, sources(tiered, "b")) == (36, {"memory": 20})


def test_tier_salts_do_not_meet(tiered: Tiered) -> None:
    prompt = prompt_of(40, 2)
    tiered.away(request_of("a", prompt=prompt, salt="one"))
    tiered.run(request_of("b", prompt=prompt, salt="other"))
    assert (tiered.outputs["b"][0].cached_tokens, sources(tiered, "b")) == (0, {})


@pytest.mark.parametrize("position", [0, 3, 8])
def test_tier_flipped_bit_is_found_and_computed(
    tiered: Tiered, caplog: pytest.LogCaptureFixture, position: int
) -> None:
    prompt = prompt_of(40, 4)
    expected = tiered.away(request_of("a", prompt=prompt))
    reads = itertools.count()

    def lie(data: Bytes) -> None:
        if next(reads) == position:
            data[len(data) // 2] ^= 4

    tiered.store.lies = lie
    with caplog.at_level(logging.ERROR):
        assert tiered.run(request_of("b", prompt=prompt)) == [expected]
    assert sources(tiered, "b") == ({"memory": 4 * position} if position else {})
    name = block_hashes(prompt, 4, root_hash())[position].hex()
    assert [record for record in caplog.records if name in record.message and "corrupt" in record.message]
    state = tiered.state
    assert (state.totals.corrupt, state.totals.hits) == (1, position)
    assert tiered.at_rest().totals.restores == {("memory", "checksum"): 1}


def test_tier_corrupt_block_is_replaced_by_the_computed_one(tiered: Tiered) -> None:
    prompt = prompt_of(40, 4)
    expected = tiered.away(request_of("a", prompt=prompt))
    first = block_hashes(prompt, 4, root_hash())[0]
    tiered.store.flip(tiered.tiers[0]._index._places[first].slot)
    tiered.run(request_of("b", prompt=prompt))
    tiered.until(lambda now: tiered.tiers[0].has(first))
    tiered.flood(2000)
    assert tiered.run(request_of("c", prompt=prompt)) == [expected]
    assert sources(tiered, "c") == {"memory": 36}


@pytest.mark.parametrize("error", [OSError("the disk is gone"), ValueError("a bug")])
def test_tier_failed_read_is_computed_and_the_tier_left_alone(tiered: Tiered, error: Exception) -> None:
    prompt = prompt_of(40, 4)
    expected = tiered.away(request_of("a", prompt=prompt))
    tiered.store.read_error = error
    assert tiered.run(request_of("b", prompt=prompt)) == [expected]
    tiered.store.read_error = None
    tiered.flood(2000)
    assert tiered.run(request_of("c", prompt=prompt)) == [expected]
    assert (sources(tiered, "b"), sources(tiered, "c")) == ({}, {})
    assert tiered.at_rest().totals.restores == {("memory", "transfer_failed"): 1}


def test_tier_stalled_read_is_computed_in_time_and_never_writes_later(tiered: Tiered) -> None:
    """The read ends when the pool's blocks have other content for long."""
    prompt = prompt_of(40, 4)
    expected = tiered.away(request_of("a", prompt=prompt))
    tiered.store.go.clear()
    assert tiered.run(request_of("b", prompt=prompt)) == [expected]
    assert tiered.at_rest().totals.restores == {("memory", "deadline"): 1}
    other = request_of("c", 40, seed=9)
    (tokens,) = tiered.run(other)
    tiered.store.go.set()
    tiered.until(lambda now: tiered.tiers[0].has(block_hashes(other.prompt, 4, root_hash())[0]))
    assert tiered.run(request_of("d", 40, seed=9)) == [tokens] == [tiered.reference(other)]
    assert tiered.outputs["d"][0].cached_tokens == 36


def test_tier_aborted_restore_frees_its_blocks_at_once(tiered: Tiered) -> None:
    prompt = prompt_of(40, 4)
    tiered.away(request_of("a", prompt=prompt))
    tiered.store.go.clear()
    tiered.submit(request_of("b", prompt=prompt))
    assert tiered.store.stuck.wait(60)
    tiered.engine.abort("b")
    tiered.ended("b")
    tiered.at_rest()


def test_tier_stop_string_found_during_a_restore_ends_the_request() -> None:
    """A retracted request has output, whose text the server may still be reading."""
    with Tiered(max_running=1) as tiered:
        prompt = prompt_of(32, 4)
        tiered.away(request_of("a", prompt=prompt))
        tiered.model.stops_at = tiered.model.passes + 4
        tiered.submit(request_of("b", prompt=prompt, patient=True, max_tokens=24))
        tiered.until(lambda now: not tiered.model.go.is_set())
        tiered.store.lies = lambda data: tiered.engine.finish("b")
        tiered.submit(request_of("c", 40, seed=9, max_tokens=20))
        tiered.model.resume()
        assert len(tiered.tokens("c")) == 20
        assert tiered.ended("b").finish is FinishReason.STOP
        assert 2 <= len(tiered.so_far("b")) < 24
        totals = tiered.at_rest().totals
        assert (totals.retractions, totals.finished[FinishReason.STOP]) == (1, 1)


def test_tier_failed_write_keeps_nothing(tiered: Tiered, caplog: pytest.LogCaptureFixture) -> None:
    tiered.store.write_error = OSError("no space is left")
    prompt = prompt_of(40, 4)
    (expected,) = tiered.run(request_of("a", prompt=prompt))
    tiered.until(lambda now: now.tiers[0].totals.errors == 1)
    assert "no space is left" in caplog.text
    tiered.flood()
    assert tiered.run(request_of("b", prompt=prompt)) == [expected]
    assert (tiered.state.blocks, sources(tiered, "b")) == (0, {})


def test_tier_block_evicted_while_it_is_copied_is_dropped(tiered: Tiered) -> None:
    """Eviction does not wait for the copy, whose bytes may be those of the next owner of the block."""
    tiered.store.go.clear()
    prompt = prompt_of(40, 4)
    (expected,) = tiered.run(request_of("a", prompt=prompt))
    assert tiered.store.stuck.wait(60)
    tiered.flood()
    tiered.store.go.set()
    tiered.until(lambda now: now.tiers[0].totals.writes > 0)  # the next copies
    assert tiered.state.totals.dropped >= 10
    assert tiered.run(request_of("b", prompt=prompt)) == [expected]
    assert sources(tiered, "b") == {}


def test_tier_is_not_read_if_computing_is_sooner() -> None:
    """By the engine's own clock, a pass of the fake model takes less than a millisecond."""
    tiers = lambda cache: [Tier(UnkindStore(64, cache.block_bytes), cache)]  # noqa: E731
    still = itertools.count()
    with Serving(blocks=POOL, clock=lambda: next(still) * 1e-9, tiers=tiers) as serving:
        prompt = prompt_of(40, 4)
        (expected,) = serving.run(request_of("a", prompt=prompt))
        serving.until(lambda now: now.tiers[0].blocks >= 10)
        for seed in range(3):
            serving.run(request_of(f"f{seed}", 40, seed=seed + 50, max_tokens=1))
        assert serving.run(request_of("b", prompt=prompt)) == [expected]
        assert sources(serving, "b") == {}


def test_tier_cleared_with_the_cache_gives_nothing_back(tiered: Tiered) -> None:
    prompt = prompt_of(40, 4)
    tiered.away(request_of("a", prompt=prompt))
    tiered.engine.clear_cache()
    tiered.run(request_of("b", prompt=prompt))
    assert tiered.outputs["b"][0].cached_tokens == 0


class Heard:
    """The blocks by medium, as a subscriber knows them, and every batch."""

    def __init__(self) -> None:
        self.batches: list[Sequence[Change]] = []
        self.known: dict[str, set[bytes]] = {IN_USE: set(), HOST_MEMORY: set()}

    @property
    def last(self) -> int:
        return len(self.batches) - 1

    def publish(self, changes: Sequence[Change]) -> None:
        self.batches.append(changes)
        for change in changes:
            known = self.known[change.medium]
            if isinstance(change, Stored):
                assert change.name not in known, "stored twice"
                known.add(change.name)
            else:
                known.remove(change.name)


@pytest.mark.parametrize("seed", seeds(4, quick=1))
def test_tier_random_use_is_bounded_right_and_known_to_subscribers(seed: int) -> None:
    """Every answer is the reference's, whatever was evicted, restored and corrupted meanwhile."""
    chance = random.Random(seed)
    heard = Heard()
    with Tiered(slots=24, kv_events=KvEvents(heard)) as tiered:

        def lie(data: Bytes) -> None:
            if chance.random() < 0.05:
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)

        tiered.store.lies = lie
        for number in range(60):
            length = chance.randint(1, 45)
            request = request_of(
                f"r{number}", length, seed=chance.randint(0, 5), max_tokens=chance.randint(1, 9)
            )
            assert tiered.run(request) == [tiered.reference(request)]
            assert tiered.state.blocks <= 24
        snapshot = tiered.at_rest()
        state = snapshot.tiers[0]
        assert state.totals.hits > 0
        index = tiered.tiers[0]._index
        # While nothing is copied, no slot is lost or twice in use.
        tiered.until(lambda now: sorted(slots_of(index)) == list(range(24)))
    assert heard.known[HOST_MEMORY] == set(index._places)


def slots_of(index: TierIndex) -> list[int]:
    """The slots with a block and the free ones, in one look at what the engine's thread changes."""
    return [place.slot for place in list(index._places.values())] + list(index._free)


def test_tier_snapshot_of_the_pool_is_followed_by_the_tiers_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers take a snapshot for all that a worker has. The blocks come in parts, also while it is idle."""
    monkeypatch.setattr(tier_index, "ANNOUNCED", 3)
    heard = Heard()
    with Tiered(kv_events=KvEvents(heard)) as tiered:
        tiered.away(request_of("a", 40, seed=4))
        (tier,) = tiered.tiers
        tiered.until(lambda now: not tier._dirty and tier._work is None)  # nothing is being copied
        tiered.until(lambda now: len(heard.known[HOST_MEMORY]) == now.tiers[0].blocks >= 20)
        known = set(heard.known[HOST_MEMORY])
        heard.known[HOST_MEMORY].clear()
        seq = tiered.engine.kv_snapshot().result().seq
        tiered.until(lambda now: heard.known[HOST_MEMORY] >= known)
        assert heard.last - seq >= len(known) // 3


def test_usage_has_the_sources_of_cached_tokens() -> None:
    def details(cached: int, peer: int, tiers: tuple[tuple[str, int], ...]) -> dict[str, Any]:
        details: dict[str, Any] = Usage(99, 1, cached, peer, tiers).body()["prompt_tokens_details"]
        return details

    assert "cached_tokens_by_source" not in details(48, 0, ())
    assert details(96, 16, (("memory", 32), ("memory", 8)))["cached_tokens_by_source"] == {
        "local": 40,
        "peer": 16,
        "memory": 40,
    }
    assert details(48, 0, (("memory", 32),))["cached_tokens_by_source"] == {"local": 16, "memory": 32}


async def test_tier_of_a_real_model_gives_the_computed_bits_back(model: Model) -> None:
    """Tokens and logprobs of a restored prompt are exactly those of the prompt that the pool still had."""
    cache = KVCache(model.spec, 33, torch.float32, CPU)
    tier = Tier(MemoryStore(64 * cache.block_bytes, cache.block_bytes, None), cache)
    limits = EngineLimits(max_model_len=512, chunk_tokens=64)
    client = AsyncEngine(model, cache, limits, clock=SlowPasses(), tiers=[tier])
    client.start()
    numbers = itertools.count()

    async def ask(seed: int, tokens: int = 12) -> tuple[list[TokenChoice], Output]:
        prompt = tuple((3 + position * (7 + seed) + position**2) % 64 for position in range(330))
        sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=tokens, logprobs=3)
        outputs = [one async for one in client.generate(Request(f"{next(numbers)}", prompt, sampling))]
        return [choice for output in outputs for choice in output.tokens], outputs[0]

    computed, _ = await ask(1)
    while tier.snapshot().blocks < 20:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    hot, first = await ask(1)
    assert (first.cached_tokens, first.tier_tokens) == (320, ())
    for seed in (2, 3):
        await ask(seed, 1)
    restored, first = await ask(1)
    assert (first.cached_tokens, first.tier_tokens) == (320, (("memory", 320),))
    assert restored == hot
    assert [choice.token for choice in restored] == [choice.token for choice in computed]
    await client.close()
    tier.close()


def test_memory_store_refuses_what_does_not_fit() -> None:
    with pytest.raises(SetupError, match="less than one KV block"):
        MemoryStore(999, 1000, None)
    with pytest.raises(SetupError, match=r"only 1\.02 kB are free"):
        MemoryStore(2048, 64, 1024)


@pytest.mark.parametrize("populated", [True, False], ids=["populated", "written"])
def test_memory_store_is_touched_to_its_end_and_keeps_its_blocks(populated: bool) -> None:
    """Pages are written where this kernel cannot populate them."""
    store = MemoryStore(20 * 2**20, 2**20, None, populate if populated else lambda address, size: False)
    store.read(19)[:] = 7
    assert [store.prepare() for _ in range(3)] == [True, True, False]
    assert set(store.read(19).tolist()) == {7}
    pages = store.read(0).ctypes.data
    assert resident(pages, 20 * 2**20) == 20 * 2**20


def test_tier_copies_beside_each_pass_until_half_of_the_pool_is_ready() -> None:
    """A copy ends while the engine computes. The next one starts before the next pass, not behind it."""
    cache = make_cache(7)
    tier = Tier(MemoryStore(8 * cache.block_bytes, cache.block_bytes, None), cache)
    tiers, commands = Tiers([tier]), queue.SimpleQueue[Callable[[], None]]()
    pool = BlockPool(cache.blocks, tiers=tiers)

    def post(command: Callable[[], None]) -> bool:
        commands.put(command)
        return True

    tier.attach(pool, post, lambda fetched: None, None)
    tier._each = 2
    names = block_hashes(range(24), 4, root_hash())
    blocks = pool.allocate(6)
    for number, block in enumerate(blocks):
        pool.publish(block, names[number], names[number - 1] if number else root_hash(), number)
    pool.release(blocks)
    tier.clean(idle=False)
    for expected in (2, 4):
        commands.get(timeout=60)()
        assert tier.snapshot().blocks == expected
    assert not tier._work, "4 of 6 blocks can be handed out, and the engine has work"
    tier.clean(idle=True)
    commands.get(timeout=60)()
    assert all(tier.has(name) for name in names)
    tier.close()


def test_tier_restores_that_wait_for_others_are_predicted_and_are_no_failures() -> None:
    """Restores share a thread: a burst of them says nothing of the tier, but a read that is stuck does."""
    cache, now = make_cache(9), 100.0
    store = UnkindStore(8, cache.block_bytes)
    tier = Tier(store, cache, clock=lambda: now)
    commands, ends = queue.SimpleQueue[Callable[[], object]](), dict[str, FetchResult]()

    def post(command: Callable[[], None]) -> bool:
        commands.put(command)
        return True

    def fetched(result: FetchResult) -> None:
        ends[result.request_id] = result

    tier.attach(BlockPool(cache.blocks), post, fetched, None)
    names = block_hashes(range(16), 4, root_hash())
    for number, name in enumerate(names):
        slot = tier._index.reserve()
        assert slot is not None
        (value,) = store.write([Copy(name, b"", 1, slot)], tier._bytes.read)
        assert value is not None
        tier._index.add(name, Place(slot, value, names[number - 1] if number else root_hash()))
    tier._speed.add(1, 0.002, 1.0, now)  # a block takes 0.3 s

    def start(name: str, number: int, within_s: float = 60.0) -> None:
        fetch = Fetch(name, (), number, b"", (number + 1,), SamplingParams(), "", within_s=within_s)
        tier.start(names, fetch, cache.streams.record())

    def reports(*expected: str) -> None:
        for _ in expected:
            commands.get(timeout=60)()
        assert {name: ends[name].reason for name in expected} == dict.fromkeys(
            expected, "" if store.go.is_set() else "deadline"
        )

    assert tier.within_s(names, 0, 1, 1.0)
    store.go.clear()
    start("first", 0)
    assert store.stuck.wait(60)
    start("second", 1)
    assert not tier.within_s(names, 0, 1, 1.0), "it would be the third, after 0.6 s"
    assert tier.within_s(names, 0, 1, 2.0)
    start("late", 2, within_s=0.001)
    reports("late")
    assert tier.within_s(names, 0, 1, 2.0), "the tier is not left alone"
    store.go.set()
    reports("first", "second")
    assert tier.within_s(names, 0, 1, 1.0)
    for pause in range(2):
        store.go.clear()
        start(f"stuck-{pause}", 0, within_s=0.001)
        reports(f"stuck-{pause}")
        assert not tier.within_s(names, 0, 1, 9.0), "the read was late, or one that ended is still stuck"
        now += 1000.0
    store.go.set()
    tier.close()
