"""Objects of KV blocks in folders and buckets: only whole ones are read, and nothing else is deleted."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import obstore
import pytest
from obstore.store import MemoryStore as ObjectMemory
from obstore.store import ObjectStore

from baton_api.errors import SetupError
from baton_engine.tiers import objects as objects_module
from baton_engine.tiers.objects import (
    BlockObjects,
    Damaged,
    Entry,
    Group,
    header_bytes,
    opened,
    outdated,
)
from baton_engine.tiers.slab import Bytes, Checked, sum_of
from tests.batches.s3_server import KEYS, S3Server
from tests.engine.fake_model import make_cache
from tests.plain_http import served

BLOCK = make_cache(2).block_bytes
EACH = 2
"""Blocks of an object: 8 tokens."""
MODEL = b"one of 16 bytes."
OBJECT = header_bytes(EACH) + EACH * BLOCK


def group_of(seed: int) -> tuple[Group, Bytes]:
    """Blocks of random bytes, in the content of an object."""
    chance = np.random.default_rng(seed)
    content = np.zeros(OBJECT, dtype=np.uint8)
    rows = content[header_bytes(EACH) :].reshape(EACH, -1)
    rows[:] = chance.integers(0, 256, rows.shape, dtype=np.uint8)
    names = tuple(chance.bytes(16) for _ in rows)
    return Group(2, b"p" * 16, names, tuple(map(sum_of, rows))), content


def test_put_does_not_replace_an_object(object_store: ObjectStore | Path) -> None:
    objects = BlockObjects(object_store, MODEL, BLOCK, EACH)
    group, content = group_of(1)
    first = objects.put(group, content.copy())
    content[-1] ^= 1
    again = objects.put(group._replace(sums=(0, 0)), content)
    assert again == first == objects.find(group.key)
    assert sum_of(objects.read(first, 1, 1)) == group.sums[1]


def test_object_of_another_key_or_model_is_damaged() -> None:
    """As by a copy of objects, or a collision of names: the header says whose blocks they are."""
    store, stranger = ObjectMemory(), b"2" * 16
    objects = BlockObjects(store, MODEL, BLOCK, EACH)
    (group, content), (other, _) = group_of(1), group_of(2)
    objects.put(group, content)
    raw = bytes(obstore.get(store, f"{MODEL.hex()}/{group.key.hex()}.kv").bytes())
    obstore.put(store, f"{MODEL.hex()}/{other.key.hex()}.kv", raw)
    obstore.put(store, f"{stranger.hex()}/{group.key.hex()}.kv", raw)
    with pytest.raises(Damaged, match="other blocks than its key says"):
        objects.find(other.key)
    with pytest.raises(Damaged, match="other blocks than its key says"):
        BlockObjects(store, stranger, BLOCK, EACH).find(group.key)


@contextlib.contextmanager
def s3_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Serve `s3://bucket`."""
    server = S3Server(folder)
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": server.endpoint}.items():
        monkeypatch.setenv(name, value)
    try:
        yield server
    finally:
        server.close()


@pytest.mark.slow
def test_objects_of_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(tmp_path, monkeypatch) as server:
        store = opened("s3://bucket/kv")
        test_put_does_not_replace_an_object(store)
        objects = BlockObjects(store, MODEL, BLOCK, EACH)
        found = objects.find(group_of(1)[0].key)
        assert found is not None and objects.find(b"none of 16 bytes") is None
        with pytest.raises(FileNotFoundError):
            objects.read(replace(found, version='"another"'), 0, 1)
        objects.clear()
        assert objects.list() == [] == server.objects()
        with monkeypatch.context() as without:  # as of stores that cannot put if absent
            without.setenv("AWS_CONDITIONAL_PUT", "disabled")
            simple = BlockObjects(opened("s3://bucket/kv"), MODEL, BLOCK, EACH)
        for _ in range(2):
            put = simple.put(*group_of(1))
            assert put == simple.find(group_of(1)[0].key)


def entry(number: int, size: int = 10, namespace: bytes = MODEL, at: float | None = None) -> Entry:
    key = number.to_bytes(16)
    return Entry(f"{namespace.hex()}/{key.hex()}.kv", size, float(number) if at is None else at)


@pytest.mark.parametrize(
    ("count", "size", "expiry_s", "gone"),
    [
        pytest.param(10, 100, 0, 0, id="all fit"),
        pytest.param(10, 99, 0, 2, id="too many: the first written, until 0.9 of the size"),
        pytest.param(10, 0, 0, 10, id="none fits"),
        pytest.param(10, 1000, 5.5, 5, id="too old"),
        pytest.param(10, 55, 5.5, 5, id="those that are left fit"),
        pytest.param(10, 30, 5.5, 8, id="too old, and too many"),
        pytest.param(0, 30, 5.5, 0, id="empty"),
    ],
)
def test_outdated_objects(count: int, size: int, expiry_s: float, gone: int) -> None:
    entries = [entry(number) for number in range(count)]
    random.Random(1).shuffle(entries)
    assert outdated(entries, size, expiry_s, now=10.0) == [entry(number) for number in range(gone)]


def test_outdated_is_the_same_for_all_and_enough() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        entries = [
            entry(n, chance.randrange(1, 50), at=chance.randrange(5)) for n in range(chance.randrange(40))
        ]
        size, expiry_s = chance.randrange(400), chance.choice((0, 1, 3))
        gone = outdated(entries, size, expiry_s, now=5.0)
        left = set(entries).difference(gone)
        assert sum(each.size for each in left) <= size
        chance.shuffle(entries)
        assert outdated(entries, size, expiry_s, now=5.0) == gone
        assert outdated(left, size, expiry_s, now=5.0) == []


def test_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    if os.getuid():
        pytest.skip("needs root")
    os.chown(folder, 4711, 4711)
    objects = BlockObjects(folder, MODEL, BLOCK, EACH)
    for _ in range(2):
        with pytest.raises(PermissionError, match="belongs to another user"):
            objects.list()
        os.chown(folder, 0, 0)
        assert objects.list() == []
        os.chown(folder, 4711, 4711)  # now it is, under a store that is open


def test_folder_is_created_for_its_owner_only(tmp_path: Path) -> None:
    BlockObjects(tmp_path / "kv", MODEL, BLOCK, EACH).list()
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


def test_folder_on_a_volume_that_is_not_mounted_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        BlockObjects(tmp_path / "volume" / "kv", MODEL, BLOCK, EACH).list()
    assert not list(tmp_path.iterdir())


def test_folder_may_have_what_others_put_there(tmp_path: Path) -> None:
    """It is neither read nor deleted, and no link is followed."""
    folder, elsewhere = tmp_path / "kv", tmp_path / "elsewhere"
    objects = BlockObjects(folder, MODEL, BLOCK, EACH)
    group, content = group_of(1)
    objects.put(group, content)
    name = f"{group.key.hex()}.kv"
    for place in (folder / "mine" / "deep", elsewhere):
        place.mkdir(parents=True)
        (place / name).write_text("stays")
        (place / f"{name}#1").write_text("stays")
    (folder / "lost+found").mkdir(mode=0o000)
    (folder / "mine" / "loop").symlink_to(folder / "mine")
    (folder / "loop").symlink_to(folder)
    (folder / ("ab" * 16)).symlink_to(elsewhere)
    assert [entry.key for entry in objects.list()] == [f"{MODEL.hex()}/{name}"]
    objects.tidy(time.time() + objects_module.LEFT_BEHIND_S + 1)
    objects.delete(objects.list())
    for place in (folder / "mine" / "deep", elsewhere):
        assert {path.name for path in place.iterdir()} == {name, f"{name}#1"}


def test_files_of_killed_writers_are_deleted(tmp_path: Path) -> None:
    objects = BlockObjects(tmp_path, MODEL, BLOCK, EACH)
    group, content = group_of(1)
    objects.put(group, content)
    folder = tmp_path / MODEL.hex()
    left = folder / f"{group.key.hex()}.kv#1"
    other = folder / "mine#1"
    for path in (left, other):
        path.write_bytes(b"a part")
    objects.tidy(time.time())
    assert left.exists(), "it may be under way"
    objects.tidy(time.time() + objects_module.LEFT_BEHIND_S + 1)
    assert not left.exists() and other.exists()
    assert objects.find(group.key) is not None


KILLED = """
import sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from baton_engine.tiers.objects import BlockObjects, Group, header_bytes
from baton_engine.tiers.slab import sum_of
objects = BlockObjects(Path(sys.argv[1]), b"one of 16 bytes.", 2**20, 2)
content = np.zeros(objects.bytes, dtype=np.uint8)
rows = content[header_bytes(2):].reshape(2, -1)
for number in range(int(sys.argv[2]), 10**9):
    rows[:, number % 2**20] += 1
    name = number.to_bytes(16)
    objects.put(Group(0, b"p" * 16, (b"a" * 16, name), tuple(map(sum_of, rows))), content)
"""


@pytest.mark.slow
def test_killed_writers_leave_no_part_of_an_object(tmp_path: Path) -> None:
    """Each writes until it is killed; every object that is seen is whole."""
    objects = BlockObjects(tmp_path, MODEL, 2**20, 2)
    for number in range(6):
        before = len(objects.list())
        with subprocess.Popen((sys.executable, "-c", KILLED, str(tmp_path), str(number * 10**6))) as process:
            while len(objects.list()) < before + 3:
                assert process.poll() is None
            process.kill()
    entries = objects.list()
    assert len(entries) >= 18
    assert [objects.check(each) for each in entries] == [Checked(good=2)] * len(entries)


@pytest.mark.parametrize(
    "url",
    ["s3://bucket/path", "gs://bucket/path", "s3://bucket/a@b", "file:///srv/a%20b", "file:////srv/x/../a b"],
)
def test_opened_url(url: str) -> None:
    found = opened(url)
    assert found == Path("/srv/a b") if url.startswith("file") else not isinstance(found, Path)


@pytest.mark.parametrize(
    "url",
    [
        *("", "/kv", "kv", "file://", "file:///", "file://host/kv", "http://a/b", "memory:///", "s3:///kv"),
        *("s3://[bad", "file:///.", "file:////", "file:///tmp/..", "file:///%2F", "file:///a%00b"),
        *("file:///kv?a", "file:///kv#a", "s3://bucket/kv?a=secret", "s3://bucket/kv#secret"),
        *("s3://me:secret@bucket/kv", "s3://me:secret@[bad", "az://secret@box/kv", "file://a:secret@/kv"),
    ],
)
def test_opened_url_that_is_no_store_is_refused(url: str) -> None:
    with pytest.raises(SetupError, match="Expected s3://BUCKET/PATH") as caught:
        opened(url)
    assert "secret" not in caught.value.message


def test_opened_azure_container_without_an_account_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SetupError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        opened("az://container/kv")


@contextlib.contextmanager
def answering(status: int, asked: list[str]) -> Iterator[str]:
    """Serve a store that answers each request so, and notes its method. Yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.command)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def do_HEAD(self) -> None:
            asked.append(self.command)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.send_header("last-modified", "Thu, 26 Nov 2026 00:00:00 GMT")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None: ...

    with served(Handler) as address:
        yield address


@pytest.mark.parametrize(
    ("status", "requests", "error", "reason"),
    [
        pytest.param(403, ["GET"], OSError, "403 Forbidden", id="refused: the reason is the first request's"),
        pytest.param(416, ["GET", "HEAD"], Damaged, "it is empty", id="no such range: it is looked at"),
    ],
)
def test_object_that_cannot_be_read_is_asked_for_once(
    status: int,
    requests: list[str],
    error: type[Exception],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    with answering(status, asked) as endpoint:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(error, match=reason):
            BlockObjects(opened("s3://bucket/kv"), MODEL, BLOCK, EACH).find(b"one of 16 bytes.")
    assert asked == requests
