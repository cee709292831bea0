"""
The batch controller: each batch is validated, ended and cleaned up once, despite competitors and failures.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton_batches.controller import OUTPUT_S, PARALLEL_BATCHES, SWEEP_S, BatchController
from baton_batches.database import Database
from baton_batches.files import NewFile
from baton_batches.ledger import Ledger
from baton_batches.object_store import ObjectStore, ObjectWriter
from baton_batches.settings import BatchSettings
from baton_batches.storage import Storage
from baton_batches.values import BatchRecord, BatchStatus
from tests.batches.serving import CHAT, answered, line, rows, run_lines
from tests.router.running import until


class Time:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def kept(folder: Path, database: str = "") -> Iterator[Storage]:
    settings = BatchSettings.model_validate(
        {"state": str(folder), "database": database, "batch_poll_s": 0.01}
    )
    with contextlib.closing(Storage(settings, 0)) as storage:
        yield storage


def stored(storage: Storage, text: bytes, now: float, owner: str = "o") -> BatchRecord:
    """A new batch whose input this is."""
    writer = storage.objects.writer(key := f"k/{random.randbytes(8).hex()}")
    writer.write(text)
    writer.commit()
    file = storage.files.add(NewFile(owner, "batch", "f", len(text), "", key, None), int(now))
    return storage.ledger.create(owner, CHAT, file, int(now))


@pytest.fixture
def urls(database_url: str) -> str:
    return database_url if database_url.startswith("postgresql") else ""


def read(storage: Storage, file: str | None, now: float) -> bytes:
    assert file is not None
    batch_rows = storage.files.get("o", file, int(now))
    return b"".join(storage.objects.read(batch_rows.object, 0, batch_rows.bytes))


async def keep_until(keepers: list[BatchController], done: Any) -> None:
    tasks = [asyncio.create_task(one_controller.run()) for one_controller in keepers]
    try:
        await until(done, 30)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_expired_batch_delivers_results_and_names_the_rest(tmp_path: Path, urls: str) -> None:
    time = Time()
    with kept(tmp_path, urls) as storage:
        ledger = storage.ledger
        id = stored(storage, line("a") + line("b") + line("c"), time.now).id
        one_controller = BatchController(storage, time)
        await keep_until([one_controller], lambda: ledger.find(id).status is BatchStatus.IN_PROGRESS)
        epoch = ledger.lease(id, "a runner", time.now, 30)
        assert epoch is not None
        ledger.record(id, epoch, [answered(2)], int(time.now))
        time.now += 86400
        await keep_until([BatchController(storage, time)], lambda: ledger.find(id).status.ended)
        batch = ledger.find(id)
        assert (batch.status, batch.expired_at) == (BatchStatus.EXPIRED, int(time.now))
        assert [row["custom_id"] for row in rows(read(storage, batch.output_file, time.now))] == ["b"]
        errors = rows(read(storage, batch.error_file, time.now))
        assert [(row["custom_id"], row["error"]["code"]) for row in errors] == [
            ("a", "batch_expired"),
            ("c", "batch_expired"),
        ]


async def test_files_of_a_batch_are_kept_for_30_days_from_their_creation(tmp_path: Path, urls: str) -> None:
    """However long it takes to write them: no two looks at the clock show the same second."""

    class Going(Time):
        def __call__(self) -> float:
            self.now += 1.0
            return self.now

    time = Time()
    with kept(tmp_path, urls) as storage:
        id, find = stored(storage, line("a"), time.now).id, storage.ledger.find
        await keep_until([BatchController(storage, time)], lambda: find(id).status is BatchStatus.IN_PROGRESS)
        going = Going()
        going.now = time.now + 86400
        await keep_until([BatchController(storage, going)], lambda: find(id).status.ended)
        error_file = find(id).error_file
        assert error_file is not None
        file = storage.files.get("o", error_file, int(going.now))
        assert file.expires_at == file.created_at + OUTPUT_S


async def test_batch_is_ended_by_one_of_several_controllers(tmp_path: Path, urls: str) -> None:
    """They share a ledger and a folder; each batch has one output file, with each line once."""
    time = Time()
    with kept(tmp_path, urls) as one, kept(tmp_path, urls) as two, kept(tmp_path, urls) as three:
        storages = [one, two, three]
        names = [f"n{number}" for number in range(30)]
        ids = [stored(one, b"".join(line(name) for name in names), time.now).id for _ in range(6)]
        keepers = [BatchController(storage, time) for storage in storages]
        await keep_until(
            keepers, lambda: all(one.ledger.find(id).status is BatchStatus.IN_PROGRESS for id in ids)
        )
        for id in ids:
            run_lines(one.ledger, id, [answered(number) for number in range(1, 31)], time.now)
        keepers = [BatchController(storage, time) for storage in storages]
        await keep_until(
            keepers, lambda: all(one.ledger.find(id).status is BatchStatus.COMPLETED for id in ids)
        )
        for id in ids:
            output = rows(read(one, one.ledger.find(id).output_file, time.now))
            assert [row["custom_id"] for row in output] == names
        listed, _ = one.files.page("o", int(time.now), limit=100)
        assert len(listed) == 12
        assert len([file for file in (tmp_path / "files").rglob("*") if file.is_file()]) == 12


async def test_dead_controller_is_replaced_midway(tmp_path: Path, urls: str) -> None:
    time = Time()
    with kept(tmp_path, urls) as storage:
        id = stored(storage, line("a"), time.now).id
        assert storage.ledger.lease(id, "one that dies", time.now, 15) == 1
        task = asyncio.create_task(BatchController(storage, time).run())
        await asyncio.sleep(0.1)
        assert storage.ledger.find(id).status is BatchStatus.VALIDATING
        time.now += 15
        await until(lambda: storage.ledger.find(id).status is BatchStatus.IN_PROGRESS)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_unreferenced_bytes_are_deleted(tmp_path: Path, urls: str) -> None:
    time = Time()
    with kept(tmp_path, urls) as storage:
        now = int(time.now)
        batch = stored(storage, b"x\n", now)
        storage.files.begin_upload("o/broken", now)
        writer = storage.objects.writer("o/broken")
        writer.write(b"x")
        writer.commit()
        folder = tmp_path / "files"
        await keep_until(
            [BatchController(storage, time)],
            lambda: storage.ledger.find(batch.id).status is BatchStatus.FAILED,
        )
        storage.files.delete("o", batch.input_file, now)
        time.now += 61
        await keep_until([BatchController(storage, time)], lambda: not list(folder.glob("k/*")))
        assert list(folder.glob("o/*"))
        time.now += 2 * 86400
        await keep_until([BatchController(storage, time)], lambda: not list(folder.glob("o/*")))
        time.now += 31 * 86400
        await keep_until([BatchController(storage, time)], lambda: not storage.ledger.page("o", limit=9)[0])
        await until(lambda: storage.files.abandoned_uploads(int(time.now)) == [])


# --- Expiry ---


@pytest.mark.parametrize("validated", [False, True], ids=["validating", "in progress"])
async def test_expired_batch_with_several_controllers_ends_once(
    tmp_path: Path, urls: str, validated: bool
) -> None:
    """
    Rendering takes longer than many checks of the other controllers, which leave the batch to the first.
    """
    time, lines = Time(), 3000
    with kept(tmp_path, urls) as one, kept(tmp_path, urls) as two, kept(tmp_path, urls) as three:
        storages, ledger = [one, two, three], one.ledger
        id = stored(one, b"".join(line(f"n{number}") for number in range(1, lines + 1)), time.now).id
        if validated:
            await keep_until(
                [BatchController(one, time)], lambda: ledger.find(id).status is BatchStatus.IN_PROGRESS
            )
            run_lines(ledger, id, [answered(number) for number in range(1, 1001)], time.now)
        epoch = ledger.find(id).epoch
        time.now += 86_400
        await keep_until(
            [BatchController(storage, time) for storage in storages], lambda: ledger.find(id).status.ended
        )
        batch = ledger.find(id)
        assert (batch.status, batch.epoch) == (BatchStatus.EXPIRED, epoch + 1)
        if validated:
            assert len(rows(read(one, batch.output_file, time.now))) == 1000
            assert len(rows(read(one, batch.error_file, time.now))) == lines - 1000
        listed, _ = one.files.page("o", int(time.now), limit=100)
        assert len(listed) == (3 if validated else 1)


async def test_expired_batch_without_its_input_ends(tmp_path: Path, urls: str) -> None:
    """A batch whose input was lost before it was read is validating until its window passes."""
    time = Time()
    with kept(tmp_path, urls) as storage:
        batch = stored(storage, line("a"), time.now)
        storage.objects.delete(batch.input_object)
        one_controller = BatchController(storage, time)
        await keep_until([one_controller], lambda: storage.ledger.find(batch.id).epoch > 0)
        assert storage.ledger.find(batch.id).status is BatchStatus.VALIDATING
        time.now += 86_400
        await keep_until([BatchController(storage, time)], lambda: storage.ledger.find(batch.id).status.ended)
        assert storage.ledger.find(batch.id).status is BatchStatus.EXPIRED


# --- Beside batches that fail, slow stores and others ---


async def test_controller_with_failing_batches_serves_other_owners(tmp_path: Path, urls: str) -> None:
    """Inputs of two owners' batches are lost. They wait longer each time, outside the slots."""
    time = Time()
    with kept(tmp_path, urls) as storage:
        for owner in ("p", "q") * PARALLEL_BATCHES:
            storage.objects.delete(stored(storage, line("a"), time.now, owner).input_object)
        ids = [stored(storage, line("a"), time.now, owner).id for owner in ("p", "q", "r")]
        ledger = storage.ledger
        await keep_until(
            [BatchController(storage, time)],
            lambda: all(ledger.find(id).status is BatchStatus.IN_PROGRESS for id in ids),
        )


class SlowObjects:
    """A store whose calls block until the test releases them."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self.reading, self.deleting = threading.Event(), threading.Event()
        self.go_on = threading.Event()

    def read(self, key: str, start: int, end: int) -> Iterator[bytes]:
        self.reading.set()
        assert self.go_on.wait(60)
        yield from self._objects.read(key, start, end)

    def writer(self, key: str) -> ObjectWriter:
        return self._objects.writer(key)

    def delete(self, key: str) -> None:
        self.deleting.set()
        assert self.go_on.wait(60)
        self._objects.delete(key)


async def test_controller_waiting_for_the_store_keeps_its_lease(tmp_path: Path, urls: str) -> None:
    """During a long call the lease is renewed, and other work with the ledger continues."""
    time = Time()
    with kept(tmp_path, urls) as storage:
        ledger = storage.ledger
        batches = [stored(storage, line("a"), time.now, owner) for owner in ("p", "q")]
        slow = storage.objects = SlowObjects(storage.objects)
        one_controller = asyncio.create_task(BatchController(storage, time, lease_s=0.3).run())
        try:
            await until(lambda: all(ledger.find(one.id).epoch for one in batches))
            for _ in range(3):
                time.now += 20
                transfers = [
                    asyncio.create_task(storage.transfer(slow.go_on.wait)) for _ in range(50)
                ]  # as many clients wait for the store as there may be
                await until(lambda: all(ledger.find(one.id).leased_until > time.now for one in batches))
                assert await storage.run(lambda: ledger.lease(batches[0].id, "other", time.now, 15)) is None
            assert slow.reading.is_set()
            slow.go_on.set()
            await until(lambda: all(ledger.find(one.id).status is BatchStatus.IN_PROGRESS for one in batches))
            await asyncio.gather(*transfers)
            assert [ledger.find(one.id).epoch for one in batches] == [1, 1]
        finally:
            slow.go_on.set()
            one_controller.cancel()
            await asyncio.gather(one_controller, return_exceptions=True)


async def test_controller_sweeping_a_slow_store_continues(tmp_path: Path, urls: str) -> None:
    """While the removal of an object takes long, a batch that comes is looked after."""
    time = Time()
    with kept(tmp_path, urls) as storage:
        ledger = storage.ledger
        id = stored(storage, line("a"), time.now).id
        run = asyncio.create_task(BatchController(storage, time).run())
        try:
            await until(lambda: ledger.find(id).status is BatchStatus.IN_PROGRESS)
            slow = storage.objects = SlowObjects(storage.objects)
            storage.files.begin_upload("o/broken", 0)
            time.now += SWEEP_S
            await until(slow.deleting.is_set)
            other = stored(storage, b"", time.now)
            ledger.request_cancel("o", other.id, int(time.now))
            await until(lambda: ledger.find(other.id).status is BatchStatus.CANCELLED)
        finally:
            slow.go_on.set()
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)


async def test_late_controller_takes_no_lease(tmp_path: Path, urls: str) -> None:
    """It has seen a batch validating. Before it requests the lease, another controller has validated it."""
    time = Time()
    with kept(tmp_path, urls) as one, kept(tmp_path, urls) as two:
        seen, go_on, attempted = threading.Event(), threading.Event(), threading.Event()

        class LateLedger(Ledger):
            def unfinished(
                self, now: float, status: BatchStatus, *rest: Any, **more: Any
            ) -> list[BatchRecord]:
                batch_rows = super().unfinished(now, status, *rest, **more)
                if batch_rows and status is BatchStatus.VALIDATING:
                    seen.set()
                    assert go_on.wait(60)
                return batch_rows

            def lease(self, *given: Any) -> int | None:
                try:
                    return super().lease(*given)
                finally:
                    attempted.set()

        with contextlib.closing(Database(urls or f"sqlite:///{tmp_path}/ledger.sqlite3")) as database:
            two.ledger = LateLedger(database)
            id = stored(one, line("a"), time.now).id
            late = asyncio.create_task(keep_until([BatchController(two, time)], attempted.is_set))
            await until(seen.is_set)
            await keep_until(
                [BatchController(one, time)], lambda: one.ledger.find(id).status is BatchStatus.IN_PROGRESS
            )
            go_on.set()
            await late
            batch = one.ledger.find(id)
            assert (batch.epoch, batch.runner, batch.leased_until) == (1, "", 0.0)
