"""
Health checks: one task per worker that requests its load and readiness every few seconds.

`GET /load` identifies the worker and its load, `GET /ready` says whether it takes requests. `workers.worker`
draws the conclusions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from baton_api.background import BackgroundTasks
from baton_api.metrics import BackgroundTask
from baton_api.workers import Load
from baton_http.http_client import ReplyTooLarge, fetch
from baton_http.upstream import UpstreamLost
from baton_router.proxy.forwarding import WorkerCredentials
from baton_router.settings import RouterSettings
from baton_router.workers.worker import Worker, Workers, WorkerStatus

log = logging.getLogger(__name__)

NOT_READY_FACTOR = 8
"""A worker that is not ready is checked this many times as often."""

UNAUTHORIZED = 401

REPLY_LIMIT = 64 * 1024
"""Maximum bytes of a reply."""

INVALID_REPLY_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ReplyTooLarge)
"""Errors of reading a reply that is not a worker's load."""

_decoder = msgspec.json.Decoder(Load)


async def watch(
    workers: Workers, settings: RouterSettings, clock: Callable[[], float], background: BackgroundTasks
) -> None:
    """Check all workers, including new ones, until cancelled."""
    looking: dict[Worker, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as group:
        while True:
            listed = set(workers.all)
            for worker in looking.keys() - listed:
                looking.pop(worker).cancel()
            for worker in listed - looking.keys():
                looked = _watch_one(worker, settings, clock, background)
                looking[worker] = group.create_task(looked, name=f"watch {worker.name}")
            await workers.changed()


async def _watch_one(
    worker: Worker, settings: RouterSettings, clock: Callable[[], float], background: BackgroundTasks
) -> None:
    loop = asyncio.get_running_loop()
    before = WorkerStatus.STARTING
    trust = WorkerCredentials.of(settings)
    while True:
        started = loop.time()
        # What this router lacks, such as file descriptors, says nothing about the worker.
        with background.guard(BackgroundTask.HEALTH_CHECKS, worker.name):
            await _check(worker, settings, trust)
        state = worker.state(clock())
        if state is not before:
            reason = worker.reason or "it takes requests"
            log.info("The %s worker %s is %s: %s.", worker.listed, worker.name, state, reason)
            before = state
        pause = settings.health_interval_s / (1 if state is WorkerStatus.READY else NOT_READY_FACTOR)
        await asyncio.sleep(max(0.0, started + pause - loop.time()))


async def _check(worker: Worker, settings: RouterSettings, trust: WorkerCredentials) -> None:
    """Check the worker once and record the result."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        async with asyncio.timeout(settings.health_interval_s):
            load, refusal = await fetch_load(worker, trust)
    except (UpstreamLost, TimeoutError, *INVALID_REPLY_ERRORS) as error:
        if isinstance(error, TimeoutError) and worker.upstream.heard >= started:
            return  # it is slow to answer this, but requests hear of it: it is alive
        reason = f"it does not answer: {_why(error)}"
        worker.health = worker.health.missed(settings.health_misses, reason)
        if worker.health.down:
            worker.upstream.fail_silent(loop.time() - settings.health_interval_s)
    else:
        worker.answered(load, refusal)


async def fetch_load(worker: Worker, trust: WorkerCredentials) -> tuple[Load, str]:
    """
    The worker's load, and why it takes no requests (empty if it does).

    Raises UpstreamLost, and INVALID_REPLY_ERRORS for an invalid reply.
    """
    reply = await fetch(worker.upstream, "GET", "/load", trust.headers, limit=REPLY_LIMIT)
    if reply.status == UNAUTHORIZED:
        raise msgspec.DecodeError(
            "it wants another API key: give the workers' key to the router as BATON_ROUTER_WORKER_API_KEY"
        )
    if reply.status != 200:
        raise msgspec.DecodeError(f"GET /load was answered with {reply.status}")
    load = _decoder.decode(reply.body)
    reply = await fetch(worker.upstream, "GET", "/ready", trust.headers, limit=REPLY_LIMIT)
    return load, "" if reply.status == 200 else f"GET /ready was answered with {reply.status}"


def _why(error: Exception) -> str:
    if isinstance(error, UpstreamLost):
        return error.cause
    return "no answer in time" if isinstance(error, TimeoutError) else str(error)
