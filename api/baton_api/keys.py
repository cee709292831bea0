"""
API keys: authentication of clients by the `Authorization` header, or by Anthropic's `x-api-key`.

Only SHA-256 digests of keys are stored, so a repr or a memory dump does not disclose a key. Keys should be
long and random, because the digest of a short key can be guessed. A presented key is looked up by a digest
that is keyed with a secret of this process. So clients cannot choose digests, and the time of a lookup
discloses no key.

A key file is read again when it changes. If it is unreadable, the previous keys stay valid. If it has no
keys, all its keys are revoked, and the server rejects every request.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator
from pydantic_settings import NoDecode

from baton_api.errors import SetupError, Unauthorized
from baton_api.watched import LOOK_S, WatchedFile

__all__ = [
    "API_KEY",
    "AUTHORIZATION",
    "HEALTH_PATHS",
    "LOOK_S",
    "NAME",
    "OPEN_PATHS",
    "KeyDigest",
    "KeyDigests",
    "Keys",
    "Pepper",
    "bearer",
    "read_file",
    "with_authorization",
]

log = logging.getLogger(__name__)

HEALTH_PATHS = frozenset({"/health", "/ready", "/ping"})
"""Paths for probes, which need no key."""

OPEN_PATHS = HEALTH_PATHS | {"/metrics"}
"""Paths of a worker that need no key."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class KeyDigest:
    """The digest of a key."""

    sha256: bytes = field(repr=False)
    name: str = ""
    """Name of the client in the log. Empty: unnamed."""

    @classmethod
    def of(cls, text: str, name: str = "") -> KeyDigest:
        """Parse a key or `sha256:<hex>`. Raises ValueError, whose message does not contain the key."""
        if text.startswith("sha256:"):
            match = _HASHED.fullmatch(text)
            if match is None:
                raise ValueError("expected 64 hexadecimal digits after sha256:")
            return cls(bytes.fromhex(match[1]), name)
        if not text or not all("!" <= letter <= "~" for letter in text):
            raise ValueError("expected a key of visible ASCII characters")
        return cls(hashlib.sha256(text.encode()).digest(), name)

    @property
    def text(self) -> str:
        """The text that `of` parses as this digest."""
        return f"sha256:{self.sha256.hex()}"


def _read(value: object) -> tuple[KeyDigest, ...]:
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, list | tuple):
        raise ValueError("expected keys as text")
    return tuple(
        key if isinstance(key, KeyDigest) else KeyDigest.of(str(key).strip())
        for key in given
        if isinstance(key, KeyDigest) or str(key).strip()
    )


KeyDigests = Annotated[tuple[KeyDigest, ...], NoDecode, BeforeValidator(_read)]
"""A setting of keys, separated by commas in text. They are hashed when they are read."""


class Pepper:
    """Digests of digests, keyed with a secret of this process, for lookups in a table of keys."""

    __slots__ = ("_secret",)

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def __call__(self, sha256: bytes) -> bytes:
        return hashlib.blake2b(sha256, key=self._secret, digest_size=32).digest()


class Keys:
    """The valid keys."""

    def __init__(
        self, digests: Iterable[KeyDigest] = (), file: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read `file`. Raises SetupError if it is unreadable or has no keys."""
        self._pepper = Pepper()
        self._fixed = tuple(digests)
        self._file = WatchedFile(file, clock) if file else None
        listed = () if self._file is None else read_file(self._file.path)
        if self._file is not None and not listed:
            raise SetupError(
                f"--api-key-file {self._file.path} has no keys, so it would reject every request. Add a key."
            )
        self._names = self._table(listed)

    @property
    def required(self) -> bool:
        """Whether requests need a key. Does not change when the file does."""
        return bool(self._fixed) or self._file is not None

    def check(self, path: str, authorization: bytes) -> str:
        """Return the name of the client for this header, which may be empty. Raises Unauthorized."""
        if not self.required or path in OPEN_PATHS:
            return ""
        name = self.name(hashlib.sha256(bearer(authorization)).digest())
        if name is None:
            raise Unauthorized
        return name

    def name(self, sha256: bytes) -> str | None:
        """Return the name of the client whose key has this digest. None: the key is unknown."""
        self._look()
        return self._names.get(self._pepper(sha256))

    def has_name(self, name: str) -> bool:
        """Return whether a key of this name is valid."""
        self._look()
        return name in self._names.values()

    def _look(self) -> None:
        """Read the file again if it has changed."""
        if self._file is not None and self._file.changed():
            self._read_again(self._file.path)

    def _table(self, listed: Iterable[KeyDigest]) -> dict[bytes, str]:
        return {self._pepper(key.sha256): key.name for key in (*self._fixed, *listed)}

    def _read_again(self, path: Path) -> None:
        try:
            listed = read_file(path)
        except SetupError as error:
            log.error("%s The previous keys stay valid.", error.message)
            return
        self._names = self._table(listed)
        log.log(logging.INFO if listed else logging.WARNING, "Reloaded %s: %d keys", path, len(listed))


def bearer(authorization: bytes) -> bytes:
    """Return the key or token of the header. Raises Unauthorized without one."""
    scheme, _, key = authorization.partition(b" ")
    key = key.strip()
    if scheme.lower() != b"bearer" or not key:
        raise Unauthorized(given=False)
    return key


AUTHORIZATION = b"authorization"
API_KEY = b"x-api-key"
"""The header in which clients of Anthropic's API send their key."""


def with_authorization(given: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """
    Return the headers with a key of `x-api-key` as `Authorization`; a request that has both keeps the latter.

    >>> with_authorization([(b"x-api-key", b"k")])
    [(b'authorization', b'Bearer k')]
    """
    keys = [key for name, key in given if name == API_KEY]
    if not keys:
        return given
    others = [header for header in given if header[0] != API_KEY]
    if any(name == AUTHORIZATION for name, _ in others):
        return others
    return [*others, (AUTHORIZATION, b"Bearer " + keys[0])]


def read_file(path: Path) -> tuple[KeyDigest, ...]:
    """Read the keys of a file. Raises SetupError with the line number, without the line's content."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SetupError(f"Cannot read --api-key-file {path}: {reason}.") from error
    return tuple(_lines(path, text))


def _lines(path: Path, text: str) -> Iterator[KeyDigest]:
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        name = ""
        if ":" in entry and not entry.startswith("sha256:"):
            name, _, entry = (part.strip() for part in entry.partition(":"))
            if not NAME.fullmatch(name):
                raise SetupError(
                    f"--api-key-file {path}, line {number}: invalid name before the colon. Expected at "
                    "most 64 letters, digits and . _ @ -. A key that contains a colon needs a name."
                )
        try:
            yield KeyDigest.of(entry, name)
        except ValueError as error:
            raise SetupError(f"--api-key-file {path}, line {number}: {error}.") from error
