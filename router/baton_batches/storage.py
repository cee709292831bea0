"""
Files, batches and their contents of one router, opened on first use and accessed in threads.

The ledger, the object store and the batch controller have separate threads. A slow object store delays
transfers and the controller's work, but no lease expires meanwhile. Without files, a router creates no folder
and connects to no database.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from baton_api.errors import BatonError, StorageFull
from baton_batches.database import Database, StateVolume
from baton_batches.files import FileLedger
from baton_batches.ledger import BatchJobAssignments, Ledger
from baton_batches.metrics import BatchMetrics, summarize
from baton_batches.object_store import FolderObjectStore, ObjectStore
from baton_batches.runner_leases import RunnerLeases
from baton_batches.settings import BatchSettings

Answer = TypeVar("Answer")

LEDGER_THREADS = 5
CONTROLLER_THREADS = 3
"""Together as many as the connections of a database: no other thread holds one for long."""

TRANSFERS = 16
"""Threads that read and write objects for clients and runners, and wait for the store."""

LEDGER = "ledger.sqlite3"
FILES = "files"


class Storage:
    """The storage that the endpoints and the batch controller share."""

    def __init__(self, settings: BatchSettings, port: int) -> None:
        """Opens no file or connection yet. Raises SetupError for an invalid setting."""
        self.settings = settings
        self.metrics = BatchMetrics()
        folder = state_folder(settings.state, port, os.environ)
        self._temporary = folder is None
        self._folder = folder or Path(tempfile.gettempdir()) / f"baton-router-{secrets.token_hex(16)}"
        url = settings.database.get_secret_value()
        self._shared = bool(url)
        self.volume = volume = StateVolume(self._folder, settings.state_limit)
        # Moving the log into a database that is full takes as many bytes, which the reserve has.
        self._database = Database(url or f"sqlite:///{self._folder / LEDGER}", lambda: volume.reserve // 2)
        self.files = FileLedger(self._database)
        self.ledger = Ledger(self._database)
        self.leases = RunnerLeases(self._database)
        self.jobs = BatchJobAssignments(self._database)
        self.objects = self._objects()
        self._ledger_threads = ThreadPoolExecutor(LEDGER_THREADS, thread_name_prefix="ledger")
        self._controller_threads = ThreadPoolExecutor(CONTROLLER_THREADS, thread_name_prefix="controller")
        self._transfers = ThreadPoolExecutor(TRANSFERS, thread_name_prefix="transfer")

    @property
    def in_use(self) -> bool:
        """Whether there may be batches: from before a restart, or from other replicas."""
        return self._shared or (self._folder / LEDGER).exists()

    async def run(self, call: Callable[[], Answer]) -> Answer:
        """Run a ledger call in a thread; it runs to its end even if the caller is cancelled."""
        return await self._run(self._ledger_threads, call)

    async def free(self, call: Callable[[], Answer]) -> Answer:
        """As `run`, for a call that frees space or ends work: it succeeds on a full volume, too."""
        return await self.run(lambda: self.freeing(call))

    def freeing(self, call: Callable[[], Answer]) -> Answer:
        """Make a call of the ledger in this thread; on a full volume with the space of the reserve."""
        try:
            return call()
        except StorageFull:
            with self.volume.released():
                self._database.shrink()
                try:
                    return call()
                finally:
                    self._database.shrink()

    async def transfer(self, call: Callable[[], Answer]) -> Answer:
        """Run a call of the object store in a thread."""
        return await self._run(self._transfers, call)

    async def run_controller(self, call: Callable[[], Answer]) -> Answer:
        """Run the batch controller's long work in a thread."""
        return await self._run(self._controller_threads, call)

    async def _run(self, threads: ThreadPoolExecutor, call: Callable[[], Answer]) -> Answer:
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, call)
        except BatonError as error:
            self.metrics.failed(error)
            raise

    async def refresh_metrics(self, now: float) -> None:
        """Update the batch metrics from the ledger. Raises StorageUnavailable."""
        self.metrics.summary = await self.run(lambda: summarize(self._database, now))

    def close(self) -> None:
        for threads in (self._transfers, self._controller_threads, self._ledger_threads):
            threads.shutdown(wait=True)
        self._database.close()
        if self._temporary:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _objects(self) -> ObjectStore:
        place = self.settings.files_store
        if place.startswith("s3://"):
            from baton_batches.object_store import S3ObjectStore

            return S3ObjectStore(place, self.settings.files_endpoint)
        if place:
            return FolderObjectStore(Path(place).expanduser())
        return FolderObjectStore(self._folder / FILES, self.volume.check)


def state_folder(given: str, port: int, environment: Mapping[str, str]) -> Path | None:
    """
    Where a router keeps its state; None for one that has no place of its own.

    >>> state_folder("", 8080, {"XDG_STATE_HOME": "/var/lib"})
    PosixPath('/var/lib/baton/router-8080')
    """
    if given:
        return Path(given).expanduser()
    if port == 0:
        return None
    home = environment.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "baton" / f"router-{port}"
