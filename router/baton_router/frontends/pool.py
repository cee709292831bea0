"""
The frontend pool: the router as several processes on one port, one scheduler and its frontends.

All frontends accept from one socket, so a connection that waits for one waits for any. The scheduler's
process is the whole router behind Unix sockets, in a folder that only this user can enter.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from baton_api import logs
from baton_api.metrics import BackgroundTask
from baton_router.app import create_app
from baton_router.frontends.frontend import Frontend
from baton_router.frontends.prefork import ChildProcess, ProcessSupervisor, ReadySignal
from baton_router.frontends.scheduler_service import SchedulerService
from baton_router.server import BACKLOG, RouterServer, address, log_startup, new_event_loop
from baton_router.settings import RouterSettings
from baton_router.tenants.access import Authenticator

GRACE_S = 10.0
"""Seconds beyond the drain time after which a process is killed."""


def run(settings: RouterSettings, listening: socket.socket, ready: Callable[[str], None] | None) -> None:
    """
    Serve with `settings.processes` frontends until a signal to stop.

    Raises SetupError if the scheduler or a frontend cannot be started.
    """
    folder = Path(tempfile.mkdtemp(prefix="baton-router-"))
    scheduler, control = str(folder / "scheduler"), str(folder / "control")

    def schedule(started: ReadySignal, parent_pipe: int) -> None:
        logs.called("router-scheduler")
        listening.close()
        _run_child(_serve_scheduler(settings, url, scheduler, control, started), parent_pipe)

    def frontend(name: str, started: ReadySignal, parent_pipe: int) -> None:
        logs.called(f"router-{name}")
        _run_child(_frontend(settings, listening, scheduler, control, started), parent_pipe)

    members = [ChildProcess("scheduler", schedule)]
    names = [f"front-{number}" for number in range(settings.processes)]
    members += [ChildProcess(name, functools.partial(frontend, name)) for name in names]
    url = address(listening)
    listening.listen(BACKLOG)
    try:
        log_startup(settings, Authenticator(settings).required, url)
        ProcessSupervisor(members, settings.drain_notice_s + settings.drain_s + GRACE_S).run(
            ready=(lambda: ready(url)) if ready else (lambda: None),
            stopping=listening.close,  # else the kernel would still accept connections that no process serves
        )
    finally:
        listening.close()
        shutil.rmtree(folder, ignore_errors=True)


async def _serve_scheduler(
    settings: RouterSettings, url: str, scheduler: str, control: str, started: ReadySignal
) -> None:
    router = create_app(settings)
    await router.start_endpoint_picker()
    router.execution.url = url
    service = SchedulerService(router.scheduler, lambda: router.workers.all, time.monotonic)
    router.frontend_metrics = service.metrics
    server = RouterServer(router, settings)
    server.listening = started
    server.ending = router.execution.close
    server.serve_metrics(router.serve_internal)
    background = router.background
    background.start(BackgroundTask.SCHEDULER_SERVICE, lambda: service.serve(scheduler, background))
    await server.serve(sockets=[_bind_unix_socket(control)])


async def _frontend(
    settings: RouterSettings, listening: socket.socket, scheduler: str, control: str, started: ReadySignal
) -> None:
    server = RouterServer(Frontend(settings, scheduler, control), settings)
    server.listening = started
    await server.serve(sockets=[listening])


def _run_child(serving: Coroutine[Any, Any, None], parent_pipe: int) -> None:
    """Run a child's event loop, and stop as on SIGTERM if the parent is gone."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        loop = runner.get_loop()
        loop.add_reader(parent_pipe, _on_parent_exit, loop, parent_pipe)
        runner.run(serving)


def _on_parent_exit(loop: asyncio.AbstractEventLoop, parent_pipe: int) -> None:
    loop.remove_reader(parent_pipe)
    os.kill(os.getpid(), signal.SIGTERM)


def _bind_unix_socket(path: str) -> socket.socket:
    """A bound Unix socket; one of an earlier process is replaced."""
    if os.path.exists(path):
        os.unlink(path)
    unix_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unix_socket.bind(path)
    unix_socket.setblocking(False)
    return unix_socket
