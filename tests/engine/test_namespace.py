"""The name of what weights compute: no bit of them may differ, and they are read once."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest

from baton_engine.tiers import namespace
from baton_engine.tiers.namespace import PIECE_BYTES, SETTLED_S, Weights, settled
from baton_engine.tiers.slab import WEIGHTS

LATER = time.time() + 10**6
"""Files of a test count as settled then, however long the tests before it took."""


def name(checkpoint: Path, compatibility: str = "one") -> bytes:
    return Weights.of(checkpoint).namespace(compatibility)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(random.Random(1).randbytes(200_000))
    (folder / "b.safetensors").write_bytes(b"more")
    (folder / "config.json").write_text("{}")
    return folder


def test_name_has_all_bytes_of_a_draft_head(model: Path, tmp_path: Path) -> None:
    """Its keys and values are part of each block."""
    head = tmp_path / "head"
    head.mkdir()
    names = {name(model)}
    for number in range(2):
        (head / "model.safetensors").write_bytes(b"\0" * 70_000 + bytes([number]) + b"\0" * 70_000)
        names.add(Weights.of(model, head=head).namespace("one"))
    assert len(names) == 3


@pytest.fixture
def kept(tmp_path: Path, model: Path) -> Path:
    """A folder that has the digest of `model`."""
    folder = tmp_path / "tier"
    folder.mkdir()
    Weights.of(model, folder, LATER).keep(folder)
    return folder


def read(model: Path, kept: Path) -> bool:
    """Whether the checkpoint is read: else its digest is the one in the folder, which is wrong now."""
    record = kept / WEIGHTS
    if record.exists():
        content = json.loads(record.read_bytes())
        record.write_text(json.dumps(["wrong", *content[1:]]))
    return Weights.of(model, kept, LATER).digest != "wrong"


@pytest.mark.parametrize(
    ("modified", "changed", "known"),
    [
        pytest.param(1.5, 2.5, True, id="long ago"),
        pytest.param(1.5, 1000.5 - SETTLED_S, False, id="changed lately"),
        pytest.param(1000.5 - SETTLED_S, 2.5, False, id="written lately"),
        pytest.param(1.5, 2.0, False, id="an image's time, which who builds it can set"),
    ],
)
def test_digest_is_kept_for_files_whose_changes_would_show(
    modified: float, changed: float, known: bool
) -> None:
    states = [[1, 1, 1, 10**8, 10**8], [1, 2, 1, int(modified * 1e9), int(changed * 1e9)]]
    assert settled(states, now=1000.0) is known


def test_namespace_differs_with_any_bit_of_the_weights_and_the_version(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = model / "a.safetensors"
    seen = {name(model)}
    content = bytearray(weights.read_bytes())
    for at in (0, 77_777, 199_999):
        content[at] ^= 1
        weights.write_bytes(content)
        seen.add(name(model))
    seen.add(name(model, "two"))
    (model / "b.safetensors").unlink()
    seen.add(name(model))
    assert len(seen) == 6
    assert name(weights) in seen, "a file and a folder with it alone are one model"
    monkeypatch.setattr(namespace, "__version__", "another one")
    assert name(weights) not in seen


def test_namespace_of_a_large_file_differs_with_bits_of_each_piece(tmp_path: Path) -> None:
    weights, seen = tmp_path / "model.gguf", set()
    for at in (0, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 99):
        with weights.open("wb") as file:
            file.truncate(2 * PIECE_BYTES + 100)
            file.seek(at)
            file.write(b"1")
        seen.add(name(weights))
    assert len(seen) == 4


def test_weights_that_have_not_changed_are_read_once(model: Path, kept: Path) -> None:
    assert Weights.of(model, kept, LATER) == Weights.of(model, None, LATER)
    assert not read(model, kept)
    (model / "config.json").write_text('{"another": 1}')
    assert not read(model, kept), "it has no weights"
    assert (kept / WEIGHTS).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "change", ["content", "replaced", "longer", "added", "removed", "renamed", "swapped"]
)
def test_weights_that_changed_are_read_again(model: Path, kept: Path, change: str) -> None:
    """Their size and time of change may be the same as before."""
    weights = model / "a.safetensors"
    before = weights.stat()
    if change == "content":
        with weights.open("r+b") as file:
            file.write(b"!")
    elif change == "replaced":
        (model / "new").write_bytes(random.Random(2).randbytes(200_000))
        (model / "new").replace(weights)
    elif change == "longer":
        with weights.open("ab") as file:
            file.write(b"!")
    elif change == "added":
        (model / "c.safetensors").write_bytes(b"")
    elif change == "removed":
        (model / "b.safetensors").unlink()
    elif change == "renamed":
        weights = weights.rename(model / "z.safetensors")
    else:
        (model / "b.safetensors").rename(model / "c.safetensors")
        weights.rename(model / "b.safetensors")
        weights = (model / "c.safetensors").rename(weights)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read(model, kept)


def test_weights_that_changed_lately_are_not_known_by_their_times(tmp_path: Path, model: Path) -> None:
    changed = max(file.stat().st_ctime for file in model.iterdir())
    for now in (changed - 100, changed, changed + SETTLED_S - 1):
        weights = Weights.of(model, tmp_path, now)
        assert weights.states == []
        weights.keep(tmp_path)
        assert not (tmp_path / WEIGHTS).exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"[", b'["wrong"]', b'"wrong"', b"null", b"\xff"])
def test_weights_record_that_is_damaged_is_written_again(model: Path, kept: Path, content: bytes) -> None:
    (kept / WEIGHTS).write_bytes(content)
    weights = Weights.of(model, kept, LATER)
    assert weights == Weights.of(model, None, LATER)
    weights.keep(kept)
    assert not read(model, kept)


def test_weights_record_that_others_can_write_or_that_cannot_be_kept_is_nothing(
    model: Path, kept: Path, tmp_path: Path
) -> None:
    (kept / WEIGHTS).chmod(0o666)
    assert read(model, kept)
    Weights.of(model, None, LATER).keep(tmp_path / "missing")
    (kept / WEIGHTS).unlink()
    (kept / WEIGHTS).mkdir()
    Weights.of(model, kept, LATER).keep(kept)
    assert (kept / WEIGHTS).is_dir()
