"""
One worker's process: a port, a worker that was tried out, its API, and a clean end.

The roles differ in what they add between the worker and its API; how a process starts, says that it is
ready, drains and ends is the same for all and stands here. The port is taken before anything is loaded,
so that one in use is found at once; until the worker is ready, every answer is a 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
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
from baton_engine.api.app import Served, create_app
from baton_engine.api.edge import Edge, Probes
from baton_engine.api.http import HttpServer, RequestDrain
from baton_engine.api.parameters import Defaults
from baton_engine.metrics.exposition import WorkerLabels, WorkerMetrics
from baton_engine.model.checkpoint import SamplingDefaults, sampling_defaults
from baton_engine.model.progress import Progress
from baton_engine.requests import RemotePrefill
from baton_engine.settings import WorkerSettings
from baton_engine.worker import Worker, open_worker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Duties:
    """What a role adds to a worker."""

    control: str = ""
    """`host:port` of the control server."""
    remote: Callable[[str, str, str], RemotePrefill] | None = None
    drain: Callable[[], Awaitable[None]] | None = None
    """Ends when no other worker needs this one any more."""


RoleOf = Callable[[Worker], contextlib.AbstractAsyncContextManager[Duties]]


@contextlib.asynccontextmanager
async def serve_alone(worker: Worker) -> AsyncIterator[Duties]:
    """Role `both`: nothing to add."""
    yield Duties()


class Entrance:
    """Answers 503 until the worker behind it is ready."""

    def __init__(self) -> None:
        self.app: ASGIApp = Edge(_starting)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


async def _starting(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotReady("This worker is starting: its model is being loaded.")


async def run(
    settings: WorkerSettings, announce: Announcer, progress: Progress, role: RoleOf = serve_alone
) -> None:
    """
    Serve until a SIGTERM or SIGINT, and then until what runs has ended; a second signal does not wait.

    Raises SetupError if it cannot start, BatonError if it cannot go on.
    """
    keys = Keys(settings.api_key, settings.api_key_file)
    entrance, drain = Entrance(), RequestDrain()
    tls = mutual_tls.server(settings.tls_folder, settings.tls_name)
    async with (
        HttpServer(entrance, settings.host, settings.port, drain, tls) as http,
        _probed(entrance, settings),
    ):
        announce(Listening(host=http.host, port=http.port))
        settings = settings.model_copy(update={"port": http.port})
        async with open_worker(settings, progress) as worker, role(worker) as duties:
            with _signals() as (stop, force):
                entrance.app = create_app(_served(worker, duties, drain, keys, tls))
                url = f"{http.scheme}://{http.address}/v1"
                log.info("%s serves %s on %s", worker.name, worker.model_name, url)
                log.info("The server is fired up and ready to roll!")
                _warn(settings, keys)
                announce(Ready(control=duties.control))
                await _first(stop.wait(), _done(worker.fatal))
                if worker.fatal.done():
                    raise BatonError(f"{worker.name} cannot go on: {worker.fatal.result()}.")
                await _first(_drain(worker, duties, drain), force.wait())


@contextlib.asynccontextmanager
async def _probed(entrance: Entrance, settings: WorkerSettings) -> AsyncIterator[None]:
    """With a port of their own for those who show no certificate, if one is wanted."""
    if not settings.health_port:
        yield
        return
    async with HttpServer(Probes(entrance), settings.host, settings.health_port, RequestDrain()):
        yield


async def _drain(worker: Worker, duties: Duties, drain: RequestDrain) -> None:
    seconds = worker.settings.drain_s
    log.info("%s drains: %d requests are under way, %g s for them", worker.name, drain.running, seconds)
    others = duties.drain() if duties.drain is not None else asyncio.sleep(0)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(drain.drain(seconds), others)


def _served(
    worker: Worker, duties: Duties, drain: RequestDrain, keys: Keys, tls: ssl.SSLContext | None
) -> Served:
    def load() -> Load:
        return worker.load(control=duties.control)

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
        ready=ready,
        remote=duties.remote,
        tracing=worker.tracing,
        drain=drain,
        keys=keys,
        defaults=_defaults(worker),
        embedder=worker.embedder,
        hidden=worker.spec.hidden,
        generates=not worker.spec.headless,
    )


def _defaults(worker: Worker) -> Defaults:
    settings = worker.settings
    sampling = SamplingDefaults()
    if settings.sampling_defaults == "model":
        sampling = sampling_defaults(worker.checkpoint)
    log.info("requests that do not say otherwise have %s", sampling)
    if settings.seed is None:
        return Defaults(sampling=sampling, include_usage=settings.stream_include_usage)
    return Defaults(
        sampling=sampling,
        include_usage=settings.stream_include_usage,
        seeds=functools.partial(random.Random(settings.seed).getrandbits, 64),
    )


def _warn(settings: WorkerSettings, keys: Keys) -> None:
    """Say aloud who could use this worker that perhaps should not."""
    warning = exposure.without_a_key(settings.host, settings.port, keys.required)
    if warning:
        log.warning("%s", warning)
    if settings.kv_tokens and exposure.endpoint_reachable(settings.kv_events):
        log.warning(
            "WARNING: KV events are published on %s, beyond this machine, with the tokens of all prompts: "
            "anybody who reaches it can read them. Baton's routers do without: --no-kv-tokens.",
            settings.kv_events,
        )
    open_control = settings.role is Role.PREFILL and not settings.ticket_secret
    if open_control and exposure.reachable(settings.control_host):
        log.warning(
            "WARNING: the control server listens on %s, beyond this machine, and wants no tickets: anybody "
            "who reaches it can have prompts computed. Give router and prefill workers the same "
            "BATON_TICKET_SECRET and BATON_ROUTER_TICKET_SECRET.",
            settings.control_host,
        )
    believes_all = settings.role is Role.DECODE and not settings.ticket_secret
    if believes_all and exposure.reachable(settings.host):
        log.warning(
            "WARNING: this decode worker listens on %s, beyond this machine, and has no BATON_TICKET_SECRET: "
            "anybody who can send it requests can make it use KV blocks of a prefill worker of their own. "
            "Give router and workers the same BATON_TICKET_SECRET and BATON_ROUTER_TICKET_SECRET.",
            settings.host,
        )


async def _first(*waits: Awaitable[object]) -> None:
    """Wait until one of them is done, and end the others."""
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
    """Events for the first SIGTERM or SIGINT and for the second."""
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
