"""
A store of KV blocks that workers share: one restores what another one computed, or computes it.

Stores are slow, gone, full, forbidden, late and wrong here. None of it is an error, a hang or a wrong token.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import obstore
import pytest
from obstore.store import MemoryStore as ObjectMemory
from obstore.store import ObjectStore

from baton_api.hashing import block_hashes, root_hash
from baton_api.kv_events import SHARED_STORAGE
from baton_engine.kv.cache import KVCache
from baton_engine.kv.events import Change, KvEvents, Removed, Stored
from baton_engine.tiers import known_objects
from baton_engine.tiers import shared as shared_module
from baton_engine.tiers.objects import (
    BlockObjects,
    Entry,
    Found,
    Group,
    header_bytes,
    opened,
)
from baton_engine.tiers.shared import SharedTier
from baton_engine.tiers.slab import Bytes
from baton_engine.tiers.store import MemoryStore
from baton_engine.tiers.tier import EngineTier, Tier, TierSnapshot
from tests.engine.fake_model import make_cache
from tests.engine.serving import Serving, prompt_of, request_of
from tests.engine.test_block_objects import BLOCK, EACH, MODEL, OBJECT, entry, group_of, s3_server
from tests.engine.test_tiers import POOL, STRANGERS, Heard, SlowPasses, sources


class UnkindObjects(BlockObjects):
    """A store that can stall, refuse, lie, be cut short, and list late."""

    def __init__(self, store: ObjectStore | Path, namespace: bytes = MODEL, url: str = "memory://") -> None:
        super().__init__(store, namespace, BLOCK, EACH, url)
        self.go = threading.Event()
        """Cleared, all requests stop until it is set."""
        self.go.set()
        self.stuck = threading.Event()
        """Set while one does."""
        self.read_error: OSError | None = None
        self.write_error: OSError | None = None
        self.lies: Callable[[Bytes], Bytes] = lambda data: data
        """Changes the blocks that are read."""
        self.unlisted: Callable[[Entry], bool] = lambda entry: False
        self.long_gone: list[Entry] = []
        """Objects that lists have although they are gone."""
        self.asked: list[bytes] = []
        self.written: list[bytes] = []

    def find(self, key: bytes) -> Found | None:
        self.asked.append(key)
        self._unkind(self.read_error)
        return super().find(key)

    def read(self, found: Found, first: int, count: int) -> Bytes:
        self._unkind(self.read_error)
        return self.lies(super().read(found, first, count).copy())

    def put(self, group: Group, content: Bytes) -> Found:
        self._unkind(self.write_error)
        found = super().put(group, content)
        self.written.append(group.key)
        return found

    def list(self) -> list[Entry]:
        self._unkind(self.write_error)
        return [entry for entry in super().list() if not self.unlisted(entry)] + self.long_gone

    def _unkind(self, error: OSError | None) -> None:
        if not self.go.is_set():
            self.stuck.set()
            assert self.go.wait(60)
        if error is not None:
            raise error


class Sharing(Serving):
    """An engine whose pool has room for 64 tokens, with a tier in memory and a shared store."""

    shared: SharedTier
    objects: UnkindObjects

    def __init__(
        self,
        store: ObjectStore | Path,
        size: int = 1000 * OBJECT,
        namespace: bytes = MODEL,
        pass_s: float = 100.0,
        memory: int = 32,
        expiry_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        **given: Any,
    ) -> None:
        """By `pass_s`, restores have much time, on a busy machine too."""

        def tiers(cache: KVCache) -> Sequence[EngineTier]:
            first = Tier(MemoryStore(memory * BLOCK, BLOCK, None), cache)
            self.objects = UnkindObjects(store, namespace)
            self.shared = SharedTier(self.objects, cache, first, size, expiry_s, clock)
            return [first, self.shared]

        super().__init__(blocks=POOL, clock=SlowPasses(pass_s), tiers=tiers, **given)

    def __enter__(self) -> Self:
        """The speed of computing is known from the first pass on, which is a worker's warm-up."""
        super().__enter__()
        self.run(request_of("warm-up", 3, max_tokens=1))
        return self

    def __exit__(self, *given: Any) -> None:
        self.objects.go.set()
        super().__exit__(*given)

    @property
    def state(self) -> TierSnapshot:
        return self.engine.snapshot().tiers[1]

    def rested(self) -> None:
        """Wait until nothing is to be written any more."""
        self.at_rest()
        done = threading.Event()

        def look() -> None:
            memory, shared = self.tiers[0], self.shared
            if (
                memory._work is None
                and not (memory._dirty and memory._index.free)
                and shared._work is None
                and (not shared._ends or shared._paused_until)
            ):
                done.set()

        def rests(now: object) -> bool:
            self.engine._commands.post(look)
            return done.wait(0.01)

        self.until(rests)


def keys_of(prompt: Sequence[int]) -> list[bytes]:
    names = block_hashes(prompt, 4, root_hash())
    return names[EACH - 1 :: EACH]


def answered(store: ObjectStore | Path, prompt: tuple[int, ...], **fields: Any) -> list[int]:
    """Return the answer of an engine, after it has written the prompt to the store, and has ended."""
    with Sharing(store) as serving:
        (tokens,) = serving.run(request_of("a", prompt=prompt, **fields))
        serving.rested()
        assert len(serving.objects.written) >= len(prompt) // (4 * EACH)
    return tokens


@pytest.mark.parametrize("length", [7, 8, 9, 33, 47])
def test_shared_another_worker_restores_what_one_computed(
    object_store: ObjectStore | Path, length: int
) -> None:
    prompt = prompt_of(length, 5)
    expected = answered(object_store, prompt)
    with Sharing(object_store) as serving:
        assert serving.run(request_of("b", prompt=prompt)) == [expected]
        restored = min((length - 1) // 4, length // (4 * EACH) * EACH) * 4
        assert sources(serving, "b") == ({"shared": restored} if restored else {})
        assert serving.outputs["b"][0].cached_tokens == restored
        totals = serving.at_rest().totals
        assert totals.prompt_tokens_computed == 3 + length - restored
        assert totals.prompt_tokens_restored["shared"] == restored
        serving.rested()
        assert serving.state.totals.hits == restored // 4
        assert not set(serving.objects.written) & set(keys_of(prompt)), "they are there already"


def test_shared_workers_write_an_object_once_and_at_once(tmp_path: Path) -> None:
    """Both have computed the prompt before either of them has written it."""
    store, prompt = ObjectMemory(), prompt_of(33, 5)
    with Sharing(store) as one, Sharing(store) as other:
        one.objects.go.clear()
        other.objects.go.clear()
        for serving in (one, other):
            (tokens,) = serving.run(request_of("a", prompt=prompt))
            assert tokens == serving.reference(request_of("a", prompt=prompt))
        one.objects.go.set()
        other.objects.go.set()
        one.rested()
        other.rested()
        keys = keys_of(prompt)
        assert all(key in serving.shared._known for key in keys for serving in (one, other))
        assert len(one.objects.list()) == len(set(one.objects.written) | set(other.objects.written))


@pytest.mark.slow
def test_shared_bucket_is_restored_from_and_computed_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real server: what one worker put there, another one restores; a dead server is a computation."""
    with s3_server(tmp_path, monkeypatch) as server:
        prompt = prompt_of(41, 4)
        expected = answered(opened("s3://bucket/kv"), prompt)
        with Sharing(opened("s3://bucket/kv")) as serving:
            assert serving.run(request_of("b", prompt=prompt)) == [expected]
            assert sources(serving, "b") == {"shared": 40}
        BlockObjects(opened("s3://bucket/kv"), MODEL, BLOCK, EACH).clear()
        with Sharing(opened("s3://bucket/kv")) as serving:
            serving.rested()
            server.stop()
            assert serving.run(request_of("c", prompt=prompt)) == [expected]


def test_shared_prompt_goes_on_from_what_pool_and_memory_have(object_store: ObjectStore | Path) -> None:
    """Reading begins inside of an object."""
    prompt = prompt_of(47, 2)
    expected = answered(object_store, prompt)
    with Sharing(object_store) as serving:
        serving.shared._speed.failed(serving.shared._clock())  # left alone, so that a part is computed
        serving.run(request_of("part", prompt=prompt[:13], max_tokens=1))
        serving.shared._speed.add(1, 0.0, 1e-6, serving.shared._clock())
        assert serving.run(request_of("b", prompt=prompt)) == [expected]
        assert (serving.outputs["b"][0].cached_tokens, sources(serving, "b")) == (40, {"shared": 28})


def test_shared_answers_of_one_turn_are_restored_in_the_next(object_store: ObjectStore | Path) -> None:
    prompt = prompt_of(12, 3)
    with Sharing(object_store) as serving:
        (answer,) = serving.run(request_of("a", prompt=prompt, max_tokens=20))
        serving.rested()
    request = request_of("b", prompt=(*prompt, *answer, 5, 6, 7))
    with Sharing(object_store) as serving:
        assert serving.run(request) == [serving.reference(request)]
        assert sources(serving, "b") == {"shared": 24}


@pytest.mark.parametrize(("first", "second"), STRANGERS)
def test_shared_other_models_and_tenants_find_nothing(first: dict[str, Any], second: dict[str, Any]) -> None:
    store, prompt = ObjectMemory(), prompt_of(41, 2)
    for number, given in enumerate((first, second, first)):
        fields = {name: given[name] for name in given if name == "salt"}
        with Sharing(store, namespace=given.get("namespace", MODEL)) as serving:
            request = replace(request_of("a", prompt=prompt, **fields), adapter=given.get("adapter"))
            before = () if request.adapter is None else (request.adapter.weights,)
            reference = serving.reference(replace(request, prompt=(*before, *prompt), adapter=None))
            assert serving.run(request) == [reference]
            assert sources(serving, "a") == ({"shared": 40} if number == 2 else {})
            serving.rested()


@pytest.mark.parametrize("position", [0, 1, 5])
def test_shared_flipped_bit_is_found_computed_and_replaced(
    position: int, caplog: pytest.LogCaptureFixture
) -> None:
    store, prompt = ObjectMemory(), prompt_of(41, 4)
    expected = answered(store, prompt)
    key = keys_of(prompt)[position // EACH]
    path = f"{MODEL.hex()}/{key.hex()}.kv"
    raw = bytearray(bytes(obstore.get(store, path).bytes()))
    raw[header_bytes(EACH) + position % EACH * BLOCK + BLOCK // 2] ^= 4
    obstore.put(store, path, bytes(raw))
    with Sharing(store) as serving:
        with caplog.at_level(logging.ERROR):
            assert serving.run(request_of("b", prompt=prompt)) == [expected]
        assert sources(serving, "b") == ({"shared": 4 * position} if position else {})
        serving.rested()
        assert serving.state.totals.corrupt == 1
        assert serving.at_rest().totals.restores == {("shared", "checksum"): 1}
        assert caplog.text.count(f"The object {key.hex()} of the shared KV store is corrupt") == 1
        assert key in serving.objects.written, "it was deleted, and written again"
    with Sharing(store) as serving:
        assert serving.run(request_of("c", prompt=prompt)) == [expected]
        assert sources(serving, "c") == {"shared": 40}


def cut(raw: bytes) -> bytes:
    return raw[:-1]


def header_only(raw: bytes) -> bytes:
    return raw[:100]


def empty(raw: bytes) -> bytes:
    return b""


def other_format(raw: bytes) -> bytes:
    return raw[:16] + b"\x02" + raw[17:]


def not_ours(raw: bytes) -> bytes:
    return bytes(len(raw))


def flipped_name(raw: bytes) -> bytes:
    return raw[:75] + bytes([raw[75] ^ 1]) + raw[76:]


@pytest.mark.parametrize("damage", [cut, header_only, empty, other_format, not_ours, flipped_name])
def test_shared_objects_that_are_not_what_their_keys_say_are_computed_and_replaced(
    damage: Callable[[bytes], bytes], object_store: ObjectStore | Path
) -> None:
    prompt = prompt_of(41, 4)
    expected = answered(object_store, prompt)
    objects = BlockObjects(object_store, MODEL, BLOCK, EACH)
    key = keys_of(prompt)[2]
    path = f"{MODEL.hex()}/{key.hex()}.kv"
    obstore.put(objects._store, path, damage(bytes(obstore.get(objects._store, path).bytes())))
    with Sharing(object_store) as serving:
        assert serving.run(request_of("b", prompt=prompt)) == [expected]
        assert sources(serving, "b") == {"shared": 16}
        serving.rested()
        assert serving.state.totals.corrupt == 1
        assert not serving.state.paused
    with Sharing(object_store) as serving:
        assert serving.run(request_of("c", prompt=prompt)) == [expected]
        assert sources(serving, "c") == {"shared": 40}


def test_shared_read_that_lies_or_is_short_is_computed() -> None:
    store, prompt = ObjectMemory(), prompt_of(41, 4)
    expected = answered(store, prompt)

    def flip(data: Bytes) -> Bytes:
        data[0] ^= 1
        return data

    def short(data: Bytes) -> Bytes:
        raise OSError("9 bytes of an object were read instead of 10")

    for lie, reason in ((flip, "checksum"), (short, "transfer_failed")):
        with Sharing(store) as serving:
            serving.objects.lies = lie
            assert serving.run(request_of("b", prompt=prompt)) == [expected]
            assert serving.at_rest().totals.restores == {("shared", reason): 1}
            serving.rested()


def test_shared_refusing_store_is_one_line_in_the_log_and_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, prompt = ObjectMemory(), prompt_of(41, 4)
    expected = answered(store, prompt)
    with Sharing(store) as serving:
        serving.rested()
        serving.objects.read_error = PermissionError("403 Forbidden")
        serving.objects.write_error = OSError("507 Insufficient Storage")
        for number in range(3):
            request = request_of(f"b{number}", 41, seed=number)
            assert serving.run(request) == [serving.reference(request)]
            serving.at_rest()
        assert serving.run(request_of("b", prompt=prompt)) == [expected]
        assert sources(serving, "b") == {}
        serving.until(lambda now: now.tiers[1].paused)
        assert len(serving.objects.asked) < 5, "it is left alone"
    assert caplog.text.count("is left alone for a while") == 1


def test_shared_write_that_fails_is_one_line_in_the_log_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = ObjectMemory()
    with Sharing(store) as serving:
        serving.rested()
        serving.objects.write_error = OSError("507 Insufficient Storage")
        for number in range(3):
            serving.run(request_of(f"a{number}", 41, seed=number))
            serving.until(lambda now, number=number: now.tiers[1].totals.errors == number + 1)  # type: ignore[misc]
            assert serving.state.paused
            serving.shared._paused_until = 1e-9  # the pause is over
        serving.objects.write_error = None
        prompt = prompt_of(41, 7)
        serving.run(request_of("b", prompt=prompt))
        serving.rested()
        assert set(keys_of(prompt)) <= set(serving.objects.written)
        assert not serving.state.paused
    assert caplog.text.count("Cannot write to the shared KV store memory://: 507") == 1


def test_shared_stalled_store_is_computed_in_time_and_ends_with_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, prompt = ObjectMemory(), prompt_of(41, 4)
    expected = answered(store, prompt)
    with Sharing(store, pass_s=0.5) as serving:
        serving.rested()
        serving.objects.go.clear()
        assert serving.run(request_of("b", prompt=prompt)) == [expected]
        assert serving.at_rest().totals.restores == {("shared", "deadline"): 1}
        serving.until(lambda now: now.tiers[1].paused)
        assert serving.run(request_of("c", 41, seed=9)) == [serving.reference(request_of("c", 41, seed=9))]
        assert serving.at_rest().totals.restores == {("shared", "deadline"): 1}
        serving.engine.stop()
        serving.shared.flush(serving.shared._clock() + 0.05)
    assert caplog.text.count("is left alone for a while: deadline") == 1


def test_shared_stalled_in_the_middle_keeps_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks after the deadline are not written to the pool, whose blocks have other content by then."""
    store, prompt = ObjectMemory(), prompt_of(41, 4)
    expected = answered(store, prompt)
    with Sharing(store, pass_s=0.5) as serving:
        reads = 0

        def stall(data: Bytes) -> Bytes:
            nonlocal reads
            reads += 1
            if reads > 1:
                serving.objects.go.clear()
                serving.objects.stuck.wait(0)
                assert serving.objects.go.wait(60)
            return data

        serving.objects.lies = stall
        assert serving.run(request_of("b", prompt=prompt)) == [expected]
        assert sources(serving, "b") in ({}, {"shared": 8})
        assert serving.at_rest().totals.restores == {("shared", "deadline"): 1}
        serving.objects.go.set()
        assert serving.run(request_of("c", 41, seed=9)) == [serving.reference(request_of("c", 41, seed=9))]


def test_shared_object_that_was_deleted_meanwhile_is_computed_and_no_failure() -> None:
    store, prompt = ObjectMemory(), prompt_of(41, 4)
    expected = answered(store, prompt)
    with Sharing(store, memory=2) as serving:
        assert serving.run(request_of("b", prompt=prompt)) == [expected]
        assert sources(serving, "b") == {"shared": 40}
        for key in keys_of(prompt)[2:]:
            serving.objects.remove(key)
        for number in range(6):
            serving.run(request_of(f"flood-{number}", 40, seed=100 + number, max_tokens=1))
        assert serving.run(request_of("c", prompt=prompt)) == [expected]
        assert sources(serving, "c") == {"shared": 16}
        assert ("shared", "transfer_failed") not in serving.at_rest().totals.restores
        assert not serving.state.paused


def test_shared_miss_is_not_asked_for_again_and_is_no_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Sharing(ObjectMemory()) as serving:
        serving.rested()
        serving.objects.write_error = OSError("full")
        prompt = prompt_of(41, 4)
        with caplog.at_level(logging.INFO):
            serving.run(request_of("a", prompt=prompt))
            serving.at_rest()
            for number in range(6):
                serving.run(request_of(f"flood-{number}", 7, seed=100 + number, max_tokens=1))
        assert serving.objects.asked.count(keys_of(prompt)[0]) <= 2, "once to read it and once to write it"
        assert serving.at_rest().totals.restores == {("shared", "missing"): 1}
        assert "computes what is cached" not in caplog.text


@pytest.mark.parametrize("probe_s", [0.001, 0.01])
def test_shared_prediction_has_the_latency_and_the_rate_of_the_store(probe_s: float) -> None:
    """A prompt waits for an unknown object only for a small part of its time of computing."""
    now = 100.0
    cache = make_cache(9)
    memory = Tier(MemoryStore(8 * BLOCK, BLOCK, None), cache, clock=lambda: now)
    tier = SharedTier(UnkindObjects(ObjectMemory()), cache, memory, 100 * OBJECT, clock=lambda: now)
    asked: list[bytes] = []
    tier._ask = asked.append  # type: ignore[method-assign, assignment]
    names = block_hashes(range(64), 4, root_hash())
    tier._probe_s = probe_s
    tier._speed.add(1, 0.0, 0.02 / 0.3, now)  # a block takes 0.02 s

    def within_s(compute_s: float) -> float:
        return tier.within_s(names, 0, 4, compute_s)

    assert not within_s(0.15), "4 blocks take 0.08 s"
    assert not asked
    assert within_s(0.2 if probe_s < 0.01 else 0.3)
    if probe_s == 0.01:
        assert not within_s(0.17), "with the answer, it is 0.09 s"
    tier._probe_s = 0.1
    assert not within_s(1.0) and asked == [names[EACH - 1]], "the answer comes for the next turn"
    group, _ = group_of(1)
    tier._learn(Found(group._replace(names=tuple(names[:EACH])), None))
    assert within_s(1.0), "it is known"
    tier._queued = 40
    assert not within_s(1.0), "others come first"
    tier._queued = 0
    tier._speed.failed(now)
    assert not within_s(100.0)
    for each in (memory, tier):
        each.close()


def test_shared_answers_are_measured() -> None:
    with Sharing(ObjectMemory()) as serving:
        serving.until(lambda now: serving.shared._probe_s != shared_module.FIRST_PROBE_S)


class HeardAgain(Heard):
    """Blocks of a shared store may be published again."""

    def publish(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if isinstance(change, Stored) and change.medium == SHARED_STORAGE:
                self.known[SHARED_STORAGE].discard(change.name)
        super().publish(changes)


def test_shared_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers still know the objects that the worker forgets, because the store has them."""
    monkeypatch.setattr(known_objects, "KNOWN", 3)
    monkeypatch.setattr(known_objects, "MISSES", 4)
    monkeypatch.setattr(shared_module, "ENDS", 2)
    heard = HeardAgain()
    heard.known[SHARED_STORAGE] = set()
    with Sharing(ObjectMemory(), kv_events=KvEvents(heard)) as serving:
        for number in range(12):
            request = request_of(f"a{number}", 40, seed=number % 8)
            assert serving.run(request) == [serving.reference(request)]
            serving.rested()
            shared, objects = serving.shared, serving.shared._known
            assert len(objects._known) <= 3 and len(objects._missing) <= 4 and len(shared._ends) <= 2
            known = {name for one in objects._known.values() for name in one.found.group.names}
            serving.until(lambda now, known=known: heard.known[SHARED_STORAGE] >= known)  # type: ignore[misc]
        assert serving.state.totals.dropped, "of 5 objects of a prompt, 2 could wait"
        assert len(serving.objects.list()) > len(objects._known)
        changes = [change for batch in heard.batches for change in batch if change.medium == SHARED_STORAGE]
        assert not [change for change in changes if isinstance(change, Removed)]


@pytest.mark.parametrize(("writers", "unlisted"), [(1, 1 / 16), (3, 1 / 16), (1, 1.0), (2, 0.3)])
def test_shared_size_is_kept_by_several_writers(
    writers: int, unlisted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of `SharedTier`, looked at after every prompt."""
    monkeypatch.setattr(shared_module, "UNLISTED", unlisted)
    store, size = ObjectMemory(), 20 * OBJECT
    servings = [Sharing(store, size=size).__enter__() for _ in range(writers)]
    largest = 0
    try:
        for number in range(24):
            serving = servings[number % writers]
            serving.run(request_of(f"a{number}", 41, seed=number))
            serving.rested()
            held = sum(each.size for each in BlockObjects(store, MODEL, BLOCK, EACH).list())
            largest = max(largest, held)
            assert held <= size + (writers - 1) * max(OBJECT, size * shared_module.UNLISTED)
    finally:
        for serving in servings:
            serving.__exit__(None, None, None)
    assert largest > size * 0.8
    assert sum(serving.state.totals.writes for serving in servings) >= 24 * 10


def test_shared_lists_that_are_late_keep_the_size_and_forget_nothing_new() -> None:
    """Objects that were just written are in no list yet, and those that were deleted still are."""
    store, size = ObjectMemory(), 20 * OBJECT
    with Sharing(store, size=size) as serving:
        serving.objects.unlisted = lambda entry: (
            bytes.fromhex(entry.key[33:65]) in serving.objects.written[-5:]
        )
        for number in range(24):
            request = request_of(f"a{number}", 41, seed=number)
            assert serving.run(request) == [serving.reference(request)]
            serving.rested()
            there = BlockObjects(store, MODEL, BLOCK, EACH).list()
            assert sum(each.size for each in there) <= size + 5 * OBJECT
            serving.objects.long_gone = [entry(number, OBJECT, at=0.0)]
            assert all(key in serving.shared._known for key in keys_of(request.prompt))


def test_shared_objects_that_are_too_old_are_deleted_and_forgotten() -> None:
    now = [1000.0]
    store, prompt = ObjectMemory(), prompt_of(41, 4)
    heard = Heard()
    heard.known[SHARED_STORAGE] = set()
    given: dict[str, Any] = {"expiry_s": 3600.0, "clock": lambda: now[0], "kv_events": KvEvents(heard)}
    with Sharing(store, **given) as serving:
        serving.run(request_of("a", prompt=prompt))
        serving.rested()
        assert heard.known[SHARED_STORAGE] > set(block_hashes(prompt, 4, root_hash())[:10]), "and the answer"
        serving.shared._wall_clock = lambda: time.time() + 3700
        now[0] += 2 * shared_module.SWEEP_S
        serving.run(request_of("b", 3, max_tokens=1))
        serving.until(lambda now: not heard.known[SHARED_STORAGE])
        assert serving.objects.list() == []


def test_shared_clear_deletes_the_objects_of_this_model_only() -> None:
    store, prompt = ObjectMemory(), prompt_of(41, 4)
    answered(store, prompt)
    with Sharing(store, namespace=b"2" * 16) as serving:
        serving.run(request_of("a", prompt=prompt))
        serving.rested()
        serving.objects.write_error = OSError("503 Slow Down")
        serving.engine.clear_cache()
        serving.failed_clear = serving.until(lambda now: now.tiers[1].totals.errors == 1)  # type: ignore[attr-defined]
        assert serving.run(request_of("b", prompt=prompt)) == [
            serving.reference(request_of("b", prompt=prompt))
        ]
        assert sources(serving, "b") == {}, "nothing is read until it is cleared"
        serving.objects.written.clear()
        serving.objects.write_error = None
        serving.shared._paused_until = 1e-9
        serving.run(request_of("c", 3, max_tokens=1))
        serving.until(lambda now: not serving.shared._to_clear)
        serving.rested()
        left = serving.objects.list()
        assert serving.objects.keys(left) == set(serving.objects.written), "what was computed since"
        assert {each.namespace for each in left} == {MODEL.hex(), (b"2" * 16).hex()}


def test_shared_flush_writes_what_the_memory_has() -> None:
    store, prompt = ObjectMemory(), prompt_of(41, 4)
    serving = Sharing(store)
    with serving:
        serving.rested()
        serving.objects.go.clear()
        (expected,) = serving.run(request_of("a", prompt=prompt))
        serving.at_rest()
        serving.engine.stop()
        serving.objects.go.set()
        for tier in serving.tiers:
            tier.flush(time.monotonic() + 60)
    with Sharing(store) as serving:
        assert serving.run(request_of("b", prompt=prompt)) == [expected]
        assert sources(serving, "b") == {"shared": 40}


def test_shared_folder_may_come_later_and_other_files_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kv"
    folder.write_text("no folder")
    prompt = prompt_of(41, 4)
    with Sharing(folder) as serving:
        serving.run(request_of("a", prompt=prompt))
        serving.until(lambda now: now.tiers[1].totals.errors > 0)
        assert serving.state.paused
        folder.unlink()
        folder.mkdir(mode=0o700)
        (folder / "mine.txt").write_text("stays")
        (folder / "mine.kv").write_text("stays")
        serving.shared._paused_until = 1e-9
        serving.run(request_of("b", prompt=prompt))
        serving.rested()
        serving.engine.clear_cache()
        serving.until(lambda now: not serving.shared._to_clear and not list(folder.glob("*/*.kv")))
    assert {path.name for path in folder.iterdir() if path.is_file()} == {"mine.txt", "mine.kv"}
    assert caplog.text.lower().count("the shared kv store memory://") == 2, "to list, and to read"


@pytest.mark.parametrize("seed", range(4))
def test_shared_random_use_is_right(seed: int) -> None:
    """Three workers, of which the store fails now and then: every answer is the reference's."""
    chance = random.Random(seed)
    store = ObjectMemory()
    servings = [Sharing(store, size=30 * OBJECT, memory=chance.choice((4, 32))).__enter__() for _ in range(3)]
    try:
        for number in range(30):
            serving = chance.choice(servings)
            serving.objects.read_error = OSError("500") if chance.random() < 0.1 else None
            serving.objects.write_error = OSError("503") if chance.random() < 0.1 else None
            flip = chance.random() < 0.1

            def lie(data: Bytes, flip: bool = flip) -> Bytes:
                if flip:
                    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
                return data

            serving.objects.lies = lie
            serving.shared._speed.add(1, 0.0, 1e-6, serving.shared._clock())
            serving.shared._paused_until = min(serving.shared._paused_until, 1e-9)
            prompt = prompt_of(chance.randrange(4, 48), chance.randrange(4))
            request = request_of(f"r{number}", prompt=prompt, salt=chance.choice(("", "", "a")))
            assert serving.run(request) == [serving.reference(request)]
    finally:
        for serving in servings:
            serving.__exit__(None, None, None)
    assert sum(serving.state.totals.hits for serving in servings)
