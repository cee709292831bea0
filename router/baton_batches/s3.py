"""
Objects in an S3 bucket, through obstore.

A large object is uploaded in parts while it is written, and becomes visible with the last step. Reads request
one piece at a time, so that a slow reader holds no connection open. Credentials come as for any tool of AWS:
from `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, a web identity or the machine's role.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from baton_api.errors import SetupError, StorageUnavailable
from baton_batches.object_store import READ_BYTES, ObjectWriter

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
