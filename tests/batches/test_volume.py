"""The limit of a router's state, and the reserve for deleting."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_api.errors import StorageFull
from baton_batches.database import RESERVE, RESERVE_FILE, VOLUME_SHARE, StateVolume
from tests.batches.serving import check_error, serving, upload, uploaded
from tests.router.running import until

LIMIT = 4 * 1024 * 1024


def test_volume_reserves_a_part_of_its_limit_and_gives_it_up(tmp_path: Path) -> None:
    volume, reserve = StateVolume(tmp_path, LIMIT), tmp_path / RESERVE_FILE
    volume.check()
    assert reserve.stat().st_blocks * 512 >= LIMIT // VOLUME_SHARE
    with volume.released():
        assert not reserve.exists()
    assert reserve.stat().st_size == LIMIT // VOLUME_SHARE


def test_volume_without_a_limit_reserves_a_fixed_size(tmp_path: Path) -> None:
    StateVolume(tmp_path).check()
    assert 0 < (tmp_path / RESERVE_FILE).stat().st_size <= RESERVE


def test_folder_that_is_not_there_has_no_reserve(tmp_path: Path) -> None:
    StateVolume(tmp_path / "state").check(2**60)
    assert not (tmp_path / "state").exists()


def test_folder_at_its_limit_is_full_until_something_is_removed(tmp_path: Path) -> None:
    volume = StateVolume(tmp_path, LIMIT, lambda: 0.0)
    volume.check(LIMIT // 4 * 3)
    (tmp_path / "file").write_bytes(b"x" * (LIMIT // 4 * 3))
    with pytest.raises(StorageFull):
        volume.check(LIMIT // 2)
    volume.check(LIMIT // 8)  # announced, and never written
    (tmp_path / "file").unlink()
    volume.check(LIMIT // 2)


async def test_uploads_are_rejected_at_the_limit_and_files_can_be_deleted(tmp_path: Path) -> None:
    async with serving(state=str(tmp_path), state_limit=LIMIT) as router:
        id = await uploaded(router, b"x" * (LIMIT // 2))
        check_error(await upload(router, b"x" * (LIMIT // 2)), 507, None, StorageFull.code)
        assert (await router.client.delete(f"/v1/files/{id}")).status_code == 200
        files = tmp_path / "files"
        await until(lambda: not any(file.is_file() for file in files.rglob("*")))
        assert await uploaded(router, b"x" * (LIMIT // 2))
