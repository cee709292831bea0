"""
The process of one worker: start, readiness, HTTP API, drain and exit.

All roles share this module; each role adds its services between the worker and the API. The port is opened
before the model is loaded, so that a port in use is reported immediately. Until the worker is ready, the
server answers 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from baton_api import exposure, mutual_tls
from baton_api.announcements import Announcer, Listening, Ready
from baton_api.errors import BatonError, NotReady
from baton_api.keys import Keys
from baton_api.workers import Load, Role
from baton_engine.api.app import create_app
from baton_engine.api.edge import Edge, Probes
from baton_engine.api.http import HttpServer, RequestDrain
from baton_engine.api.parameters import Defaults, defaults_of
from baton_engine.api.served import OtherProcesses, Served
from baton_engine.frontends.engine_service import EngineService
from baton_engine.frontends.pool import FrontendPool, control_server, hello_of
from baton_engine.metrics.exposition import WorkerLabels, WorkerMetrics
from baton_engine.model.checkpoint import SamplingDefaults, sampling_defaults
from baton_engine.model.progress import Progress
from baton_engine.requests import RemotePrefill
from baton_engine.settings import WorkerSettings
from baton_engine.worker import Worker, open_worker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleServices:
    """The services that a role adds to a worker."""

    control: str = ""
    """`host:port` of the control server."""
    remote: Callable[[str, str, str], RemotePrefill] | None = None
    """Creates the `RemotePrefill` of a request from the address of a prefill worker, a ticket and the
    request's id."""
    drain: Callable[[], Awaitable[None]] | None = None
    """Returns when no other worker uses this worker's blocks."""


RoleOf = Callable[[Worker], contextlib.AbstractAsyncContextManager[RoleServices]]


@contextlib.asynccontextmanager
async def both(worker: Worker) -> AsyncIterator[RoleServices]:
    """Role `both`: computes prompts and generates, and adds no services."""
    yield RoleServices()


class StartupGate:
    """Answers 503 until the worker is ready and `app` is replaced."""

    def __init__(self) -> None:
        self.app: ASGIApp = Edge(_starting)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


async def _starting(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotReady("This worker is starting: its model is being loaded.")


async def run(settings: WorkerSettings, announce: Announcer, progress: Progress, role: RoleOf = both) -> None:
    """
    Serve until SIGTERM or SIGINT, then drain and return; a second signal skips the drain.

    Raises SetupError if the worker cannot start, BatonError if it cannot continue.
    """
    keys = Keys(settings.api_key, settings.api_key_file)
    admin_keys = Keys(settings.admin_api_key, settings.admin_api_key_file)
    gate, drain = StartupGate(), RequestDrain()
    tls = mutual_tls.server(settings.tls_folder, settings.tls_name)
    async with (
        HttpServer(gate, settings.host, settings.port, drain, tls) as http,
        _health_server(gate, settings),
    ):
        announce(Listening(host=http.host, port=http.port))
        settings = settings.model_copy(update={"port": http.port})
        async with (
            _frontends(settings, http) as frontends,
            open_worker(settings, progress) as worker,
            role(worker) as services,
        ):
            with _signals() as (stop, force):
                others = OtherProcesses() if frontends is None else frontends.service
                served = served_of(worker, services, drain, keys, tls, admin_keys, others)
                app = create_app(served)
                if frontends is not None:
                    starting = asyncio.create_task(frontends.begin(worker, served, app))
                    await _first(asyncio.wait((starting,)), stop.wait())
                    if not starting.done():
                        starting.cancel()
                        return
                    starting.result()
                gate.app = app
                url = f"{http.scheme}://{http.address}/v1"
                log.info("%s serves %s on %s", worker.name, worker.model_name, url)
                log.info("The server is fired up and ready to roll!")
                _warn(settings, keys)
                announce(Ready(control=services.control))
                await _first(stop.wait(), _done(worker.fatal))
                if worker.fatal.done():
                    raise BatonError(f"{worker.name} cannot continue: {worker.fatal.result()}.")
                await _first(_drain(worker, services, drain, others), force.wait())
                if frontends is not None:
                    await frontends.close()


class _Frontends:
    """The frontends of the worker, from its start on."""

    def __init__(self, settings: WorkerSettings, http: HttpServer) -> None:
        self.service = EngineService()
        self._http = http
        name = settings.name or str(settings.role)
        self._pool = FrontendPool(settings.api_processes, http.socket.dup(), name, self.service)
        self._control = contextlib.AsyncExitStack()

    async def begin(self, worker: Worker, served: Served, app: ASGIApp) -> None:
        """Let them serve the port in place of this process. Raises SetupError."""
        self.service.served = served
        if not served.generates:
            log.info("%s generates no text: one process serves its API.", worker.name)
            await self.close()
            return
        control = await self._control.enter_async_context(control_server(app, RequestDrain()))
        size, checkpoint = worker.cache.block_size, str(worker.checkpoint.path)
        await self._pool.serve(hello_of(served, checkpoint, worker.name, size, control))
        self._http.hand_over()

    async def close(self) -> None:
        await self._pool.close()
        await self._control.aclose()


@contextlib.asynccontextmanager
async def _frontends(settings: WorkerSettings, http: HttpServer) -> AsyncIterator[_Frontends | None]:
    """Start the frontends while the model is loaded. None: this process serves the API."""
    if not settings.api_processes:
        yield None
        return
    frontends = _Frontends(settings, http)
    try:
        yield frontends
    finally:
        await frontends.close()


@contextlib.asynccontextmanager
async def _health_server(gate: StartupGate, settings: WorkerSettings) -> AsyncIterator[None]:
    """Serve probes and metrics without TLS on `settings.health_port`, if it is set."""
    if not settings.health_port:
        yield
        return
    async with HttpServer(Probes(gate), settings.host, settings.health_port, RequestDrain()):
        yield


async def _drain(
    worker: Worker, services: RoleServices, drain: RequestDrain, frontends: OtherProcesses
) -> None:
    seconds = worker.settings.drain_s
    log.info("%s drains: %d requests are running, at most %g s", worker.name, drain.running, seconds)
    others = services.drain() if services.drain is not None else asyncio.sleep(0)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(drain.drain(seconds), frontends.drain(seconds), others)


def served_of(
    worker: Worker,
    services: RoleServices | None = None,
    drain: RequestDrain | None = None,
    keys: Keys | None = None,
    tls: ssl.SSLContext | None = None,
    admin_keys: Keys | None = None,
    others: OtherProcesses | None = None,
) -> Served:
    """Assemble what the API of a worker serves."""
    services = services or RoleServices()

    def load() -> Load:
        return worker.load(control=services.control)

    def ready() -> str | None:
        return worker.fatal.result() if worker.fatal.done() else None

    return Served(
        names=worker.model_names,
        tokenizer=worker.tokenizer,
        grammars=worker.grammars,
        engine=worker.client,
        max_model_len=worker.engine.limits.max_model_len,
        settings=worker.settings,
        metrics=WorkerMetrics(
            worker.client.snapshot,
            worker.kv_batches,
            WorkerLabels(worker.name, worker.settings.role, worker.model_name),
            worker.settings.metrics_names,
            lambda: mutual_tls.validity(tls),
        ),
        load=load,
        adapters=worker.adapters,
        ready=ready,
        remote=services.remote,
        tracing=worker.tracing,
        drain=drain or RequestDrain(),
        keys=keys or Keys(),
        admin_keys=admin_keys or Keys(),
        defaults=_defaults(worker),
        embedder=worker.embedder,
        encoder=worker.encoder,
        hidden=worker.spec.hidden,
        generates=not worker.spec.headless,
        others=others or OtherProcesses(),
    )


def _defaults(worker: Worker) -> Defaults:
    settings = worker.settings
    sampling = SamplingDefaults()
    if settings.sampling_defaults == "model":
        sampling = sampling_defaults(worker.checkpoint)
    log.info("sampling defaults of requests: %s", sampling)
    return defaults_of(settings, sampling)


def _warn(settings: WorkerSettings, keys: Keys) -> None:
    """Log a warning for each port that clients or peers without credentials can reach."""
    warning = exposure.without_a_key(settings.host, settings.port, keys.required)
    if warning:
        log.warning("%s", warning)
    if settings.kv_tokens and exposure.endpoint_reachable(settings.kv_events):
        log.warning(
            "WARNING: KV events on %s contain the tokens of all prompts, and other machines can read them. "
            "Set --no-kv-tokens: Baton's routers do not need the tokens.",
            settings.kv_events,
        )
    serves = settings.role is Role.PREFILL or (settings.role is Role.DECODE and settings.kv_peers)
    if serves and not settings.ticket_secret and exposure.reachable(settings.control_host):
        log.warning(
            "WARNING: the control server listens on %s without tickets, and other machines can have prompts "
            "computed and read KV blocks. Set BATON_ROUTER_TICKET_SECRET of the router and "
            "BATON_TICKET_SECRET of the workers to the same secret.",
            settings.control_host,
        )
    open_decode = settings.role is Role.DECODE and not settings.ticket_secret
    if open_decode and exposure.reachable(settings.host):
        log.warning(
            "WARNING: this decode worker listens on %s without BATON_TICKET_SECRET, and clients on other "
            "machines can make it read KV blocks of any address. Set BATON_ROUTER_TICKET_SECRET of the "
            "router and BATON_TICKET_SECRET of the workers to the same secret.",
            settings.host,
        )


async def _first(*waits: Awaitable[object]) -> None:
    """Wait until one of `waits` is done, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _done(future: asyncio.Future[str]) -> None:
    await asyncio.wait((future,))


@contextlib.contextmanager
def _signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Return two events: set by the first SIGTERM or SIGINT, and by the second one."""
    stop, force = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        (force if stop.is_set() else stop).set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, signalled)
    try:
        yield stop, force
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
