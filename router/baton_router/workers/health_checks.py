"""
Health checks: one task per worker that requests its load and readiness every few seconds.

The requests depend on the worker's engine (`baton_router.engines`). `workers.worker` draws the conclusions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from baton_api.background import BackgroundTasks
from baton_api.metrics import BackgroundTask
from baton_api.workers import EngineKind, Load
from baton_http.upstream import UpstreamLost
from baton_router.engines.checks import INVALID_REPLY_ERRORS, EngineChecks, WorkerApi
from baton_router.engines.heads import WorkerCredentials
from baton_router.engines.registry import ENGINES, TARGETS, detect
from baton_router.settings import RouterSettings
from baton_router.workers.pairing import PairingReview
from baton_router.workers.worker import Worker, WorkerStatus
from baton_router.workers.worker_list import Workers

log = logging.getLogger(__name__)

NOT_READY_FACTOR = 8
"""A worker that is not ready is checked this many times as often."""


async def watch(
    workers: Workers, settings: RouterSettings, clock: Callable[[], float], background: BackgroundTasks
) -> None:
    """Check all workers, including new ones, until cancelled."""
    looking: dict[Worker, asyncio.Task[None]] = {}
    pairings = PairingReview(workers)
    async with asyncio.TaskGroup() as group:
        while True:
            listed = set(workers.all)
            for worker in looking.keys() - listed:
                looking.pop(worker).cancel()
            for worker in listed - looking.keys():
                looked = _watch_one(worker, settings, clock, background, pairings)
                looking[worker] = group.create_task(looked, name=f"watch {worker.name}")
            await workers.changed()


async def _watch_one(
    worker: Worker,
    settings: RouterSettings,
    clock: Callable[[], float],
    background: BackgroundTasks,
    pairings: PairingReview,
) -> None:
    loop = asyncio.get_running_loop()
    before = (WorkerStatus.STARTING, "")
    checks = WorkerChecks(worker, settings)
    while True:
        started = loop.time()
        # A failure of this router, such as a lack of file descriptors, does not count against the worker.
        with background.guard(BackgroundTask.HEALTH_CHECKS, worker.name):
            await _check(worker, settings, checks)
            pairings.review()
        state = worker.state(clock())
        # A worker may stay unready for another reason; other reasons differ from check to check.
        now = (state, worker.reason if state is WorkerStatus.NOT_READY else "")
        if now != before:
            reason = worker.reason or "it takes requests"
            log.info("The %s worker %s is %s: %s.", worker.listed, worker.title, state, reason)
            before = now
        pause = settings.health_interval_s / (1 if state is WorkerStatus.READY else NOT_READY_FACTOR)
        await asyncio.sleep(max(0.0, started + pause - loop.time()))


async def _check(worker: Worker, settings: RouterSettings, checks: WorkerChecks) -> None:
    """Check the worker once and record the result."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        async with asyncio.timeout(settings.health_interval_s):
            load, unavailable_reason = await checks.load()
    except (UpstreamLost, TimeoutError, *INVALID_REPLY_ERRORS) as error:
        if isinstance(error, TimeoutError) and worker.upstream.heard >= started:
            return  # it answers health checks slowly, but sends bytes of other requests: it is alive
        reason = f"it does not answer: {_why(error)}"
        worker.health = worker.health.missed(settings.health_misses, reason)
        if worker.health.down:
            worker.upstream.fail_silent(loop.time() - settings.health_interval_s)
    else:
        worker.answered(load, unavailable_reason)


class WorkerChecks:
    """The checks of one worker, by its engine, which is found out once for each process of it."""

    def __init__(self, worker: Worker, settings: RouterSettings) -> None:
        self._worker = worker
        self._settings = settings
        authorizing = WorkerCredentials.of(settings).headers
        secret = settings.ticket_secret.encode()
        self._api = WorkerApi(worker.upstream, worker.listed, authorizing, secret)
        self._checks: EngineChecks | None = None

    async def load(self) -> tuple[Load, str]:
        """
        The worker's load, and why it takes no requests (empty if it does).

        Raises UpstreamLost, and INVALID_REPLY_ERRORS for an invalid reply.
        """
        if self._checks is None or self._worker.health.down:
            self._checks = ENGINES[await self._kind()].checks(self._api)
        return await self._checks.load()

    async def _kind(self) -> EngineKind:
        kind = self._worker.engine
        if kind is None and self._settings.engine != "auto":
            kind = EngineKind(self._settings.engine)
        kind = kind or await detect(self._api)
        if kind is None:
            raise msgspec.DecodeError(f"its engine is not known: it answers none of {', '.join(TARGETS)}")
        return kind


def _why(error: Exception) -> str:
    if isinstance(error, UpstreamLost):
        return error.cause
    return "no answer in time" if isinstance(error, TimeoutError) else str(error)
