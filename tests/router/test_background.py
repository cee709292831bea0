"""Background loops survive every exception, and show it when they have ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from baton_api.background import REPEATED_S, BackgroundTasks
from baton_api.errors import NotReady
from baton_api.metrics import ROUTER_BACKGROUND_ERRORS, BackgroundTask
from baton_http.upstream import Upstream, UpstreamLost
from baton_router.frontends.frontend import Frontend
from baton_router.frontends.scheduler_service import SchedulerService
from baton_router.settings import RouterSettings
from tests.router.fake_worker import FakeWorker
from tests.router.running import RunningRouter, no_more_files, running_router, until

LOOP = BackgroundTask.DRAINING


def errors(router: RunningRouter, task: BackgroundTask) -> float:
    return router.metric(ROUTER_BACKGROUND_ERRORS.name, task=task)


async def test_health_checks_outlive_exhausted_descriptors(caplog: pytest.LogCaptureFixture) -> None:
    """Without a file descriptor no worker can be checked: it keeps its state, and is checked again later."""
    async with FakeWorker() as worker, running_router([worker], health_interval_s=0.05) as router:
        seen = router.router.workers.decode[0]
        with no_more_files():
            for connection in list(seen.upstream._idle):
                connection.transport.abort()
            await until(lambda: errors(router, BackgroundTask.HEALTH_CHECKS) >= 5)
            assert not seen.health.down
        about = [record.message for record in caplog.records if "health_checks" in record.message]
        assert len(about) == 1 and worker.name in about[0] and "file descriptor" in about[0]
        await worker.die()
        await until(lambda: seen.health.down)
        assert router.router.background.ended() is None


async def test_impossible_host_name_is_a_lost_connection() -> None:
    """A label of more than 63 characters raises UnicodeError before any DNS is asked."""
    with pytest.raises(UpstreamLost) as lost:
        await Upstream(f"{'a' * 64}.example", 80).request(b"GET / HTTP/1.1\r\n\r\n")
    assert lost.value.cause == "connect"


@pytest.mark.parametrize("task", [BackgroundTask.HEALTH_CHECKS, BackgroundTask.LOOP_LAG])
async def test_ready_names_a_loop_that_has_ended(task: BackgroundTask) -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        assert (await router.client.get("/ready")).status_code == 200
        next(one for one in asyncio.all_tasks() if one.get_name() == task).cancel()
        await until(router.router.background.ended)
        answer = await router.client.get("/ready")
        assert answer.status_code == 503
        assert task in answer.json()["error"]["message"]


async def test_loop_that_raises_or_returns_runs_again() -> None:
    background, runs = BackgroundTasks(restart_s=0.0), 0

    async def fickle() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise KeyError("gone")
        if runs == 3:
            await asyncio.Event().wait()

    background.start(LOOP, fickle)
    await until(lambda: runs == 3)
    assert background.ended() is None
    assert sum(one.value for one in next(background.errors.collect()).samples) == 2
    await background.stop(LOOP, LOOP)
    assert background.ended() is None


def test_repeated_errors_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    background = BackgroundTasks(clock=lambda: now)

    def fails(address: str, error: Exception) -> int:
        before = len(caplog.records)
        with background.guard(LOOP, address):
            raise error
        return len(caplog.records) - before

    caplog.set_level(logging.ERROR)
    assert fails("10.0.0.1:80", NotReady("no room")) == 1
    assert fails("10.0.0.1:80", NotReady("no room")) == 0
    assert fails("10.0.0.2:80", NotReady("no room")) == 1
    assert fails("10.0.0.1:80", OSError("no route")) == 1
    now = REPEATED_S
    assert fails("10.0.0.1:80", NotReady("no room")) == 1
    (family,) = background.errors.collect()
    assert {one.labels["task"]: one.value for one in family.samples if one.value} == {LOOP: 5}


async def test_guard_lets_cancellation_through() -> None:
    background = BackgroundTasks()
    with pytest.raises(asyncio.CancelledError), background.guard(LOOP):
        raise asyncio.CancelledError


async def test_frontend_with_an_ended_loop_is_not_ready(tmp_path: Path) -> None:
    """A frontend process without its scheduler reports this itself, because no other process could."""
    path, services = str(tmp_path / "scheduler"), BackgroundTasks()
    async with FakeWorker() as worker, running_router([worker]) as router:
        service = SchedulerService(router.router.scheduler, lambda: router.router.workers.all, time.monotonic)
        services.start(BackgroundTask.SCHEDULER_SERVICE, lambda: service.serve(path, services))
        frontend = Frontend(RouterSettings(), path, str(tmp_path / "control"))
        events: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        sent: list[MutableMapping[str, Any]] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        life = asyncio.create_task(frontend({"type": "lifespan"}, events.get, send))
        await events.put({"type": "lifespan.startup"})
        await until(lambda: sent)
        next(one for one in asyncio.all_tasks() if one.get_name() == BackgroundTask.SCHEDULER_LINK).cancel()
        await until(frontend._background.ended)
        ready = {"type": "http", "path": "/ready", "method": "GET", "headers": []}
        await frontend(ready, events.get, send)
        assert sent[1]["status"] == 503
        await events.put({"type": "lifespan.shutdown"})
        await life
        await services.stop()
