"""The memory that a router may use, by its container and its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_router.settings import memory_limit


@pytest.mark.parametrize(
    ("container", "meminfo", "limit"),
    [
        ("536870912\n", "MemTotal:  8388608 kB\n", 512 * 1024**2),
        ("max\n", "MemFree: 1 kB\nMemTotal:        2048 kB\n", 2 * 1024**2),
        (None, "MemTotal: 2048 kB\n", 2 * 1024**2),
        (None, None, None),
    ],
)
def test_memory_limit_is_the_lower_one(
    tmp_path: Path, container: str | None, meminfo: str | None, limit: int | None
) -> None:
    files = tmp_path / "memory.max", tmp_path / "meminfo"
    for file, text in zip(files, (container, meminfo), strict=True):
        if text is not None:
            file.write_text(text)
    assert memory_limit(*files) == limit
