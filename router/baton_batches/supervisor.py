"""
Runners of batches: processes on this machine for each batch with lines to run, and the API for all runners.

The ledger lists those batches. A router takes a lease in the name of the runner that it then starts, so
several routers together start no more runners than `--batch-runners`. A runner that dies loses its lease
immediately and is started again, with growing pauses while it makes no progress. No runner outlives its
router: each holds the end of a pipe that closes with it.

With `--batch-execution subprocess` this router starts runners itself. With `external` another system does,
such as Jobs in Kubernetes for which the router creates BatchJobs. With `off` no runner starts, and batches
wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from baton_api import logs
from baton_api.background import BackgroundTasks
from baton_api.errors import BatonError, SetupError
from baton_api.metrics import BackgroundTask
from baton_batches import runner_credentials
from baton_batches.kubernetes import BatchJobApi, BatchJobReporter
from baton_batches.runner_api import RunnerApi, RunnerTerms
from baton_batches.runner_credentials import RunnerSecret, pod_tokens
from baton_batches.runner_process import ExitStatus, default_name
from baton_batches.settings import BatchSettings
from baton_batches.storage import Storage
from baton_batches.values import BatchRecord

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two reads of the ledger."""

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0

STOP_S = 10.0
"""Seconds that runners have to end when the router does."""

TOKEN_VARIABLE = "BATON_BATCH_TOKEN"
"""Environment variable with the token of a runner. Other users could read it in the arguments."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """A batch whose runners end without having done anything."""

    done: int
    """Lines of it that had a result then."""
    times: int
    until: float
    """Before that no other is started."""

    @staticmethod
    def after(before: Backoff | None, done: int, now: float) -> Backoff:
        times = before.times + 1 if before is not None and before.done == done else 1
        return Backoff(done, times, now + min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(times - 1, 16)))


def choose_batches(
    waiting: Sequence[BatchRecord], running: Collection[BatchRecord], slots: int
) -> list[BatchRecord]:
    """Choose from `waiting` for the free slots: the oldest batch of the owner with the fewest running."""
    running_by_owner = Counter(batch.owner for batch in running)
    remaining = sorted(waiting, key=lambda batch: batch.seq)
    chosen: list[BatchRecord] = []
    while remaining and len(running) + len(chosen) < slots:
        batch = min(
            remaining, key=lambda one: running_by_owner[one.owner]
        )  # the first of several: the oldest
        remaining.remove(batch)
        running_by_owner[batch.owner] += 1
        chosen.append(batch)
    return chosen


class RunnerSupervisor:
    """The runners of one router."""

    def __init__(
        self,
        storage: Storage,
        secret: RunnerSecret,
        slots: int,
        per_batch: int,
        lease_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        At most `slots` runners at a time, and `per_batch` of one batch.

        `clock` gives seconds of the Unix epoch.
        """
        self._per_batch = per_batch
        self._lease_s = lease_s
        self._storage = storage
        self._secret = secret
        self._capacity = slots
        self._clock = clock
        self._running: dict[str, tuple[BatchRecord, asyncio.Task[None]]] = {}
        """By runner."""
        self._setbacks: dict[str, Backoff] = {}
        self._changed = asyncio.Event()

    async def run(self, url: str) -> None:
        """Keep runners that speak to the router at `url`, until cancelled; then none is left."""
        try:
            while True:
                try:
                    await self._start(url)
                except BatonError as error:
                    log.warning("Cannot start a batch: %s", error.message)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._changed.wait()
                self._changed.clear()
        finally:
            tasks = [task for _, task in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, url: str) -> None:
        if len(self._running) >= self._capacity or not self._storage.in_use:
            return
        now = self._clock()
        running = [batch for batch, _ in self._running.values()]
        own = Counter(batch.id for batch in running)
        without = {id for id, count in own.items() if count >= self._per_batch}
        without |= {id for id, setback in self._setbacks.items() if now < setback.until}
        leases = self._storage.leases
        waiting = await self._storage.run(partial(leases.understaffed, now, self._per_batch, without=without))
        for batch in choose_batches(waiting, running, self._capacity):
            name = default_name()
            self._running[name] = batch, asyncio.create_task(self._keep(batch, name, url))

    async def _keep(self, batch: BatchRecord, name: str, url: str) -> None:
        """One runner, from its start to its end."""
        leases, now = self._storage.leases, self._clock()
        try:
            secret = await self._secret.get()
            join = partial(leases.join, batch.id, name, now, self._lease_s, most=self._per_batch)
            if await self._storage.run(join) is not None:  # else another router was faster
                try:
                    status = await self._child(batch, url, name, secret)
                except asyncio.CancelledError:
                    await self._on_exit(batch, name, ExitStatus.TERMINATED)
                    raise
                await self._on_exit(batch, name, status)
        except BatonError as error:
            log.warning("Cannot run %s now: %s", batch.id, error.message)
            self._set_back(batch)
        finally:
            del self._running[name]
            self._changed.set()

    async def _child(self, batch: BatchRecord, url: str, name: str, secret: bytes) -> int:
        token = runner_credentials.issue_token(
            secret, batch.id, runner_credentials.START_EPOCH, batch.owner, batch.expires_at
        )
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "baton_cli.main", "batch", "run"),
            *(f"--router={url}", f"--batch={batch.id}", f"--runner={name}", "--exit-with-parent"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **logs.for_children(), TOKEN_VARIABLE: token},
        )
        try:
            return await child.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await child.wait()
            except TimeoutError:
                child.kill()
                await child.wait()
            raise

    async def _on_exit(self, batch: BatchRecord, name: str, status: int) -> None:
        """The runner has ended: let another have the batch, after a while if this one got nothing done."""
        batch = await self._storage.run(partial(self._storage.leases.dismiss, batch.id, name))
        if status in (ExitStatus.DONE, ExitStatus.TERMINATED) or batch.status.ended:
            self._setbacks.pop(batch.id, None)
            return
        self._set_back(batch)
        if status != ExitStatus.LEASE_LOST:
            done = f"{batch.done} of {batch.total} lines are done"
            log.warning("A runner of %s ended with status %d; %s.", batch.id, status, done)

    def _set_back(self, batch: BatchRecord) -> None:
        self._setbacks[batch.id] = Backoff.after(self._setbacks.get(batch.id), batch.done, self._clock())


LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
"""Loopback addresses for local processes, by the wildcard address on which the router listens."""

MIN_WINDOW = 512
WINDOW_PER_WORKER = 64
"""Lines of one batch under way at once, at most, in all and for each decode worker: the larger one counts."""


class BatchExecution:
    """The batch execution of one router."""

    def __init__(
        self,
        storage: Storage,
        settings: BatchSettings,
        secret: RunnerSecret,
        ended: Callable[[], None],
        workers: Callable[[], int],
        busy: Callable[[], bool],
        cluster: BatchJobApi,
    ) -> None:
        """
        `ended` is called when a batch needs no runner any more. `workers`: number of decode workers, at
        least 1. `busy`: whether clients sent other requests recently. Raises SetupError for contradictory
        settings.
        """
        self._workers = workers
        self._busy = busy
        terms = RunnerTerms(settings.batch_lease_s, settings.batch_line_s, self._window)
        if settings.batch_jobs and settings.batch_execution != "external":
            raise SetupError("--batch-jobs is for --batch-execution external: else this router runs batches.")
        self._pods = pod_tokens(cluster, settings.batch_jobs) if settings.batch_jobs else None
        self.api = RunnerApi(storage, secret, terms, ended, self._pods)
        self.url = ""
        """URL of this router. Runners are started only once it is set."""
        self._settings = settings
        self._supervisor = RunnerSupervisor(
            storage, secret, settings.batch_parallel, settings.batch_runners, settings.batch_lease_s
        )
        self._announcer = BatchJobReporter(
            storage, cluster, settings.batch_jobs, settings.batch_jobs_uid, time.monotonic
        )
        self._background: BackgroundTasks | None = None

    def _window(self) -> int:
        workers = self._workers()
        widest = self._settings.batch_window or max(MIN_WINDOW, WINDOW_PER_WORKER * workers)
        return min(widest, workers * self._settings.batch_window_when_busy) if self._busy() else widest

    def start(self, background: BackgroundTasks) -> None:
        """Start runners or BatchJobs from now on, if the settings say so."""
        self._background = background
        if self.url and self._settings.batch_execution == "subprocess":
            url = reachable(self.url)
            background.start(BackgroundTask.BATCH_RUNNERS, lambda: self._supervisor.run(url))
        elif self.url and self._settings.batch_jobs:
            background.start(BackgroundTask.BATCH_JOBS, self._announcer.run)

    async def close(self) -> None:
        """End all runners that this router has started; they post what is done."""
        if self._background is not None:
            await self._background.stop(BackgroundTask.BATCH_RUNNERS, BackgroundTask.BATCH_JOBS)
        if self._pods is not None:
            await self._pods.close()


def reachable(url: str) -> str:
    """
    The same router as a process on this machine calls it.

    >>> reachable("http://0.0.0.0:8000")
    'http://127.0.0.1:8000'
    """
    parts = urlsplit(url)
    host = LOOPBACK.get(parts.hostname or "", "")
    return f"http://{host}:{parts.port}" if host else url
