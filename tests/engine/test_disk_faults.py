"""
A disk tier on real file systems that stall, are full and become read-only: all of it is a computation.

The system says what is wrong here, not a fake: an ext4 in a file is frozen (`fsfreeze`), filled, and aborted,
as ext4 does with itself when its disk fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_engine.tiers.disk import DiskStore
from tests.engine.serving import prompt_of, request_of
from tests.engine.test_disk_tier import BLOCK, MODEL, SLOTS, Disked, answered, size_of
from tests.engine.test_tiers import sources

MISSING = [tool for tool in ("mount", "mkfs.ext4", "fsfreeze") if shutil.which(tool) is None]
BYTES = 8 * 2**20


class FileSystem:
    """An ext4 in a file in memory."""

    def __init__(self, place: Path) -> None:
        """Skips the test where it cannot be mounted."""
        if MISSING:
            pytest.skip(f"{', '.join(MISSING)} are not installed")
        if os.getuid() != 0:
            pytest.skip("only root can mount the file system that fails here")
        self.folder, self._memory = place / "disk", place / "memory"
        self._frozen = False
        for folder in self.folder, self._memory:
            folder.mkdir(parents=True)
        if not _done("mount", "-t", "tmpfs", "-o", f"size={2 * BYTES}", "tmpfs", str(self._memory)):
            pytest.skip("mount does not work here")
        image = self._memory / "image"
        with image.open("wb") as file:
            file.truncate(BYTES)
        if not _done("mkfs.ext4", "-q", "-F", str(image)) or not self._mount("-o", "loop", str(image)):
            _done("umount", "-l", str(self._memory))
            pytest.skip("an ext4 in a file cannot be mounted here")

    def freeze(self) -> None:
        """All that changes it waits for `thaw`. It can be read."""
        assert _done("fsfreeze", "-f", str(self.folder))
        self._frozen = True

    def thaw(self) -> None:
        assert _done("fsfreeze", "-u", str(self.folder))
        self._frozen = False

    def fill(self) -> None:
        with (self.folder / "filler").open("wb", buffering=0) as filler:
            try:
                while filler.write(bytes(1024)):
                    pass
            except OSError:
                pass

    def free(self) -> None:
        (self.folder / "filler").unlink()

    def abort(self) -> None:
        """It becomes read-only under those who have its files open."""
        assert self._mount("-o", "remount,abort")

    def read_only(self) -> None:
        assert self._mount("-o", "remount,ro")

    def close(self) -> None:
        if self._frozen:
            self.thaw()
        for folder in self.folder, self._memory:
            assert _done("umount", "-l", str(folder))

    def _mount(self, *options: str) -> bool:
        return _done("mount", *options, str(self.folder))


def _done(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


@pytest.fixture
def system(tmp_path: Path) -> Iterator[FileSystem]:
    system = FileSystem(tmp_path)
    yield system
    system.close()


def test_disk_that_stalls_for_real_holds_nobody_up(system: FileSystem) -> None:
    prompt = prompt_of(40, 4)
    folder = system.folder / "kv"
    expected = answered(folder, prompt)
    with Disked(folder) as serving:
        tier = serving.tiers[1]
        system.freeze()
        try:
            for number in range(8):
                request = request_of(f"a{number}", 40, seed=number + 10)
                assert serving.run(request) == [serving.reference(request)]
            assert tier._work is not None, "a write waits"
            assert serving.run(request_of("b", prompt=prompt)) == [expected]
            assert sources(serving, "b") == {"disk": 36}, "it can be read meanwhile"
            blocks = serving.state.blocks
        finally:
            system.thaw()
        serving.until(lambda now: now.tiers[1].blocks > blocks)
        assert serving.state.totals.errors == 0


def test_disk_that_is_full_for_real_keeps_its_room(
    system: FileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    """Others fill the disk under the worker. Its files have their space, headers included."""
    prompt = prompt_of(40, 4)
    folder = system.folder / "kv"
    with Disked(folder) as serving:
        system.fill()
        assert os.statvfs(folder).f_bavail == 0
        (expected,) = serving.run(request_of("a", prompt=prompt))
        serving.rested()
        assert serving.state.totals.errors == 0, caplog.text
        serving.engine.clear_cache()
        serving.run(request_of("b", prompt=prompt))
        serving.rested()
        assert serving.state.totals.errors == 0, caplog.text
    with Disked(folder) as serving:
        assert serving.run(request_of("c", prompt=prompt)) == [expected]
        assert sources(serving, "c") == {"disk": 36}


def test_disk_that_is_full_from_the_start_is_not_used(
    system: FileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    system.fill()
    folder = system.folder / "kv"
    for _ in range(2):
        with Disked(folder) as serving:
            request = request_of("a", 40, seed=1)
            assert serving.run(request) == [serving.reference(request)]
            assert (serving.state.capacity, serving.state.paused) == (0, True)
    assert caplog.text.count(f"The disk tier is not used: cannot open {folder}") == 2
    system.free()
    answered(folder, prompt_of(40, 4))


def test_disk_that_becomes_read_only_is_read_and_one_line_in_the_log(
    system: FileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(40, 4)
    folder = system.folder / "kv"
    expected = answered(folder, prompt)
    with Disked(folder) as serving:
        tier = serving.tiers[1]
        system.abort()
        for number in range(3):
            request = request_of(f"a{number}", 40, seed=number + 10)
            assert serving.run(request) == [serving.reference(request)]
            serving.failed(number + 1)
            assert serving.state.paused
            tier._paused_until = 1e-9  # the pause is over
        assert serving.run(request_of("b", prompt=prompt)) == [expected]
        assert sources(serving, "b") == {"disk": 36}
    assert caplog.text.count("Cannot write") == 1
    assert "Read-only file system" in caplog.text


def test_disk_that_is_read_only_from_the_start_is_not_used_and_keeps_its_blocks(
    system: FileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(40, 4)
    folder = system.folder / "kv"
    expected = answered(folder, prompt)
    system.read_only()
    with Disked(folder) as serving:
        assert serving.run(request_of("b", prompt=prompt)) == [expected]
        assert (serving.state.capacity, serving.state.paused) == (0, True)
    assert caplog.text.count(f"The disk tier is not used: cannot open {folder}") == 1
    assert "Read-only file system" in caplog.text
    assert system._mount("-o", "remount,rw")
    store = DiskStore(folder, size_of(SLOTS), BLOCK, MODEL)
    assert len(store.found) >= 9
    store.close()
