"""Responses and preserved data with a full or read-only disk, and without database or store."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from baton_api import headers
from baton_api.errors import StorageFull, StorageUnavailable
from baton_batches.database import Database
from baton_batches.ledger import Ledger
from tests.batches.postgres import Postgres
from tests.batches.s3_server import KEYS, S3Server
from tests.batches.serving import (
    answered,
    check_error,
    content,
    create,
    get,
    line,
    reaching,
    rows,
    run_lines,
    serving,
    upload,
    uploaded,
)
from tests.router.running import RunningRouter, until

DISK = 8 * 1024 * 1024
LATER = 2**33
"""Unix seconds at which every upload that has not ended counts as abandoned."""


class Disk:
    """A small file system of its own."""

    def __init__(self, place: Path, size: int = DISK) -> None:
        """A disk of `size` bytes. Skips the test where it cannot be."""
        self.place = place
        place.mkdir()
        if os.getuid() != 0:
            pytest.skip("only root can mount the small file system that is filled here")
        if self._mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs") != 0:
            pytest.skip("mount does not work here")

    def fill(self) -> None:
        with (self.place / "filler").open("wb", buffering=0) as filler:
            try:
                while filler.write(b"x" * 4096):
                    pass
            except OSError:
                pass

    def free(self) -> None:
        (self.place / "filler").unlink()

    def read_only(self, on: bool) -> None:
        assert self._mount("-o", f"remount,{'ro' if on else 'rw'}") == 0

    def files(self) -> list[Path]:
        return [file for file in (self.place / "state" / "files").rglob("*") if file.is_file()]

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.place)], check=True)

    def _mount(self, *options: str) -> int:
        return subprocess.run(["mount", *options, str(self.place)], capture_output=True).returncode


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    mounted = Disk(tmp_path / "disk")
    yield mounted
    mounted.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Disk]:
    """Smaller than SQLite's log would become."""
    mounted = Disk(tmp_path / "disk", DISK // 2)
    yield mounted
    mounted.close()


def check_away(answer: httpx.Response) -> None:
    check_error(answer, 503, None, StorageUnavailable.code)
    assert 1 <= int(answer.headers["retry-after"]) <= 120


async def test_full_disk_is_reported_and_stores_nothing_partial(disk: Disk) -> None:
    async with serving(state=str(disk.place / "state")) as router:
        kept = await uploaded(router, line("a"))
        full = await upload(router, b"x" * 2 * DISK)
        check_error(full, 507, None, StorageFull.code)
        assert full.headers[headers.SHOULD_RETRY] == "false"
        # On a full disk, forgetting the aborted upload frees some space, so that comes before.
        await until(lambda: not router.router.storage.files.abandoned_uploads(LATER))
        assert len(disk.files()) == 1
        disk.fill()
        check_error(await upload(router, b"x" * 5000), 507, None, StorageFull.code)
        check_error(await create(router, kept), 507, None, StorageFull.code)
        assert await content(router, kept) == line("a"), "what is kept can be read all the same"
        assert (await router.client.get("/v1/batches")).json()["data"] == []
        disk.free()
        assert (await create(router, kept)).status_code == 200
        await until(lambda: len(disk.files()) == 1)


@pytest.mark.parametrize("restarted", [False, True])
async def test_full_disk_lets_clients_delete_files_and_cancel_batches(disk: Disk, restarted: bool) -> None:
    settings = {"state": str(disk.place / "state"), "batch_execution": "off"}
    async with serving(**settings) as router:
        batch = (await create(router, await uploaded(router, line("a")))).json()["id"]
        await reaching(router, batch, "in_progress")
        files = [await uploaded(router, b"x" * 50_000) for _ in range(30)]
        if not restarted:
            await check_freeing(router, disk, files, batch)
    if restarted:
        disk.fill()
        async with serving(**settings) as router:
            await check_freeing(router, disk, files, batch)


async def test_disk_that_a_batch_has_filled_lets_clients_delete_files(small_disk: Disk) -> None:
    """SQLite's log takes the last bytes, and moving it into the database takes as many again."""
    settings = {"state": str(small_disk.place / "state"), "batch_execution": "off"}
    async with serving(**settings) as router:
        files = [await uploaded(router, b"x" * 200_000) for _ in range(3)]
        lines = b"".join(line(str(number)) for number in range(2_000))
        batch = (await create(router, await uploaded(router, lines))).json()["id"]
        await reaching(router, batch, "in_progress")

        def fill() -> None:
            for number in range(1, 2_000):
                run_lines(router.router.storage.ledger, batch, [answered(number, "x" * 5_000)], time.time())

        with pytest.raises(StorageFull):
            await router.router.storage.run(fill)
        for id in files:
            deleted = await router.client.delete(f"/v1/files/{id}")
            assert deleted.status_code == 200, deleted.text
        cancelled = await router.client.post(f"/v1/batches/{batch}/cancel")
        assert cancelled.status_code == 200, cancelled.text


async def check_freeing(router: RunningRouter, disk: Disk, files: list[str], batch: str) -> None:
    """On a full disk, cancel the batch and delete the files; then there is space again."""
    disk.fill()
    check_error(await upload(router, b"x" * 5000), 507, None, StorageFull.code)
    cancelled = await router.client.post(f"/v1/batches/{batch}/cancel")
    assert cancelled.status_code == 200, cancelled.text
    for id in files:
        deleted = await router.client.delete(f"/v1/files/{id}")
        assert deleted.status_code == 200, deleted.text
    await reaching(router, batch, "cancelled")
    await until(lambda: len(disk.files()) <= 2)
    await uploaded(router, b"x" * 5000)


async def test_batch_without_space_for_its_files_ends_later(disk: Disk, tmp_path: Path) -> None:
    where = {"state": str(tmp_path / "state"), "files_store": str(disk.place / "state" / "files")}
    async with serving(**where) as router:
        id = (await create(router, await uploaded(router, line("a")))).json()["id"]
        await reaching(router, id, "in_progress")
        disk.fill()
        run_lines(router.router.storage.ledger, id, [answered(1)], time.time())
        await asyncio.sleep(0.3)
        assert (await get(router, id))["status"] == "finalizing"
        disk.free()
        ended = await reaching(router, id, "completed")
        assert len(rows(await content(router, ended["output_file_id"]))) == 1
        assert len(disk.files()) == 2


async def test_disk_that_becomes_read_only_is_reported(disk: Disk, tmp_path: Path) -> None:
    where = {"state": str(tmp_path / "state"), "files_store": str(disk.place / "state" / "files")}
    async with serving(**where) as router:
        kept = await uploaded(router, line("a"))
        disk.read_only(True)
        check_away(await upload(router, b"x"))
        assert await content(router, kept) == line("a")
        disk.read_only(False)
        assert (await upload(router, b"x")).status_code == 200


def test_read_only_database_is_reported(disk: Disk) -> None:
    path = disk.place / "ledger.sqlite3"
    for existed in (False, True):
        disk.read_only(True)
        database = Database(f"sqlite:///{path}")
        with pytest.raises(StorageUnavailable, match="cannot be written"):
            Ledger(database).lease("batch_1", "r", 0, 1)
        database.close()
        disk.read_only(False)
        if not existed:
            database = Database(f"sqlite:///{path}")
            assert Ledger(database).page("a", limit=1) == ([], False)
            database.close()


async def test_unwritable_state_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    async with serving(state=str(tmp_path / "file" / "state")) as router:
        answer = await upload(router, b"x")
        check_away(answer)
        assert "cannot be made" in answer.json()["error"]["message"]
        assert (await router.client.get("/ready")).status_code == 200


def damage(path: Path, start: int) -> None:
    """Overwrite a database from this byte on, and forget what was not yet written to it."""
    path.write_bytes(path.read_bytes()[:start] + b"?" * 60_000)
    for beside in path.parent.glob(f"{path.name}-*"):
        beside.unlink()


@pytest.mark.parametrize("start", [0, 4096])
async def test_damaged_database_is_reported_and_nothing_else_stops(start: int, tmp_path: Path) -> None:
    async with serving(state=str(tmp_path)) as router:
        await uploaded(router, line("a"))
    damage(tmp_path / "ledger.sqlite3", start)
    async with serving(state=str(tmp_path)) as router:
        for answer in (await upload(router, line("a")), await router.client.get("/v1/files")):
            check_away(answer)
            assert "is damaged" in answer.json()["error"]["message"]
        assert (await router.post()).status_code == 200


def test_locked_database_is_awaited_then_reported(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    database = Database(f"sqlite:///{path}", busy_s=0.1)
    ledger = Ledger(database)
    assert ledger.page("a", limit=1) == ([], False)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StorageUnavailable, match="is locked"):
        ledger.lease("batch_1", "r", 0, 1)
    assert ledger.page("a", limit=1) == ([], False), "readers are not kept waiting"
    other.execute("ROLLBACK")
    other.close()
    database.close()


@pytest.mark.slow
async def test_unreachable_postgres_is_retried(postgres: Postgres, tmp_path: Path) -> None:
    settings = {"database": postgres.new_database(), "state": str(tmp_path)}
    async with serving(**settings) as router:
        file = await uploaded(router, line("a") + line("b"))
        id = (await create(router, file)).json()["id"]
        await reaching(router, id, "in_progress")
        run_lines(router.router.storage.ledger, id, [answered(1)], time.time())
        await asyncio.to_thread(postgres.stop)
        try:
            for _ in range(2):
                check_away(await router.client.get(f"/v1/batches/{id}"))
            check_away(await upload(router, b"x"))
            check_away(await create(router, file))
            check_away(await router.client.post(f"/v1/batches/{id}/cancel"))
            assert (await router.client.get("/ready")).status_code == 200
            assert (await router.client.get("/v1/models")).status_code == 200
        finally:
            await asyncio.to_thread(postgres.start)
        assert (await get(router, id))["request_counts"]["completed"] == 1
        run_lines(router.router.storage.ledger, id, [answered(1, "again"), answered(2)], time.time())
        ended = await reaching(router, id, "completed")
        output = rows(await content(router, ended["output_file_id"]))
        texts = [row["response"]["body"]["choices"][0]["message"]["content"] for row in output]
        assert texts == ["yes 1", "yes 2"]
        assert len((await router.client.get("/v1/files")).json()["data"]) == 2


@pytest.mark.slow
async def test_killed_postgres_loses_no_acknowledged_result(postgres: Postgres, tmp_path: Path) -> None:
    async with serving(database=postgres.new_database(), state=str(tmp_path)) as router:
        file = await uploaded(router, line("a"))
        id = (await create(router, file)).json()["id"]
        await asyncio.to_thread(postgres.kill)
        await asyncio.to_thread(postgres.start)
        assert (await get(router, id))["id"] == id
        assert await content(router, file) == line("a")


@pytest.mark.slow
async def test_unreachable_bucket_is_retried(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    s3 = S3Server(tmp_path_factory.mktemp("s3"))
    try:
        where = {"files_store": "s3://bucket/baton", "files_endpoint": s3.endpoint, "state": str(tmp_path)}
        async with serving(**where) as router:
            file = await uploaded(router, line("a"))
            id = (await create(router, file)).json()["id"]
            await reaching(router, id, "in_progress")
            s3.stop()
            check_away(await upload(router, b"x" * 100_000))
            check_away(await router.client.get(f"/v1/files/{file}/content"))
            run_lines(router.router.storage.ledger, id, [answered(1)], time.time())
            assert (await get(router, id))["status"] == "finalizing"
            s3.start()
            ended = await reaching(router, id, "completed")
            assert len(rows(await content(router, ended["output_file_id"]))) == 1
            assert len(s3.objects()) == 2, "the input and the output, and nothing of what failed"
    finally:
        s3.close()
