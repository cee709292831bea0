"""
A tier on a disk: an engine that starts again restores what an earlier one computed, or computes it.

Disks are full, gone, slow and wrong here. None of that is an error, a hang or another token.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import queue
import random
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from baton_api.errors import SetupError
from baton_api.hashing import block_hashes, root_hash
from baton_api.kv_events import HOST_MEMORY, STORAGE
from baton_engine.kv.cache import KVCache
from baton_engine.kv.events import KvEvents
from baton_engine.tiers.disk import DiskStore
from baton_engine.tiers.slab import (
    BLOCKS,
    HEADERS,
    LOCK,
    LOCK_TRIES,
    LOCK_WAIT_S,
    MAGIC,
    PAGE,
    Bytes,
    Slab,
    SlabLocked,
    locked,
    stride_of,
)
from baton_engine.tiers.store import Copy, MemoryStore, Read
from baton_engine.tiers.tier import Tier, TierSnapshot
from tests.engine.fake_model import make_cache
from tests.engine.serving import Serving, prompt_of, request_of
from tests.engine.test_tiers import POOL, STRANGERS, Heard, SlowPasses, sources
from tests.seeds import seeds

BLOCK = make_cache(2).block_bytes
SLOTS = 64
MODEL = b"one of 16 bytes."


def size_of(slots: int) -> int:
    """The size of a folder with so many slots."""
    return PAGE + slots * (stride_of(BLOCK) + 128)


class UnkindDisk(DiskStore):
    """A disk that can stall, and have a sector that cannot be read."""

    def __init__(self, *given: Any) -> None:
        self.go = threading.Event()
        """Cleared, reads and writes stop until it is set."""
        self.go.set()
        self.stuck = threading.Event()
        """Set while one does."""
        self.may_clear = threading.Event()
        """Cleared, it is not cleared until it is set."""
        self.may_clear.set()
        self.bad: int | None = None
        """A slot that cannot be read."""
        super().__init__(*given)

    def write(self, copies: Sequence[Copy], read: Read) -> list[int | None]:
        self._wait()
        return super().write(copies, read)

    def read(self, slot: int) -> Bytes:
        self._wait()
        if slot == self.bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(slot)

    def clear(self) -> None:
        assert self.may_clear.wait(60)
        super().clear()

    def _wait(self) -> None:
        if not self.go.is_set():
            self.stuck.set()
            assert self.go.wait(60)


class Disked(Serving):
    """An engine whose pool has room for 64 tokens, with a tier in memory and one in a folder."""

    disk: UnkindDisk

    def __init__(
        self,
        folder: Path,
        slots: int = SLOTS,
        memory: int = 32,
        namespace: bytes = MODEL,
        pass_s: float = 100.0,
        **given: Any,
    ) -> None:
        """By `pass_s`, restores have much time, on a busy machine too."""

        def tiers(cache: KVCache) -> list[Tier]:
            first = Tier(MemoryStore(memory * BLOCK, BLOCK, None), cache)
            self.disk = UnkindDisk(folder, size_of(slots), BLOCK, namespace)
            return [first, Tier(self.disk, cache, above=first)]

        super().__init__(blocks=POOL, clock=SlowPasses(pass_s), tiers=tiers, **given)

    def __enter__(self) -> Self:
        """The speed of computing is known from the first pass on, which is a worker's warm-up."""
        super().__enter__()
        self.run(request_of("warm-up", 3, max_tokens=1))
        return self

    @property
    def state(self) -> TierSnapshot:
        return self.engine.snapshot().tiers[1]

    def rested(self) -> None:
        """Wait until nothing is copied any more, as far as there is room."""

        def rests(tier: Tier) -> bool:
            return tier._work is None and not (tier._dirty and (tier._index.free or tier is self.tiers[1]))

        self.at_rest()  # all blocks are released
        seen: queue.SimpleQueue[bool] = queue.SimpleQueue()

        def rest(now: object) -> bool:
            """By a command: on another thread, a block could be on its way from one state to the next."""
            self.engine._commands.post(lambda: seen.put(all(map(rests, self.tiers))))
            return seen.get(timeout=60)

        self.until(rest)

    def failed(self, count: int) -> None:
        """Wait until so many writes to the disk have failed."""
        self.until(lambda now: now.tiers[1].totals.errors == count)

    def flood(self, start: int = 1000) -> None:
        """Answer others until neither the pool nor the memory has what was there before."""
        for number in range(6):
            self.run(request_of(f"flood-{start}-{number}", 40, seed=start + number, max_tokens=1))


def answered(folder: Path, prompt: tuple[int, ...], **fields: Any) -> list[int]:
    """Return the answer of an engine that has ended, after it has written the prompt to the disk."""
    with Disked(folder) as serving:
        (tokens,) = serving.run(request_of("a", prompt=prompt, **fields))
        serving.until(lambda now: now.tiers[1].blocks >= len(prompt) // 4)
    return tokens


@pytest.mark.parametrize("length", [4, 5, 33, 40])
def test_disk_next_engine_restores_what_the_last_one_computed(tmp_path: Path, length: int) -> None:
    prompt = prompt_of(length, 5)
    expected = answered(tmp_path, prompt)
    with Disked(tmp_path) as serving:
        assert serving.state.blocks >= length // 4
        assert serving.run(request_of("b", prompt=prompt)) == [expected]
        restored = (length - 1) // 4 * 4
        assert sources(serving, "b") == ({"disk": restored} if restored else {})
        assert serving.outputs["b"][0].cached_tokens == restored
        totals = serving.at_rest().totals
        assert totals.prompt_tokens_computed == 3 + length - restored
        assert totals.prompt_tokens_restored["disk"] == restored
        assert serving.state.totals.hits == restored // 4


def test_disk_keeps_answers_for_the_next_turn(tmp_path: Path) -> None:
    prompt = prompt_of(12, 3)
    with Disked(tmp_path) as serving:
        (answer,) = serving.run(request_of("a", prompt=prompt, max_tokens=20))
        serving.until(lambda now: now.tiers[1].blocks >= 7)
    request = request_of("b", prompt=(*prompt, *answer, 5, 6, 7))
    with Disked(tmp_path) as serving:
        assert serving.run(request) == [serving.reference(request)]
        assert sources(serving, "b") == {"disk": 28}


def test_disk_restores_what_the_memory_has_dropped(tmp_path: Path) -> None:
    """A prompt comes from the pool, the memory and the disk, as far as each has it."""
    with Disked(tmp_path, slots=100, memory=20) as serving:
        prompt = prompt_of(40, 2)
        (expected,) = serving.run(request_of("a", prompt=prompt))
        serving.rested()
        serving.flood()
        assert not serving.tiers[0].has(block_hashes(prompt, 4, root_hash())[0])
        assert serving.run(request_of("b", prompt=prompt)) == [expected]
        assert sources(serving, "b") == {"disk": 36}


@pytest.mark.parametrize(("first", "second"), STRANGERS)
def test_disk_other_models_and_tenants_find_nothing(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    prompt = prompt_of(40, 2)
    for number, given in enumerate((first, second, first)):
        fields = {name: given[name] for name in given if name == "salt"}
        with Disked(tmp_path, namespace=given.get("namespace", MODEL)) as serving:
            request = replace(request_of("a", prompt=prompt, **fields), adapter=given.get("adapter"))
            before = () if request.adapter is None else (request.adapter.weights,)
            reference = serving.reference(replace(request, prompt=(*before, *prompt), adapter=None))
            assert serving.run(request) == [reference]
            assert sources(serving, "a") == ({"disk": 36} if number == 2 else {})
            serving.rested()


def test_disk_flipped_bits_are_found_computed_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(40, 4)
    expected = answered(tmp_path, prompt)
    with (tmp_path / BLOCKS).open("r+b") as file:
        content = bytearray(file.read())
        for slot in range(SLOTS):
            content[slot * stride_of(BLOCK) + BLOCK // 2] ^= 4
        file.seek(0)
        file.write(content)
    with Disked(tmp_path) as serving:
        with caplog.at_level(logging.ERROR):
            assert serving.run(request_of("b", prompt=prompt)) == [expected]
        assert sources(serving, "b") == {}
        assert (serving.state.totals.corrupt, serving.state.totals.hits) == (1, 0)
        assert serving.at_rest().totals.restores == {("disk", "checksum"): 1}
        assert "of the tier disk is corrupt, and is computed" in caplog.text
        serving.rested()
    with Disked(tmp_path) as serving:
        assert serving.run(request_of("c", prompt=prompt)) == [expected]
        assert sources(serving, "c") == {"disk": 4}, "the first block was written again"


def test_disk_is_flushed_at_the_end(tmp_path: Path) -> None:
    """What only pool and memory have at SIGTERM."""
    prompt = prompt_of(40, 4)
    serving = Disked(tmp_path)
    serving.engine.start()
    serving.disk.go.clear()
    (expected,) = serving.run(request_of("a", prompt=prompt))
    serving.engine.stop()
    assert serving.state.blocks == 0
    serving.disk.go.set()
    now = serving.tiers[0]._clock()
    for tier in serving.tiers:
        tier.flush(now + 60)
        tier.flush(now + 60)  # nothing is left
    for tier in serving.tiers:
        tier.close()
    with Disked(tmp_path) as serving:
        assert serving.run(request_of("b", prompt=prompt)) == [expected]
        assert sources(serving, "b") == {"disk": 36}


def test_disk_that_is_stuck_ends_neither_late_nor_with_the_engine(tmp_path: Path) -> None:
    serving = Disked(tmp_path)
    with serving:
        serving.disk.go.clear()
        serving.run(request_of("a", 40, seed=4))
        assert serving.disk.stuck.wait(60)
        serving.engine.stop()
        for tier in serving.tiers:
            tier.flush(tier._clock() + 0.05)
    # `close` left the thread behind; it ends with the process
    serving.disk.go.set()


def test_disk_stalled_read_is_computed_and_the_disk_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(40, 4)
    expected = answered(tmp_path, prompt)
    with Disked(tmp_path, pass_s=0.5) as serving, caplog.at_level(logging.INFO):
        serving.disk.go.clear()
        assert serving.run(request_of("b", prompt=prompt)) == [expected]
        assert serving.at_rest().totals.restores == {("disk", "deadline"): 1}
        serving.until(lambda now: now.tiers[1].paused)
        serving.flood()
        assert serving.run(request_of("c", prompt=prompt)) == [expected]
        assert "disk" not in sources(serving, "c")
        assert caplog.text.count("The tier disk is left alone for a while: deadline") == 1
        serving.disk.go.set()


@pytest.mark.parametrize("deleted", ["folder", BLOCKS, LOCK])
def test_disk_that_was_deleted_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, deleted: str
) -> None:
    folder = tmp_path / "kv"
    with Disked(folder) as serving:
        if deleted == "folder":
            shutil.rmtree(folder)
        else:
            (folder / deleted).unlink()
        tier = serving.tiers[1]
        for number in range(3):
            request = request_of(f"a{number}", 40, seed=number)
            assert serving.run(request) == [serving.reference(request)]
            serving.failed(number + 1)
            assert serving.state.paused
            tier._paused_until = 1e-9  # the pause is over
            assert serving.state.paused, "until a write succeeds"
        assert serving.state.blocks == 0
    assert caplog.text.count("Cannot write") == 1
    assert "its files were deleted" in caplog.text


def test_disk_file_that_is_too_short_is_computed(tmp_path: Path) -> None:
    prompt = prompt_of(40, 4)
    expected = answered(tmp_path, prompt)
    with Disked(tmp_path) as serving:
        (tmp_path / BLOCKS).write_bytes(b"")
        assert serving.run(request_of("b", prompt=prompt)) == [expected]
        assert serving.at_rest().totals.restores == {("disk", "transfer_failed"): 1}


def test_disk_block_that_cannot_be_read_is_computed_and_written_elsewhere(tmp_path: Path) -> None:
    prompt = prompt_of(40, 4)
    expected = answered(tmp_path, prompt)
    with Disked(tmp_path) as serving:
        index, name = serving.tiers[1]._index, block_hashes(prompt, 4, root_hash())[3]
        serving.disk.bad = index._places[name].slot
        assert serving.run(request_of("b", prompt=prompt)) == [expected]
        assert sources(serving, "b") == {"disk": 12}
        serving.rested()
        assert index._places[name].slot != serving.disk.bad == index._free[0]


@pytest.mark.parametrize("why", ["a file", "below a file", HEADERS, BLOCKS, LOCK, "fifo"])
def test_disk_that_cannot_be_opened_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kv"
    if why in (HEADERS, BLOCKS, LOCK):  # another user can write it
        folder.mkdir()
        (folder / why).touch()
        (folder / why).chmod(0o666)
    elif why == "fifo":
        folder.mkdir()
        os.mkfifo(folder / BLOCKS)
    else:
        folder.touch()
        folder = folder if why == "a file" else folder / "below"
    with Disked(folder) as serving:
        request = request_of("a", 40, seed=1)
        assert serving.run(request) == [serving.reference(request)]
        serving.flood()
        assert serving.run(request_of("b", 40, seed=1)) == [serving.reference(request)]
        assert (serving.state.capacity, serving.state.blocks, serving.state.paused) == (0, 0, True)
    assert caplog.text.count(f"The disk tier is not used: cannot open {folder}") == 1


@pytest.mark.parametrize("name", [HEADERS, BLOCKS, LOCK])
def test_disk_files_that_are_no_blocks_stay_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (tmp_path / name).write_bytes(b"something else")
    for _ in range(2):
        store = DiskStore(tmp_path, size_of(4), BLOCK, MODEL)
        assert store.slots == 0
        store.close()
        assert (tmp_path / name).read_bytes() == b"something else"
    assert caplog.text.count("its files are not KV blocks") == 2


def test_disk_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    for name in (HEADERS, BLOCKS, LOCK):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o644)
    DiskStore(tmp_path, size_of(4), BLOCK, MODEL).close()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_disk_that_cannot_grow_keeps_its_blocks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def opened(slots: int) -> tuple[int, int]:
        store = DiskStore(tmp_path, size_of(slots), BLOCK, MODEL)
        found = store.slots, len(store.found)
        if store.slots and not store.found:
            store.write([Copy(b"a" * 16, b"", 1, 1, 0)], lambda slot, out: 0)
        store.close()
        return found

    assert opened(4) == (4, 0)
    sizes = {path: path.stat().st_size for path in (tmp_path / HEADERS, tmp_path / BLOCKS)}
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE + 64 * 128 + stride_of(BLOCK), unlimited[1]))
    try:
        assert opened(64) == (0, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert os.strerror(errno.EFBIG) in caplog.text
    assert {path: path.stat().st_size for path in sizes} == sizes
    assert opened(4) == (4, 1)


def test_slab_lock_that_is_only_read_is_waited_for(tmp_path: Path) -> None:
    """As by `baton cache status`."""
    os.close(locked(tmp_path))
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            os.close(reader)

    reader = os.open(tmp_path / LOCK, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    writer = locked(tmp_path, sleep)
    assert waits == [LOCK_WAIT_S] * 3
    with pytest.raises(SlabLocked):
        locked(tmp_path, sleep)
    assert len(waits) == 3, "one that writes is not waited for"
    os.close(writer)
    reader = os.open(tmp_path / LOCK, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    with pytest.raises(SlabLocked):
        locked(tmp_path, sleep)
    assert len(waits) == 3 + LOCK_TRIES
    os.close(reader)


def test_disk_folder_is_of_one_process(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, size_of(4), BLOCK, MODEL)
    with pytest.raises(SlabLocked, match=rf"{tmp_path} is in use by another process \(pid \d+\)"):
        DiskStore(tmp_path, size_of(4), BLOCK, MODEL)
    store.close()
    DiskStore(tmp_path, size_of(4), BLOCK, MODEL).close()


def test_disk_size_is_a_limit_and_less_than_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="less than one KV block"):
        DiskStore(tmp_path, size_of(1) - 1, BLOCK, MODEL)
    for slots in (1, 7, 3):
        store = DiskStore(tmp_path, size_of(slots), BLOCK, MODEL)
        assert store.slots == slots
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= size_of(slots) + 32, "and the pid"
        store.close()


def test_disk_that_is_full_takes_blocks_from_their_second_use_on(tmp_path: Path) -> None:
    with Disked(tmp_path, slots=20, memory=64) as serving:

        def use(seed: int) -> None:
            """Answer a prompt of 10 blocks, which are copied before others evict them."""
            serving.run(request_of(f"{seed}-{len(serving.outputs)}", 40, seed=seed, max_tokens=1))
            serving.rested()

        for seed in (50, 51):
            use(seed)
        assert serving.state.blocks == 20
        tier, writes = serving.tiers[1], serving.state.totals.writes
        first = block_hashes(prompt_of(40, 3), 4, root_hash())[0]
        for seed in (3, 90, 91):
            use(seed)
        assert serving.tiers[0].has(first) and not tier.has(first)
        assert serving.state.totals.writes == writes
        use(3)
        assert tier.has(first) and serving.state.blocks == 20


def test_disk_cleared_with_the_cache_gives_nothing_back_to_the_next_engine(tmp_path: Path) -> None:
    prompt = prompt_of(40, 4)
    answered(tmp_path, prompt)
    with Disked(tmp_path) as serving:
        serving.engine.clear_cache()
        serving.run(request_of("b", 4))
        serving.tiers[1]._copier.submit(lambda: None).result(60)
    with Disked(tmp_path) as serving:
        assert serving.state.blocks <= 3
        serving.run(request_of("c", prompt=prompt))
        assert sources(serving, "c") == {}


def test_disk_clear_behind_a_copy_is_waited_for_at_the_end(tmp_path: Path) -> None:
    prompt = prompt_of(40, 4)
    answered(tmp_path, prompt)
    with Disked(tmp_path) as serving:
        serving.disk.go.clear()
        serving.run(request_of("a", 40, seed=5))
        assert serving.disk.stuck.wait(60)
        serving.disk.may_clear.clear()
        serving.engine.clear_cache()
        serving.run(request_of("b", 4))  # after the command
        serving.engine.stop()
        serving.disk.go.set()
        soon = threading.Timer(0.05, serving.disk.may_clear.set)
        soon.start()
        tier = serving.tiers[1]
        tier.flush(tier._clock() + 60)
        with Slab.reading(tmp_path) as slab:
            left = {header.name for header in slab.headers().values()}
        assert left.isdisjoint(block_hashes(prompt, 4, root_hash()))
        soon.join()


def test_disk_blocks_of_an_earlier_engine_are_published(tmp_path: Path) -> None:
    prompt = prompt_of(40, 4)
    answered(tmp_path, prompt)
    heard = Heard()
    heard.known[STORAGE] = set()
    with Disked(tmp_path, kv_events=KvEvents(heard)) as serving:
        serving.run(request_of("b", 4))
        assert heard.known[STORAGE] >= set(block_hashes(prompt, 4, root_hash()))


@pytest.mark.parametrize("seed", seeds(4, quick=1))
def test_disk_random_use_over_many_starts_is_right_and_known_to_subscribers(
    tmp_path: Path, seed: int
) -> None:
    """Sizes, models and bits change between starts."""
    chance = random.Random(seed)
    for start in range(4):
        heard = Heard()
        heard.known[STORAGE] = set()
        model = chance.choice((b"1" * 16, b"2" * 16))
        slots, memory = chance.randint(15, 30), chance.randint(8, 24)
        with Disked(tmp_path, slots, memory, model, kv_events=KvEvents(heard)) as serving:
            for number in range(15):
                length = chance.randint(1, 45)
                name, seed_, tokens = f"r{start}-{number}", chance.randint(0, 5), chance.randint(1, 9)
                request = request_of(name, length, seed=seed_, max_tokens=tokens)
                assert serving.run(request) == [serving.reference(request)]
                assert serving.state.blocks <= slots
            serving.rested()
            serving.run(request_of("last", 1, max_tokens=1))
            serving.rested()
            first, second = (tier._index for tier in serving.tiers)
            assert heard.known[HOST_MEMORY] == set(first._places)
            assert heard.known[STORAGE] == set(second._places)
            used = [place.slot for place in second._places.values()]
            assert len({*used, *second._free}) == len(used) + len(second._free) == slots
        with (tmp_path / BLOCKS).open("r+b") as file:
            for _ in range(3):
                file.seek(at := chance.randrange(slots * stride_of(BLOCK)))
                old = file.read(1)[0]
                file.seek(at)
                file.write(bytes([old ^ 1 << chance.randrange(8)]))


@pytest.mark.slow
def test_disk_killed_writers_flipped_bits_and_a_full_disk_deliver_no_wrong_block() -> None:
    """1,000 kills and 10,000 bits are in benchmarks/LOG.md."""
    arguments = ("-m", "benchmarks.disk_faults", "--kills", "30", "--flips", "200")
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_disk_writes_no_bytes_of_another_block(tmp_path: Path) -> None:
    """The memory may use a slot for another block while the disk copies it."""
    store = DiskStore(tmp_path, size_of(4), BLOCK, MODEL)

    def read(slot: int, out: Bytes) -> int:
        out[:] = slot
        return 7 if slot == 1 else 8

    copies = [Copy(bytes([number]) * 16, b"", number, number, 7) for number in range(3)]
    assert store.write(copies, read) == [None, 7, None]
    store.close()
    store = DiskStore(tmp_path, size_of(4), BLOCK, MODEL)
    assert [name for name, _ in store.found] == [b"\1" * 16]
    store.close()


def test_slab_with_other_blocks_or_another_format_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answered(tmp_path, prompt_of(40, 4))
    for change in ("block", "format", "damage"):
        store = DiskStore(tmp_path, size_of(SLOTS), BLOCK, MODEL)
        store.write([Copy(b"a" * 16, b"", 1, 1, 0)], lambda slot, out: 0)
        store.close()
        if change == "format":
            (tmp_path / HEADERS).write_bytes(MAGIC + b'{"format": 99, "block_bytes": 9}'.ljust(2 * PAGE))
        elif change == "damage":
            (tmp_path / HEADERS).write_bytes(MAGIC + bytes(100))
        caplog.clear()
        store = DiskStore(tmp_path, size_of(SLOTS), BLOCK + (change == "block"), MODEL)
        assert store.slots == SLOTS and not store.found
        assert caplog.text.count("is emptied: its KV blocks have another size") == (change != "damage")
        store.close()


def test_slab_header_in_the_wrong_slot_or_with_a_flipped_bit_is_none(tmp_path: Path) -> None:
    answered(tmp_path, prompt_of(40, 4))
    content = bytearray((tmp_path / HEADERS).read_bytes())
    with Slab.reading(tmp_path) as slab:
        known = slab.headers()
    chance = random.Random(1)
    for slot in known:
        at = PAGE + slot * 128
        content[at + chance.randrange(128)] ^= 1 << chance.randrange(8)
    free = next(slot for slot in range(SLOTS) if slot not in known)
    content[PAGE + free * 128 : PAGE + free * 128 + 128] = (tmp_path / HEADERS).read_bytes()[
        PAGE : PAGE + 128
    ]
    (tmp_path / HEADERS).write_bytes(content)
    with Slab.reading(tmp_path) as slab:
        assert slab.headers() == {}
