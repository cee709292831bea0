"""API keys: what is kept of them, who is let in, and files that change under a running server."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest

from baton_api.errors import SetupError, Unauthorized
from baton_api.keys import LOOK_S, OPEN_PATHS, KeyDigest, Keys, read_file


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def hashed(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def allows(keys: Keys, header: str, path: str = "/v1/models") -> bool:
    try:
        keys.check(path, header.encode("latin-1"))
    except Unauthorized:
        return False
    return True


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_server_without_keys_admits_all_clients() -> None:
    keys = Keys()
    assert not keys.required
    assert allows(keys, "") and allows(keys, "Bearer whatever")


@pytest.mark.parametrize(
    ("header", "good"),
    [
        ("Bearer k-1", True),
        ("bearer k-1", True),
        ("BEARER   k-1  ", True),
        ("Bearer k-2", True),
        ("Bearer k-3", False),
        ("Bearer k-1k-2", False),
        ("Bearer", False),
        ("Bearer ", False),
        ("k-1", False),
        ("Basic k-1", False),
        ("", False),
        (f"Bearer {hashed('k-1')}", False),
        ("Bearer \xff\xfe", False),
    ],
)
def test_bearer_of_a_key_is_admitted(header: str, good: bool) -> None:
    keys = Keys((KeyDigest.of("k-1"), KeyDigest.of(hashed("k-2"))))
    assert allows(keys, header) is good


def test_keys_only_monitoring_paths_need_none() -> None:
    keys = Keys((KeyDigest.of("k"),))
    assert sorted(OPEN_PATHS) == ["/health", "/metrics", "/ping", "/ready"]
    assert all(allows(keys, "", path) for path in OPEN_PATHS)
    for path in (
        "/load",
        "/health/",
        "/health_generate",
        "/debug/requests",
        "//health",
        "/v1/health",
        "/HEALTH",
    ):
        assert not allows(keys, "", path), path


def test_missing_and_wrong_keys_differ_and_show_no_key() -> None:
    keys = Keys((KeyDigest.of("right"),))
    with pytest.raises(Unauthorized, match="didn't provide"):
        keys.check("/v1/models", b"")
    with pytest.raises(Unauthorized) as wrong:
        keys.check("/v1/models", b"Bearer sk-almost")
    assert "almost" not in wrong.value.message
    assert wrong.value.headers == {"www-authenticate": 'Bearer realm="baton"'}


def test_keys_are_neither_stored_nor_shown() -> None:
    key = KeyDigest.of("sk-very-secret", "alice")
    keys = Keys((key,))
    assert "secret" not in repr(key) and key.sha256.hex() not in repr(key)
    assert "secret" not in repr(vars(keys))
    assert KeyDigest.of(key.text) == KeyDigest.of("sk-very-secret")


@pytest.mark.parametrize("text", ["", "a b", "tab\t", "ключ", "sha256:12xy", "sha256:" + "g" * 64])
def test_key_digest_of_invalid_key_hides_it(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a key|after sha256:") as caught:
        KeyDigest.of(text)
    assert not text or text.removeprefix("sha256:") not in str(caught.value)


def test_key_file_has_names_digests_and_comments(file: Path) -> None:
    file.write_text(f"# who may\n\n  k-1  \nalice: k-2\n{hashed('k-3')}\nbob@example.org:{hashed('k-4')}\n")
    keys = Keys((KeyDigest.of("k-0"),), str(file))
    given = [f"Bearer k-{number}".encode() for number in range(5)]
    assert [keys.check("/v1/models", one) for one in given] == ["", "", "alice", "", "bob@example.org"]
    assert not allows(keys, "Bearer # who may")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k-1\nsk-se:cret with spaces\n", "line 2: expected a key"),
        ("two words:k\n", "line 1: invalid name before the colon"),
        ("a:sha256:55\n", "line 1: expected 64"),
    ],
)
def test_bad_line_is_named_by_its_number_and_not_repeated(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(SetupError, match=message) as caught:
        read_file(file)
    assert "cret" not in caught.value.message and "two words" not in caught.value.message


def test_missing_binary_or_empty_key_file_prevents_the_start(file: Path) -> None:
    with pytest.raises(SetupError, match=r"Cannot read --api-key-file .*: No such file"):
        Keys((), str(file))
    file.write_text("# none yet\n")
    with pytest.raises(SetupError, match="has no keys"):
        Keys((KeyDigest.of("k"),), str(file))
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SetupError, match="it is not UTF-8 text"):
        Keys((), str(file))


def test_changed_key_file_applies_within_a_second(file: Path) -> None:
    clock = Clock()
    file.write_text("old\n")
    keys = Keys((KeyDigest.of("fixed"),), str(file), clock)
    replace(file, "new\nmore\n")
    assert allows(keys, "Bearer old")  # the file was not checked yet
    clock.now += LOOK_S
    assert not allows(keys, "Bearer old")
    assert allows(keys, "Bearer new") and allows(keys, "Bearer fixed")


def test_broken_key_file_keeps_the_keys_and_logs(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    file.write_text("old\n")
    keys = Keys((), str(file), clock)
    replace(file, "name with spaces:k-2\n")
    clock.now += LOOK_S
    assert allows(keys, "Bearer old") and not allows(keys, "Bearer k-2")
    file.unlink()
    clock.now += LOOK_S
    assert allows(keys, "Bearer old")
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert all("previous keys stay valid" in record.message for record in caplog.records)
    replace(file, "third\n")
    clock.now += LOOK_S
    assert allows(keys, "Bearer third") and not allows(keys, "Bearer old")


def test_emptied_key_file_revokes_all_keys(file: Path) -> None:
    clock = Clock()
    file.write_text("old\n")
    keys = Keys((), str(file), clock)
    replace(file, "# all revoked\n")
    clock.now += LOOK_S
    assert keys.required
    assert not allows(keys, "Bearer old") and not allows(keys, "")


def replace(file: Path, text: str) -> None:
    """As an editor or a mounted secret does it: another file under the same name."""
    new = file.with_suffix(".new")
    new.write_text(text)
    os.replace(new, file)
