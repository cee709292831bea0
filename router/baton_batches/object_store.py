"""
Where the bytes of files lie: a store of objects, which is a folder or speaks S3.

An object appears whole or not at all, under a key that is made up here and never a name that a client chose.
Calls wait for the disk or the network: make them in a thread.

In a bucket, a large object is uploaded in parts while it is written, and becomes visible with the last step.
Reads request one piece at a time, so that a slow reader holds no connection open. Credentials come as for any
tool of AWS: from `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, a web identity or the machine's role.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from baton_api.errors import BatonError, SetupError, StorageFull, StorageUnavailable

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


PART_BYTES = 8 * 1024 * 1024
"""Bytes of a part of an upload: S3 takes 10,000 parts."""
PARALLEL_PARTS = 2
READ_REQUEST_BYTES = 16 * READ_BYTES
"""Bytes that one request asks for."""


class S3ObjectStore:
    """Objects under a prefix of one bucket."""

    def __init__(self, url: str, endpoint: str = "") -> None:
        """`url` is `s3://bucket/prefix`; `endpoint` is for S3 that is not Amazon's. Raises SetupError."""
        try:
            self._store = S3Store.from_url(
                url,
                config={"endpoint": endpoint} if endpoint else {},
                client_options={
                    "allow_http": endpoint.startswith("http://"),
                    "timeout": "30s",
                    "connect_timeout": "5s",
                },
                retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=20)},
            )
        except (BaseError, ValueError) as error:
            raise SetupError(
                f"Invalid --files-store: {url!r}. Expected a bucket such as s3://bucket/prefix."
            ) from error

    def writer(self, key: str) -> ObjectWriter:
        return _S3Writer(self._store, key)

    def read(self, key: str, start: int, end: int) -> Iterator[bytes]:
        while start < end:
            with _translated():
                data = obstore.get_range(
                    self._store, key, start=start, end=min(end, start + READ_REQUEST_BYTES)
                )
            if not len(data):
                raise StorageUnavailable("A stored file is shorter than it was when it was stored.")
            start += len(data)
            whole = memoryview(data)
            for place in range(0, len(whole), READ_BYTES):
                yield bytes(whole[place : place + READ_BYTES])

    def delete(self, key: str) -> None:
        with _translated(), suppress(FileNotFoundError):
            obstore.delete(self._store, key)


class _S3Writer:
    def __init__(self, store: S3Store, key: str) -> None:
        self._store = store
        self._key = key
        self._file = obstore.open_writer(store, key, buffer_size=PART_BYTES, max_concurrency=PARALLEL_PARTS)

    def write(self, data: bytes) -> None:
        with _translated():
            self._file.write(data)

    def commit(self) -> None:
        with _translated():
            self._file.close()

    def abort(self) -> None:
        # Parts of an upload without an end stay in the bucket, unseen and paid for: give it one.
        with suppress(BaseError, OSError):
            if not self._file.closed():
                self._file.close()
        with _translated(), suppress(FileNotFoundError):
            obstore.delete(self._store, self._key)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (BaseError, OSError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise StorageUnavailable(
            "A stored file is not where it was stored."
            if missing
            else "The store of files does not answer as it should; try again."
        ) from error
