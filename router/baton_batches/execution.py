"""
Execution of a router's batches: the API for runners, and their supervisor.

With `--batch-execution subprocess` this router starts runners itself. With `external` another system does,
such as Jobs in Kubernetes for which the router creates BatchJobs. With `off` no runner starts, and batches
wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import urlsplit

from baton_api.background import BackgroundTasks
from baton_api.errors import SetupError
from baton_api.metrics import BackgroundTask
from baton_batches.kubernetes import BatchJobApi, BatchJobReporter
from baton_batches.runner_api import RunnerApi, RunnerTerms
from baton_batches.runner_credentials import RunnerSecret, pod_tokens
from baton_batches.settings import BatchSettings
from baton_batches.storage import Storage
from baton_batches.supervisor import RunnerSupervisor

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
