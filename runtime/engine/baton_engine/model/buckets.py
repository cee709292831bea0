"""
Downloads of models from buckets (S3, Google Cloud Storage) with obstore.

Each object is written to a partial file whose name contains the object's version. The partial files replace
the target files after all objects are complete. An interrupted download resumes at its last byte, and a
folder never mixes two versions. Credentials come from the environment or the machine's role.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from baton_api.errors import SetupError
from baton_engine.model.hub import WANTED
from baton_engine.model.progress import Progress

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PARTIAL = ".fetching"
AT_ONCE = 4
"""Number of concurrent downloads."""

PIECE = 8 * 1024 * 1024
"""Bytes per write."""


@dataclass(frozen=True, slots=True)
class Item:
    """One object of the listing."""

    path: str
    size: int
    version: str

    @property
    def key(self) -> str:
        """Name of the partial file: a digest of path, size and version."""
        return hashlib.sha256(f"{self.path}\0{self.size}\0{self.version}".encode()).hexdigest()


def opened(uri: str, read_timeout: str = "60s", timeout: str = "24h", retries: int = 10) -> ObjectStore:
    """
    Return the store of `s3://BUCKET/PATH` or `gs://BUCKET/PATH`. Raises SetupError.

    By default, the duration of a large file is unlimited; the read timeout ends a stalled connection.
    """
    from obstore.store import from_url

    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
    with _errors(uri):
        return from_url(
            uri,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": "10s",
                "read_timeout": read_timeout,
                "timeout": timeout,
            },
            retry_config={"max_retries": retries},
        )


def download(store: ObjectStore, uri: str, patterns: Sequence[str], folder: Path, progress: Progress) -> str:
    """Download matching objects into `folder` and return a digest of their versions. Raises SetupError."""
    wanted = tuple(patterns) or (*WANTED, "*.gguf")
    with _errors(uri):
        items = [item for item in _listed(store) if any(fnmatch(item.path, pattern) for pattern in wanted)]
    if not items:
        raise SetupError(f"No model files exist under {uri}. Expected files: {', '.join(wanted)}.")
    partial = folder / PARTIAL
    partial.mkdir(exist_ok=True)
    progress.start(f"Fetching {uri}", sum(item.size for item in items))
    lock = threading.Lock()

    def advanced(size: int) -> None:
        with lock:
            progress.advance(size)

    with _errors(uri), ThreadPoolExecutor(AT_ONCE) as pool:
        futures = [pool.submit(_fetch, store, item, partial / item.key, advanced) for item in items]
        for future in futures:
            future.result()
    for item in items:
        target = folder / item.path
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial / item.key, target)
    shutil.rmtree(partial)  # includes partial files of older versions
    progress.done()
    return hashlib.sha256("".join(item.key for item in items).encode()).hexdigest()


def _listed(store: ObjectStore) -> list[Item]:
    import obstore

    items = []
    for page in obstore.list(store):
        for entry in page:
            path = entry["path"]
            if ".." in PurePosixPath(path).parts:
                raise SetupError(f"The object {path!r} would be written outside the model's folder.")
            version = entry["e_tag"] or entry["version"] or entry["last_modified"].isoformat()
            items.append(Item(path, entry["size"], version))
    return sorted(items, key=lambda item: item.path)


def _fetch(store: ObjectStore, item: Item, target: Path, advanced: Callable[[int], None]) -> None:
    """Append the object's remaining bytes to `target`."""
    import obstore

    with target.open("ab") as file:
        offset = file.tell()
        advanced(offset)
        if offset < item.size:
            reply = obstore.get(store, item.path, options={"range": {"offset": offset}})
            if (reply.meta["e_tag"] or item.version) != item.version or reply.meta["size"] != item.size:
                raise SetupError(f"{item.path} changed during the download. Start the download again.")
            for piece in reply.stream(min_chunk_size=PIECE):
                advanced(file.write(memoryview(piece)))
        file.flush()
        os.fsync(file.fileno())
        if file.tell() != item.size:
            raise SetupError(
                f"{item.path} has {file.tell()} bytes instead of {item.size}. Start the download again."
            )


@contextmanager
def _errors(uri: str) -> Iterator[None]:
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")
        raise SetupError(
            f"Cannot read {uri}: {reason}. Credentials and the endpoint come from the environment, "
            "such as AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, GOOGLE_SERVICE_ACCOUNT or "
            "AZURE_STORAGE_ACCOUNT_NAME."
        ) from error
