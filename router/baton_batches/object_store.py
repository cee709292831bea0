"""
Where the bytes of files lie: a store of objects, which is a folder or speaks S3.

An object appears whole or not at all, under a key that is made up here and never a name that a client chose.
Calls wait for the disk or the network: make them in a thread.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from baton_api.errors import BatonError, StorageFull, StorageUnavailable

READ_BYTES = 256 * 1024
"""Bytes that are read at once; a compromise between calls and the time that other threads wait."""

DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class ObjectWriter(Protocol):
    """An object that is being written, until `commit` or `abort`. `abort` may follow both."""

    def write(self, data: bytes) -> None:
        """Raises StorageFull and StorageUnavailable."""
        ...

    def commit(self) -> None:
        """Store the object durably; it can be read from now on. Raises the same errors."""
        ...

    def abort(self) -> None:
        """Remove the written bytes, as far as the store can be reached."""
        ...


class ObjectStore(Protocol):
    """A store. Keys are letters, digits, `-` and `/`."""

    def writer(self, key: str) -> ObjectWriter:
        """Raises StorageUnavailable."""
        ...

    def read(self, key: str, start: int, end: int) -> Iterator[bytes]:
        """Pieces of bytes `start` to before `end`. Raises StorageUnavailable, also if some are missing."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object, if it exists. Raises StorageUnavailable."""
        ...


def new_key(owner: str) -> str:
    """Return a unique key. The keys of an owner have the same prefix."""
    return f"{owner[:32] or 'shared'}/{secrets.token_hex(16)}"


class FolderObjectStore:
    """Objects as files. A writer uses a temporary file, and moves it to its place in one step."""

    def __init__(self, root: Path, check: Callable[[int], None] = lambda size: None) -> None:
        """
        The folder is created at the first write. `check` is called before bytes are stored, with their
        number, and may raise StorageFull.
        """
        self._root = root
        self._check = check

    def writer(self, key: str) -> ObjectWriter:
        unfinished = self._root / "unfinished" / secrets.token_hex(16)
        self._check(0)
        try:
            unfinished.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            return _FileWriter(unfinished, self._root / key, self._check)
        except OSError as error:
            raise _storage_error(error, self._root) from error

    def read(self, key: str, start: int, end: int) -> Iterator[bytes]:
        try:
            with (self._root / key).open("rb", buffering=0) as file:
                file.seek(start)
                while start < end:
                    piece = file.read(min(READ_BYTES, end - start))
                    if not piece:
                        raise StorageUnavailable("A stored file is shorter than it was when it was stored.")
                    start += len(piece)
                    yield piece
        except OSError as error:
            raise _storage_error(error, self._root) from error

    def delete(self, key: str) -> None:
        try:
            (self._root / key).unlink(missing_ok=True)
        except OSError as error:
            raise _storage_error(error, self._root) from error


class _FileWriter:
    def __init__(self, unfinished: Path, place: Path, check: Callable[[int], None]) -> None:
        self._check = check
        self._unfinished = unfinished
        self._place = place
        self._file = unfinished.open("xb", buffering=0)

    def write(self, data: bytes) -> None:
        self._check(len(data))
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise _storage_error(error, self._place.parent) from error

    def commit(self) -> None:
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            self._place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._unfinished.rename(self._place)
            for folder in (self._place.parent, self._place.parent.parent):
                _sync(folder)
        except OSError as error:
            raise _storage_error(error, self._place.parent) from error

    def abort(self) -> None:
        self._file.close()
        try:
            self._unfinished.unlink(missing_ok=True)
        except OSError as error:
            raise _storage_error(error, self._place.parent) from error


def _sync(folder: Path) -> None:
    """The names in it are on disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _storage_error(error: OSError, where: Path) -> BatonError:
    if error.errno in DISK_FULL_ERRORS:
        return StorageFull("the folder of files")
    if isinstance(error, FileNotFoundError):
        return StorageUnavailable("A stored file is not where it was stored.")
    return StorageUnavailable(f"The folder of files cannot be used: {error.strerror}.")
