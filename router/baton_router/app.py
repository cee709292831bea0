"""
The router as one ASGI application: the hot paths go to the proxy, the rest to FastAPI.

FastAPI's machinery costs more per request than everything else here together, so a request to
generate never enters it: ADR 5.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from baton_api import anthropic, installing, mutual_tls, openapi, response_items, response_store
from baton_api.capacity import SharedCapacity
from baton_api.errors import (
    BatonError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    NotReady,
    RequestAborted,
    RouteNotFound,
    SetupError,
)
from baton_api.inference_paths import PROXIED_PATHS
from baton_api.keys import HEALTH_PATHS
from baton_api.metrics import CONTENT_TYPE, BackgroundTask
from baton_api.response_store import Turn, owner
from baton_batches.controller import BatchController
from baton_batches.kubernetes import BatchJobApi
from baton_batches.routes import routes
from baton_batches.runner_credentials import RunnerSecret
from baton_batches.storage import Storage
from baton_batches.supervisor import BatchExecution
from baton_batches.wire import PATH as RUNNERS
from baton_http.replies import REQUEST_ID, Receive, Scope, Send, request_id, send_error
from baton_http.request_cycle import count_for
from baton_http.upstream import UpstreamPool
from baton_router import service_info
from baton_router.dashboard.endpoints import DATA_PATHS, LiveDashboard
from baton_router.engines.heads import WorkerCredentials
from baton_router.metrics import registry as metric_families
from baton_router.metrics.registry import (
    CacheMetrics,
    CertificateMetrics,
    MetricFamily,
    QueueMetrics,
    RouterMetrics,
    TenantMetrics,
    WorkerStatusMetrics,
)
from baton_router.proxy import responses
from baton_router.proxy.admin_operations import ADMIN_PATHS, AdminOperations
from baton_router.proxy.proxy import Proxy
from baton_router.proxy.response_stores import open_store
from baton_router.proxy.responses import ResponsesProxy
from baton_router.proxy.tracing import open_tracing
from baton_router.scheduling.placement import explain
from baton_router.scheduling.scheduler import RequestScheduler
from baton_router.settings import RouterSettings
from baton_router.tenants.access import (
    OWNER,
    Authenticator,
    authorization,
    batch_models,
    error_for,
    tenant_of,
)
from baton_router.workers.discovery.sources import kubernetes_access

if TYPE_CHECKING:
    from baton_router.gateway.endpoint_picker import EndpointPicker

log = logging.getLogger(__name__)


RECENT_REQUEST_S = 10.0
"""Seconds after a request during which more requests are expected."""


INTERNAL_PATHS = frozenset({"/metrics", "/workers/targets"})
"""Paths that --metrics-port serves, and then no other port. They name workers and tenants."""


class RouterApp:
    """The application, and the state that its server reads and sets."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.started = int(time.time())
        self.draining = False
        """Set when the process will stop: /ready reports it; requests are still served."""
        tls = mutual_tls.client(settings.tls_folder, settings.tls_name)
        self.upstreams = UpstreamPool(settings.connect_s, tls)
        self.scheduler = RequestScheduler(settings, self.upstreams, random.Random(), time.monotonic)
        self.workers = self.scheduler.workers
        self.background = self.scheduler.background
        self.metrics = RouterMetrics()
        self.frontend_metrics: Callable[[], dict[str, list[MetricFamily]]] | None = None
        """Returns the metrics of the frontend processes; None if this process serves clients itself."""
        self.access = Authenticator(settings)
        self.memory = SharedCapacity(settings.connection_bytes)
        self.tracing = open_tracing(settings)
        self._proxy = Proxy(settings, self.scheduler, self.upstreams, self.metrics, self.tracing)
        self._keyed = self.access.required or WorkerCredentials.of(settings).passes_keys
        self.responses = open_store(
            settings, lambda use: self.metrics.response_store_errors.labels(use).inc()
        )
        self._responses = ResponsesProxy(settings, self.responses, self.owner_of, self._proxy)
        self.storage = Storage(settings, settings.port)
        self.batch_controller = BatchController(
            self.storage, refusal=lambda owner: self.access.refusal(bytes.fromhex(owner))
        )
        secret = RunnerSecret(settings, settings.ticket_secret)
        self.execution = BatchExecution(
            self.storage,
            settings,
            secret,
            self.batch_controller.wake,
            lambda: max(1, len(self.workers.decode)),
            self._recently_busy,
            BatchJobApi(kubernetes_access(settings)),
        )
        self._admin_operations = AdminOperations(settings, self.workers, random.Random(), time.monotonic)
        self.dashboard = LiveDashboard(self.scheduler, lambda: self.draining) if settings.dashboard else None
        self.endpoint_picker = None if settings.gateway_port is None else self._endpoint_picker()
        self._register_metrics(CertificateMetrics(lambda: mutual_tls.validity(tls)))
        self._rest = _fastapi_app(self)

    def _endpoint_picker(self) -> EndpointPicker:
        """Raises SetupError if its packages are missing."""
        try:
            from baton_router.gateway.endpoint_picker import EndpointPicker
            from baton_router.gateway.exchange import GatewayServices, LocalEndpoints
        except ModuleNotFoundError as error:
            raise SetupError(
                f"--gateway-port needs more packages ({error}): {installing.command('gateway')}."
            ) from error
        services = GatewayServices(
            self.scheduler,
            self.access,
            self.metrics,
            WorkerCredentials.of(self.settings),
            LocalEndpoints(self),
            self.settings.max_body,
            self.memory,
        )
        return EndpointPicker(services, self.unready_reason)

    async def start_endpoint_picker(self) -> None:
        """Serve gateways, if the settings say so. Raises SetupError."""
        settings = self.settings
        if self.endpoint_picker is not None and settings.gateway_port is not None:
            host = settings.gateway_host or settings.host
            await self.endpoint_picker.start(host, settings.gateway_port, settings.gateway_certificate)

    def _register_metrics(self, certificate: CertificateMetrics) -> None:
        scheduler = self.scheduler
        collectors: list[Collector] = [
            self.background.errors,
            WorkerStatusMetrics(self.workers, time.monotonic),
            certificate,
            CacheMetrics(self.workers, scheduler.planner.worker_states, scheduler.kv_subscribers),
            QueueMetrics(scheduler.queue, time.monotonic),
            scheduler.planner.metrics,
            scheduler.outcomes.revision_requests,
            scheduler.outcomes.revision_first_tokens,
            self.storage.metrics,
        ]
        if self.access.tenants is not None:
            collectors.append(TenantMetrics(self.access.tenants))
        for collector in collectors:
            self.metrics.registry.register(collector)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
            return
        path = scope["path"]
        if path in INTERNAL_PATHS and self.settings.metrics_port is not None:
            error = RouteNotFound(scope["method"], path)
            await send_error(send, error, request_id(scope["headers"]))
            return
        if path.startswith(RUNNERS):
            await self.execution.api(scope, receive, send)
            return
        if self.dashboard is not None and await self.dashboard.serve_file(scope, send):
            return
        try:
            await self.access.enter(scope)
            count_for(scope, tenant_of(scope).id)
        except BatonError as error:
            if path in PROXIED_PATHS:
                self.metrics.counters.refused(path, error.status)
            await send_error(send, error, request_id(scope["headers"]), path=path)
            return
        if scope["method"] == "POST" and path == responses.PATH:
            await self._responses(scope, receive, send)
        elif scope["method"] == "POST" and path in PROXIED_PATHS:
            await self._proxy(scope, receive, send)
        elif scope["method"] == ADMIN_PATHS.get(path):
            await self._admin_operations(scope, receive, send)
        elif self.dashboard is not None and path in DATA_PATHS:
            await self.dashboard(scope, receive, send)
        else:
            await self._rest(scope, receive, _with_request_id(scope, send))

    async def serve_internal(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request to --metrics-port, which has no keys."""
        if scope["path"] in INTERNAL_PATHS | HEALTH_PATHS:
            await self._rest(scope, receive, send)
        else:
            error = RouteNotFound(scope["method"], scope["path"])
            await send_error(send, error, request_id(scope["headers"]))

    def owner_of(self, scope: Scope) -> bytes:
        """Return the owner of a request, as the stores key it: its tenant, else a digest of its key."""
        if OWNER in scope:
            return scope[OWNER]  # type: ignore[no-any-return]
        if self.access.owned_by_tenants and (id := tenant_of(scope).id):
            return id.encode()
        return owner(authorization(scope), self._keyed)

    def _recently_busy(self) -> bool:
        """Whether a request is in progress, or was within the last `RECENT_REQUEST_S`."""
        return time.monotonic() - self.scheduler.wanted_at < RECENT_REQUEST_S

    def measured(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        if self.frontend_metrics is None:
            return self.metrics.text()
        own = metric_families.export_families(self.metrics.registry)
        return metric_families.merged_text({"scheduler": own, **self.frontend_metrics()})

    def models_of(self, scope: Scope) -> tuple[str, ...]:
        """The names of the models that the tenant of a request may use."""
        return tuple(filter(tenant_of(scope).may_use, self.workers.models()))

    def check_ready(self) -> None:
        """Raise NotReady if new requests should go elsewhere."""
        if reason := self.unready_reason():
            raise NotReady(reason, public="This service is not ready to take requests.")

    def unready_reason(self) -> str | None:
        """Why no new request should come here now; None if it may."""
        if self.draining:
            return "The router is draining."
        return self.background.ended() or self.workers.unready_reason(time.monotonic())


def create_app(settings: RouterSettings) -> RouterApp:
    """The router as an ASGI application; its background tasks run during its lifespan."""
    return RouterApp(settings)


def _with_request_id(scope: Scope, send: Send) -> Send:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (REQUEST_ID, request_id(scope["headers"]))]
        await send(message)

    return sending


def _fastapi_app(router: RouterApp) -> FastAPI:
    """The routes that are not hot paths."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        router.scheduler.start()
        router.background.start(BackgroundTask.BATCH_CONTROLLER, router.batch_controller.run)
        router.background.start(BackgroundTask.LOOP_LAG, router.metrics.lag.watch)
        router.execution.start(router.background)
        yield
        if router.endpoint_picker is not None:
            await router.endpoint_picker.stop(router.settings.drain_s)
        await router.execution.close()
        await router.background.stop()
        router.storage.close()
        await router.responses.close()
        router.upstreams.close()
        await router.access.close()
        if router.tracing is not None:
            await router.tracing.close()

    app = FastAPI(
        title="Baton router",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # it would redirect to the Host header, over http
        lifespan=lifespan,
    )
    _add_operations(app, router)
    _add_models(app, router)
    _add_responses(app, router)
    app.include_router(
        routes(
            router.storage,
            router.batch_controller,
            owner_of=router.owner_of,
            models_of=lambda scope: batch_models(tenant_of(scope)),
        )
    )
    _add_error_handlers(app)
    return app


def _add_operations(app: FastAPI, router: RouterApp) -> None:
    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        """The process is alive; `/ready` reports whether it can serve."""
        return Response(status_code=200)

    @app.get("/ready")
    async def ready() -> Response:
        router.check_ready()
        return Response(status_code=200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(router.measured(), media_type=CONTENT_TYPE)

    @app.get("/debug/decisions")
    async def decisions() -> JSONResponse:
        latest = reversed(router.scheduler.planner.placements)
        return JSONResponse({"data": [explain(placement) for placement in latest]})

    @app.get("/workers")
    async def workers() -> JSONResponse:
        now = time.monotonic()
        return JSONResponse(
            {"data": [service_info.worker_json(worker, now) for worker in router.workers.all]}
        )

    @app.get("/workers/targets")
    async def targets() -> JSONResponse:
        return JSONResponse(service_info.scrape_targets(router.workers.all))

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse(service_info.version())

    @app.get("/openapi.json")
    async def description(request: Request) -> JSONResponse:
        models = router.models_of(request.scope)
        return JSONResponse(openapi.document(models, "router", keyed=router.access.required))


def _add_models(app: FastAPI, router: RouterApp) -> None:
    def card(name: str) -> dict[str, Any]:
        return service_info.model_card(router.workers, name, router.started)

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info(request: Request) -> JSONResponse:
        router.check_ready()
        return JSONResponse(service_info.model_info(router.workers, router.models_of(request.scope)))

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> JSONResponse:
        now = time.monotonic()
        return JSONResponse(service_info.server_info(router.settings, router.workers, router.started, now))

    @app.get("/v1/models")
    async def models(request: Request) -> JSONResponse:
        router.check_ready()
        return JSONResponse(
            {"object": "list", "data": [card(name) for name in router.models_of(request.scope)]}
        )

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str, request: Request) -> JSONResponse:
        router.check_ready()
        if name not in router.models_of(request.scope):
            raise ModelNotFound(name, router.models_of(request.scope))
        return JSONResponse(card(name))


def _add_responses(app: FastAPI, router: RouterApp) -> None:
    async def found(id: str, request: Request) -> Turn:
        return await router.responses.get(router.owner_of(request.scope), id)

    @app.get("/v1/responses/{id}")
    async def response(id: str, request: Request) -> Response:
        return _json_bytes(response_store.retrieved(await found(id, request), request.query_params))

    @app.delete("/v1/responses/{id}")
    async def no_response(id: str, request: Request) -> Response:
        await router.responses.delete(router.owner_of(request.scope), id)
        return _json_bytes(response_store.deleted(id))

    @app.get("/v1/responses/{id}/input_items")
    async def input_items(id: str, request: Request) -> Response:
        items = (await found(id, request)).whole_input
        return _json_bytes(response_items.page(items, request.query_params))

    @app.post("/v1/responses/{id}/cancel")
    async def cancel(id: str, request: Request) -> Response:
        await found(id, request)
        raise response_store.not_cancelable()


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(BatonError)
    async def ours(request: Request, error: BatonError) -> JSONResponse:
        return _error_response(request, error_for(error, tenant_of(request.scope)))

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> JSONResponse:
        method, path = request.method, request.url.path
        if error.status_code == 405 or path in PROXIED_PATHS or path in ADMIN_PATHS:
            allowed = ADMIN_PATHS.get(path) or (error.headers or {}).get("Allow") or "POST"
            return _error_response(request, MethodNotAllowed(method, path, allowed))
        if error.status_code == 404:
            return _error_response(request, RouteNotFound(method, path))
        return _error_response(request, InvalidRequest(str(error.detail)))

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=RequestAborted.status)  # to nobody

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return _error_response(request, InternalError())  # starlette raises it again for the log


def _json_bytes(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _error_response(request: Request, error: BatonError) -> JSONResponse:
    id = request_id(request.scope["headers"]).decode()
    body = anthropic.error_body(error, request.url.path, id)
    return JSONResponse(body, error.status, headers=error.headers)
