"""
A frontend process: it holds client connections and serves the hot paths; the scheduler serves the rest.

It authenticates clients, forwards bodies and resumes broken streams. It requests workers from the scheduler's
process and forwards other paths to it, as well as responses that are stored or continued, because the
scheduler has the store. While the scheduler is away, requests wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

from baton_api import metrics, mutual_tls
from baton_api.background import BackgroundTasks
from baton_api.capacity import SharedCapacity
from baton_api.errors import BatonError
from baton_api.inference_paths import PROXIED_PATHS
from baton_api.keys import HEALTH_PATHS
from baton_api.metrics import BackgroundTask
from baton_http.client_connection import ClientConnection, ClientDisconnected
from baton_http.control_proxy import ControlProxy
from baton_http.http_client import UpstreamPool
from baton_http.replies import Receive, Scope, Send, request_id, send_error, send_json
from baton_http.request_cycle import count_for
from baton_router.frontends.remote_picker import RemotePicker
from baton_router.metrics.registry import RouterMetrics, export_families
from baton_router.proxy import responses
from baton_router.proxy.proxy import Proxy
from baton_router.proxy.tracing import open_tracing
from baton_router.scheduling.admission import QueueCapacity
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
        return sum(one.ready for one in self._picker.workers)

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
