"""
API keys: who may use a server, told from the `Authorization` header.

No key is kept. What settings and key files hold is read into SHA-256 digests at once, so that neither a
repr nor a dump of the memory gives one away; keys should be long and random, because a digest of a short
one can be searched for. A presented key is looked up by a digest that is keyed with a secret of this
process: nobody outside can aim at a digest, so the time of a look-up tells nothing, with one key or a
thousand.

A key file is read again when it changes. One that cannot be read then leaves the keys as they were; one
without keys takes them all back, and the server stays closed.
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

__all__ = ["LOOK_S", "NAME", "OPEN_PATHS", "KeyDigest", "KeyDigests", "Keys", "Pepper", "bearer", "read_file"]

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics"})
"""What monitors ask for: never wants a key."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class KeyDigest:
    """One key, as it is kept."""

    sha256: bytes = field(repr=False)
    name: str = ""
    """What the log calls the client; empty if nobody named it."""

    @classmethod
    def of(cls, text: str, name: str = "") -> KeyDigest:
        """`text` is a key or `sha256:<hex>`. Raises ValueError, which never repeats it."""
        if text.startswith("sha256:"):
            hashed = _HASHED.fullmatch(text)
            if hashed is None:
                raise ValueError("after sha256: there must be 64 hexadecimal digits")
            return cls(bytes.fromhex(hashed[1]), name)
        if not text or not all("!" <= letter <= "~" for letter in text):
            raise ValueError("a key has at least one character, all of them visible ASCII")
        return cls(hashlib.sha256(text.encode()).digest(), name)

    @property
    def text(self) -> str:
        """What `of` reads as the same digest."""
        return f"sha256:{self.sha256.hex()}"


def _read(value: object) -> tuple[KeyDigest, ...]:
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, list | tuple):
        raise ValueError("keys are text")
    return tuple(
        one if isinstance(one, KeyDigest) else KeyDigest.of(str(one).strip())
        for one in given
        if isinstance(one, KeyDigest) or str(one).strip()
    )


KeyDigests = Annotated[tuple[KeyDigest, ...], NoDecode, BeforeValidator(_read)]
"""A setting of keys, hashed as it is read; as one text they stand with commas between."""


class Pepper:
    """Digests of digests, under a secret of this process: what a table of keys is looked up by."""

    __slots__ = ("_secret",)

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def __call__(self, sha256: bytes) -> bytes:
        return hashlib.blake2b(sha256, key=self._secret, digest_size=32).digest()


class Keys:
    """The keys that are good now."""

    def __init__(
        self, digests: Iterable[KeyDigest] = (), file: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises SetupError if `file` cannot be read, or has no key in it."""
        self._pepper = Pepper()
        self._fixed = tuple(digests)
        self._file = WatchedFile(file, clock) if file else None
        listed = () if self._file is None else read_file(self._file.path)
        if self._file is not None and not listed:
            raise SetupError(
                f"--api-key-file {self._file.path} has no key in it: nobody could use this server."
            )
        self._names = self._table(listed)

    @property
    def required(self) -> bool:
        """Whether requests want a key at all; does not change, whatever becomes of the file."""
        return bool(self._fixed) or self._file is not None

    def check(self, path: str, authorization: bytes) -> str:
        """The name of the client who sends this header, perhaps empty. Raises Unauthorized."""
        if not self.required or path in OPEN_PATHS:
            return ""
        name = self.name(hashlib.sha256(bearer(authorization)).digest())
        if name is None:
            raise Unauthorized
        return name

    def name(self, sha256: bytes) -> str | None:
        """The name of the client whose key has this digest, perhaps empty; None if it is no key here."""
        self._look()
        return self._names.get(self._pepper(sha256))

    def has_name(self, name: str) -> bool:
        """Whether a key of this name is good now."""
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
            log.error("%s The keys stay as they were.", error.message)
            return
        self._names = self._table(listed)
        log.log(logging.INFO if listed else logging.WARNING, "%s was read again: %d keys", path, len(listed))


def bearer(authorization: bytes) -> bytes:
    """The key or token in the header. Raises Unauthorized if there is none."""
    scheme, _, key = authorization.partition(b" ")
    key = key.strip()
    if scheme.lower() != b"bearer" or not key:
        raise Unauthorized(given=False)
    return key


def read_file(path: Path) -> tuple[KeyDigest, ...]:
    """The keys of a file, line by line. Raises SetupError, which names the line and never repeats it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SetupError(f"--api-key-file {path} cannot be read: {reason}.") from error
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
                    f"--api-key-file {path}, line {number}: before the colon stands a name of at most 64 "
                    "letters, digits and . _ @ -. A key with a colon in it needs a name before it."
                )
        try:
            yield KeyDigest.of(entry, name)
        except ValueError as error:
            raise SetupError(f"--api-key-file {path}, line {number}: {error}.") from error
