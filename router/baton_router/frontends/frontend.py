"""
Frontend processes, which hold client connections and serve the hot paths, and the pool that starts them.

It authenticates clients, forwards bodies and resumes broken streams. It requests workers from the scheduler's
process and forwards other paths to it, as well as responses that are stored or continued, because the
scheduler has the store. While the scheduler is away, requests wait for it.

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
from collections.abc import Callable, Coroutine, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from baton_api import logs, metrics, mutual_tls
from baton_api.background import BackgroundTasks
from baton_api.capacity import SharedCapacity
from baton_api.errors import BatonError
from baton_api.inference_paths import PROXIED_PATHS
from baton_api.keys import HEALTH_PATHS
from baton_api.metrics import BackgroundTask
from baton_http.client_connection import ClientConnection, ClientDisconnected
from baton_http.control_proxy import ControlProxy
from baton_http.replies import Receive, Scope, Send, request_id, send_error, send_json
from baton_http.request_cycle import count_for
from baton_http.upstream import UpstreamPool
from baton_router.app import create_app
from baton_router.frontends.prefork import ChildProcess, ProcessSupervisor, ReadySignal
from baton_router.frontends.remote_picker import RemotePicker
from baton_router.frontends.scheduler_service import SchedulerService
from baton_router.metrics.registry import RouterMetrics, export_families
from baton_router.proxy import responses
from baton_router.proxy.proxy import Proxy
from baton_router.proxy.tracing import open_tracing
from baton_router.scheduling.admission import QueueCapacity
from baton_router.server import BACKLOG, RouterServer, address, log_startup, new_event_loop
from baton_router.settings import RouterSettings
from baton_router.tenants.access import Authenticator, tenant_of

METRICS_S = 1.0
"""Seconds between two reports of this frontend's metrics."""

SCHEDULER_WAIT_S = 5.0
"""Seconds that a new frontend waits for the scheduler's list of workers before it accepts clients."""


class Frontend:
    """An ASGI application."""

    def __init__(self, settings: RouterSettings, scheduler: str, control: str) -> None:
        """`scheduler` and `control` are the paths of the scheduler's sockets."""
        self.settings = settings
        self.draining = False
        """Set when the process will stop: /ready reports it; requests are still served."""
        self.access = Authenticator(settings)
        self.memory = SharedCapacity(settings.connection_bytes)
        tls = mutual_tls.client(settings.tls_folder, settings.tls_name)
        self.upstreams = UpstreamPool(settings.connect_s, tls)
        self.metrics = RouterMetrics()
        self._picker = RemotePicker(
            scheduler,
            self.upstreams,
            settings.scheduler_timeout_s,
            QueueCapacity(settings.queue_requests, settings.queue_bytes),
            self._count_rejected,
        )
        self.metrics.gauge(metrics.ROUTER_REGISTERED_WORKERS, self._ready_workers)
        self._tracing = open_tracing(settings)
        self._background = BackgroundTasks()
        self.metrics.registry.register(self._background.errors)
        self._proxy = Proxy(settings, self._picker, self.upstreams, self.metrics, self._tracing)
        self._control = ControlProxy(control)
        self._stores_responses = bool(
            settings.responses_kept and settings.responses_memory and settings.responses_ttl_s
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        path = scope["path"]
        if path in PROXIED_PATHS and scope["method"] == "POST":
            try:
                await self.access.enter(scope)
                count_for(scope, tenant_of(scope).id)
            except BatonError as error:
                self.metrics.counters.refused(path, error.status)
                await send_error(send, error, request_id(scope["headers"]), path=path)
            else:
                await (self._response if path == responses.PATH else self._proxy)(scope, receive, send)
        elif path in HEALTH_PATHS and (status := self._own_status(path)):
            await send_json(send, status, b"", request_id(scope["headers"]))
        else:
            await self._control(scope, receive, send)

    async def _response(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that needs no stored response; the scheduler's process has the store."""
        settings, client = self.settings, ClientConnection(scope, receive, send)
        try:
            body = await client.body(settings.max_body)
        except ClientDisconnected:
            return
        except BatonError as error:
            self.metrics.counters.refused(scope["path"], error.status)
            await send_error(send, error, request_id(scope["headers"]))
            return
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> MutableMapping[str, Any]:
            return unread.pop() if unread else await receive()

        if responses.needs_store(body, keeps=self._stores_responses):
            await self._control(scope, replayed, send)
        else:
            given = [header for header in scope["headers"] if header[0] != responses.STATE]
            await self._proxy({**scope, "headers": [*given, (responses.STATE, b"0")]}, replayed, send)

    def _own_status(self, path: str) -> int:
        """The status of this process for the path; 0 if the scheduler must answer."""
        if path != "/ready":
            return 200
        if self.draining or self._background.ended():
            return 503
        if self._picker.connected:
            return 0
        return 200 if self._picker.serving and self._ready_workers() else 503

    def _ready_workers(self) -> int:
        return sum(worker.ready for worker in self._picker.workers)

    def _count_rejected(self, reason: str) -> None:
        self.metrics.scheduler_unavailable.labels(reason).inc()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self._background.start(BackgroundTask.SCHEDULER_LINK, self._picker.keep)
        self._background.start(BackgroundTask.FRONTEND_METRICS, self._send_metrics)
        self._background.start(BackgroundTask.LOOP_LAG, self.metrics.lag.watch)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._picker.scheduler_known.wait(), SCHEDULER_WAIT_S)
        await send({"type": "lifespan.startup.complete"})
        with suppress(asyncio.CancelledError):  # a second signal does not wait for the end
            await receive()
        await self._background.stop()
        self.upstreams.close()
        await self.access.close()
        if self._tracing is not None:
            await self._tracing.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _send_metrics(self) -> None:
        while True:
            await asyncio.sleep(METRICS_S)
            self._picker.send_metrics(export_families(self.metrics.registry))


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
