"""`baton cache`, on folders that the engine's own store wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from baton_cli.main import main
from baton_engine.tiers.disk import DiskStore
from baton_engine.tiers.objects import BlockObjects, Group, header_bytes
from baton_engine.tiers.slab import BLOCKS, HEADERS, Bytes, sum_of
from baton_engine.tiers.store import Copy

BLOCK = 5000
SLOTS = 7


def read(block: int, out: Bytes) -> int:
    out[:] = block
    return sum_of(out)


def fill(folder: Path, blocks: int, namespace: bytes = b"n" * 16) -> DiskStore:
    """Return an open store with so many blocks."""
    import numpy as np

    store = DiskStore(folder, 4096 + SLOTS * (8192 + 128), BLOCK, namespace)
    row: Bytes = np.empty(BLOCK, dtype=np.uint8)
    copies = [Copy(bytes([number]) * 16, b"", number, number, read(number, row)) for number in range(blocks)]
    assert None not in store.write(copies, read)
    return store


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["cache", *arguments])
    shown = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, shown.out + shown.err


def test_cache_status_of_a_folder_in_use_and_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = fill(tmp_path, 3)
    code, shown = run(capsys, "status", str(tmp_path))
    assert code == 0 and "3 of 7 slots have KV blocks of 1 model, 5.00 kB each" in shown
    assert "A worker uses it." in shown
    store.close()
    code, shown = run(capsys, "status", str(tmp_path), "--output", "json")
    assert code == 0
    assert json.loads(shown) == {
        "in_use": False, "blocks": 3, "slots": 7, "block_bytes": 5000, "models": 1,
        "bytes": 4096 + SLOTS * (8192 + 128),
    }  # fmt: skip


def test_cache_verify_counts_flipped_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = fill(tmp_path, 5)
    assert run(capsys, "verify", str(tmp_path)) == (0, f"{tmp_path}: 5 KV blocks are right, 0 are corrupt.\n")
    content = bytearray((tmp_path / BLOCKS).read_bytes())
    for slot in (1, 3):
        content[slot * 8192 + 4999] ^= 128
    (tmp_path / BLOCKS).write_bytes(content)
    code, shown = run(capsys, "verify", str(tmp_path))
    assert code == 1 and "3 KV blocks are right, 2 are corrupt" in shown
    code, shown = run(capsys, "verify", str(tmp_path), "--output", "json")
    assert (code, json.loads(shown)) == (1, {"good": 3, "corrupt": 2, "changed": 0})
    store.close()


def test_cache_clear_waits_for_the_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = fill(tmp_path, 5)
    code, shown = run(capsys, "clear", str(tmp_path))
    assert code == 2 and "is in use by another process" in shown
    store.close()
    code, shown = run(capsys, "clear", str(tmp_path))
    assert code == 0 and "are free" in shown and not (tmp_path / BLOCKS).exists()
    code, shown = run(capsys, "clear", str(tmp_path))
    assert code == 2 and "has no KV blocks of a worker" in shown
    store = DiskStore(tmp_path, 4096 + SLOTS * (8192 + 128), BLOCK, b"n" * 16)
    assert not store.found
    store.close()


@pytest.mark.parametrize("command", ["status", "verify", "clear"])
def test_cache_of_another_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        code, shown = run(capsys, command, str(folder))
        assert code == 2 and f"{folder} has no KV blocks of a worker" in shown
    for name in (HEADERS, BLOCKS):
        (tmp_path / name).write_bytes(b"something else")
    code, shown = run(capsys, command, str(tmp_path))
    assert code == 2 and "has a format that this version of Baton does not know" in shown
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        HEADERS: b"something else", BLOCKS: b"something else",
    }  # fmt: skip
    code, shown = run(capsys, command, str(tmp_path), "--output", "xml")
    assert code == 2 and "Expected text or json" in shown


def test_cache_status_does_not_wait_for_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / HEADERS)
    code, shown = run(capsys, "status", str(tmp_path))
    assert code == 1 and "not a regular file" in shown


def share(folder: Path, objects: int, namespace: bytes = b"n" * 16) -> list[Path]:
    """Write so many objects of two blocks to a shared store, and return their files."""
    import numpy as np

    store = BlockObjects(folder, namespace, BLOCK, 2)
    for number in range(objects):
        content: Bytes = np.full(store.bytes, number, dtype=np.uint8)
        value = sum_of(content[header_bytes(2) : header_bytes(2) + BLOCK])
        store.put(Group(0, b"p" * 16, (b"a" * 16, bytes([number]) * 16), (value, value)), content)
    return sorted(folder.glob("*/*.kv"))


def test_cache_of_a_shared_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = share(tmp_path / "kv", 3)
    share(tmp_path / "kv", 1, b"m" * 16)
    (tmp_path / "kv" / "mine.kv").write_text("stays")
    url = f"file://{tmp_path / 'kv'}"
    size = 4 * files[0].stat().st_size
    code, shown = run(capsys, "status", url)
    assert code == 0 and "4 objects with KV blocks of 2 models, 42.0 kB in all" in shown
    code, shown = run(capsys, "status", url, "--output", "json")
    found = json.loads(shown)
    assert 0 <= found.pop("oldest_s") < 600  # written by this test
    assert found == {"objects": 4, "bytes": size, "models": 2}
    code, shown = run(capsys, "verify", url)
    assert code == 0 and "8 KV blocks are right, 0 are corrupt" in shown
    content = bytearray(files[0].read_bytes())
    content[-1] ^= 1
    files[0].write_bytes(content)
    code, shown = run(capsys, "verify", url, "--output", "json")
    assert (code, json.loads(shown)) == (1, {"good": 7, "corrupt": 1, "changed": 0})
    code, shown = run(capsys, "clear", url, "--output", "json")
    assert (code, json.loads(shown)) == (0, {"freed_bytes": size})
    code, shown = run(capsys, "status", url, "--output", "json")
    assert json.loads(shown) == {"objects": 0, "bytes": 0, "models": 0, "oldest_s": 0}
    assert (tmp_path / "kv" / "mine.kv").read_text() == "stays"


def test_cache_of_a_shared_store_that_does_not_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("status", "verify", "clear"):
        code, shown = run(capsys, command, f"file://{tmp_path / 'kv'}")
        assert code != 0 and "is no folder" in shown
        assert not (tmp_path / "kv").exists()
        code, shown = run(capsys, command, "ftp://a/b")
        assert code != 0 and "Expected s3://BUCKET/PATH" in shown
