"""
Models in buckets (S3, Google Cloud Storage), by obstore.

An object is written beside its place, under a name made of its version, and takes its place when all are
there: what was interrupted goes on where it stood, and no two versions are ever mixed. Credentials come as
for any tool of the store: from the environment or the machine's role.
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
"""Objects that are fetched at the same time."""

PIECE = 8 * 1024 * 1024
"""Bytes that are written at once."""


@dataclass(frozen=True, slots=True)
class Item:
    """One object of the listing."""

    path: str
    size: int
    version: str

    @property
    def key(self) -> str:
        """Names this version of this object, and no other."""
        return hashlib.sha256(f"{self.path}\0{self.size}\0{self.version}".encode()).hexdigest()


def opened(uri: str) -> ObjectStore:
    """The store of `s3://BUCKET/PATH` or `gs://BUCKET/PATH`. Raises SetupError."""
    from obstore.store import from_url

    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
    with _errors(uri):
        # A whole file takes as long as it takes; a connection that stands still is cut by its read timeout.
        return from_url(
            uri,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": "10s",
                "read_timeout": "60s",
                "timeout": "24h",
            },
        )


def download(store: ObjectStore, uri: str, patterns: Sequence[str], folder: Path, progress: Progress) -> str:
    """Its files into `folder`; returns the digest of their versions. Raises SetupError."""
    wanted = tuple(patterns) or (*WANTED, "*.gguf")
    with _errors(uri):
        items = [item for item in _listed(store) if any(fnmatch(item.path, one) for one in wanted)]
    if not items:
        raise SetupError(f"There are no files of a model under {uri}. Looked for: {', '.join(wanted)}.")
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
    shutil.rmtree(partial)  # with it what is left of older versions
    progress.done()
    return hashlib.sha256("".join(item.key for item in items).encode()).hexdigest()


def _listed(store: ObjectStore) -> list[Item]:
    import obstore

    items = []
    for page in obstore.list(store):
        for one in page:
            path = one["path"]
            if ".." in PurePosixPath(path).parts:
                raise SetupError(f"The object {path!r} would lie outside of the model's folder.")
            version = one["e_tag"] or one["version"] or one["last_modified"].isoformat()
            items.append(Item(path, one["size"], version))
    return sorted(items, key=lambda item: item.path)


def _fetch(store: ObjectStore, item: Item, target: Path, advanced: Callable[[int], None]) -> None:
    """The object, from where `target` ends."""
    import obstore

    with target.open("ab") as file:
        offset = file.tell()
        advanced(offset)
        if offset < item.size:
            reply = obstore.get(store, item.path, options={"range": {"offset": offset}})
            if (reply.meta["e_tag"] or item.version) != item.version or reply.meta["size"] != item.size:
                raise SetupError(f"{item.path} was changed while it was fetched; fetch again.")
            for piece in reply.stream(min_chunk_size=PIECE):
                advanced(file.write(memoryview(piece)))
        file.flush()
        os.fsync(file.fileno())
        if file.tell() != item.size:
            raise SetupError(f"{item.path} has {file.tell()} bytes instead of {item.size}; fetch again.")


@contextmanager
def _errors(uri: str) -> Iterator[None]:
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")
        raise SetupError(
            f"{uri} could not be read: {reason}. Credentials and the endpoint come from the environment, "
            "such as AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL or GOOGLE_SERVICE_ACCOUNT."
        ) from error
