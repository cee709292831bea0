"""
Tokenizers that `transformers` has read, stored in the user's cache, so that later starts do not import it.

transformers decides by many rules which class reads a folder, and several classes replace parts of
`tokenizer.json`. The result is an object of the library `tokenizers` and a few settings. This module stores
them under a digest of everything that they depend on: the files and the versions of both libraries.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend

from baton_engine.machine import trusted

log = logging.getLogger(__name__)

KEPT = 8
"""Maximum number of stored tokenizers. The least recently used ones are deleted."""
PREFIX = "tokenizer-"
LIBRARIES = ("transformers", "tokenizers")
WHOLE = 64 * 1024 * 1024
"""Bytes of a file up to which its content counts. Larger files contain weights; their size and time count."""


@dataclass
class Definition:
    """A tokenizer as `transformers` describes it, with the names of its attributes."""

    backend_tokenizer: Backend
    chat_template: str | dict[str, str] | None = None
    """Several templates have names."""
    special_tokens_map: dict[str, str] = field(default_factory=dict)
    """Special tokens by role, such as `bos_token`."""
    response_template: dict[str, Any] | None = None

    @classmethod
    def of(cls, tokenizer: Any) -> Definition:
        """Describe a fast tokenizer of transformers."""
        return cls(
            tokenizer.backend_tokenizer,
            tokenizer.chat_template,
            {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            getattr(tokenizer, "response_template", None),
        )

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    def _id(self, role: str) -> int | None:
        token = self.special_tokens_map.get(role)
        return None if token is None else self.backend_tokenizer.token_to_id(token)


class _Stored(msgspec.Struct):
    """The content of a file, after its digest."""

    backend: str
    chat_template: str | dict[str, str] | None
    special_tokens_map: dict[str, str]
    response_template: dict[str, Any] | None


def folder_digest(folder: Path) -> str:
    """Return the digest of all files of a model's folder that transformers may read. Raises OSError."""
    paths = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
    return digest_of(
        (str(path.relative_to(folder)), _content(path)) for path in sorted(paths) if path.is_file()
    )


def _content(path: Path) -> bytes:
    status = path.stat()
    return path.read_bytes() if status.st_size <= WHOLE else f"{status.st_size} {status.st_mtime_ns}".encode()


def digest_of(parts: Iterable[tuple[str, bytes]]) -> str:
    """Return the digest of named contents, and of the versions of the libraries that read them."""
    digest = hashlib.sha256()
    versions = [(name, importlib.metadata.version(name).encode()) for name in LIBRARIES]
    for name, content in (*versions, *parts):
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def load_or_make(cache: Path, digest: str, make: Callable[[], Any]) -> Definition:
    """
    Return the tokenizer stored in folder `cache` under `digest`.

    Otherwise, store and return what `make` returns: a fast tokenizer of transformers. A stored file that is
    damaged, or that another user can change, is not used. A cache that cannot be written changes nothing.
    """
    path = cache / f"{PREFIX}{digest}"
    trustworthy = trusted(path)
    if trustworthy and (stored := _load(path)) is not None:
        return stored
    definition = Definition.of(make())
    if trustworthy:
        try:
            _store(path, definition)
        except OSError as error:
            log.info("The tokenizer is not stored for later starts: %s", error)
    return definition


def _load(path: Path) -> Definition | None:
    """Return the stored tokenizer; None if it is missing or damaged."""
    try:
        checksum, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if checksum != _checksum(content):
        log.warning("%s is damaged and is made again.", path)
        return None
    stored = msgspec.json.decode(content, type=_Stored)
    with contextlib.suppress(OSError):
        os.utime(path)  # the least recently used ones are deleted
    return Definition(
        Backend.from_str(stored.backend),
        stored.chat_template,
        stored.special_tokens_map,
        stored.response_template,
    )


def _store(path: Path, definition: Definition) -> None:
    """Store a tokenizer, unless its serialization would lose something. Raises OSError."""
    backend = definition.backend_tokenizer
    if backend.encode_special_tokens:  # not part of the serialization
        return
    content = msgspec.json.encode(
        _Stored(
            backend.to_str(),
            definition.chat_template,
            definition.special_tokens_map,
            definition.response_template,
        )
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        written = Path(folder) / path.name
        written.write_bytes(_checksum(content) + b"\n" + content)
        written.chmod(0o644)  # `trusted` rejects files that others can write
        os.replace(written, path)  # atomic: other processes never read a part
    for old in sorted(path.parent.glob(f"{PREFIX}*"), key=_used, reverse=True)[KEPT:]:
        old.unlink(missing_ok=True)


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has deleted it
        return 0.0


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
