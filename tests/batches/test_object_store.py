"""Stores of objects, a folder and a real S3: whole or not at all, in parts, and clear words when away."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_api.errors import SetupError, StorageUnavailable
from baton_batches.object_store import PART_BYTES, FolderObjectStore, ObjectStore, S3ObjectStore, new_key
from tests.batches.s3_server import KEYS, S3Server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.close()


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    if request.param == "folder":
        return FolderObjectStore(tmp_path / "files")
    server: S3Server = request.getfixturevalue("s3")
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    return S3ObjectStore(f"s3://bucket/{tmp_path.name}", server.endpoint)


def kept(store: ObjectStore, content: bytes, piece: int = 1 << 20) -> str:
    """The key of a new object."""
    key = new_key("ab" * 32)
    writer = store.writer(key)
    for at in range(0, len(content), piece):
        writer.write(content[at : at + piece])
    writer.commit()
    return key


def whole(store: ObjectStore, key: str, start: int, end: int) -> bytes:
    return b"".join(store.read(key, start, end))


SIZES = [0, 1, 1000, PART_BYTES - 1, PART_BYTES + 1, 2 * PART_BYTES + 12345]


@pytest.mark.parametrize("size", SIZES)
def test_written_object_is_read_back(store: ObjectStore, size: int) -> None:
    content = random.Random(size).randbytes(size)
    key = kept(store, content)
    assert whole(store, key, 0, size) == content
    assert whole(store, key, size // 3, size // 2) == content[size // 3 : size // 2]


def test_object_is_absent_before_the_last_step(store: ObjectStore) -> None:
    key = new_key("")
    writer = store.writer(key)
    writer.write(b"x" * (PART_BYTES + 1))
    with pytest.raises(StorageUnavailable):
        whole(store, key, 0, 1)
    writer.commit()
    assert whole(store, key, PART_BYTES, PART_BYTES + 1) == b"x"


@pytest.mark.parametrize("size", [10, PART_BYTES + 1])
def test_abandoned_object_is_absent(store: ObjectStore, size: int) -> None:
    key = new_key("")
    writer = store.writer(key)
    writer.write(b"x" * size)
    writer.abort()
    with pytest.raises(StorageUnavailable):
        whole(store, key, 0, 1)


def test_second_finish_has_no_effect(store: ObjectStore) -> None:
    writer = store.writer(new_key(""))
    writer.abort()
    writer.abort()


def test_deleted_object_is_gone_and_may_be_deleted_again(store: ObjectStore) -> None:
    key = kept(store, b"abc")
    store.delete(key)
    store.delete(key)
    with pytest.raises(StorageUnavailable, match="is not where it was"):
        whole(store, key, 0, 3)


def test_truncated_object_is_not_a_shorter_answer(store: ObjectStore) -> None:
    key = kept(store, b"abc")
    with pytest.raises(StorageUnavailable):
        whole(store, key, 0, 4)


def test_parallel_writes_are_complete(store: ObjectStore) -> None:
    keys: dict[int, str] = {}

    def write(number: int) -> None:
        keys[number] = kept(store, bytes([number]) * 300_000, 50_000)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, key in keys.items():
        assert whole(store, key, 0, 300_000) == bytes([number]) * 300_000


@pytest.mark.slow
def test_unreachable_bucket_is_reported(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    store = S3ObjectStore("s3://bucket/away", s3.endpoint)
    key = kept(store, b"abc")
    writer = store.writer(new_key(""))
    writer.write(b"abc")
    s3.stop()
    try:
        for attempt in (lambda: whole(store, key, 0, 3), lambda: store.delete(key), writer.commit):
            with pytest.raises(StorageUnavailable, match="does not answer") as refused:
                attempt()
            assert 0 < int(refused.value.headers["retry-after"]) <= 120
    finally:
        s3.start()
    assert whole(store, key, 0, 3) == b"abc"


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix"])
def test_invalid_bucket_url_is_refused(url: str) -> None:
    with pytest.raises(SetupError, match="--files-store"):
        S3ObjectStore(url)
