"""
The router's process: a socket, an event loop, uvicorn around the application, and a clean end.

A first SIGTERM or SIGINT ends listening and lets running streams finish, a second one does not wait
for them. Either way the process ends with status 0: it was asked to.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

import uvicorn
from uvicorn.server import ServerState

from baton_api import exposure
from baton_api.capacity import SharedCapacity
from baton_api.errors import SetupError
from baton_http.acceptor import Acceptor
from baton_http.protocol import ConnectionLimits, http_protocol
from baton_http.replies import Receive, Scope, Send
from baton_router.app import create_app
from baton_router.settings import RouterSettings
from baton_router.tenants.access import Authenticator

log = logging.getLogger(__name__)

BACKLOG = 2048

KEEP_ALIVE_S = 75
"""Seconds for which an idle client connection stays open. Clients close theirs earlier, so no request meets
a closing connection."""


ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class ServedApp(Protocol):
    """An ASGI application that is notified when its process is to end."""

    draining: bool
    access: Authenticator
    memory: SharedCapacity
    """Of client connections."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


async def serve(
    settings: RouterSettings, listening: socket.socket, ready: Callable[[str], None] | None = None
) -> None:
    """Serve as one process, on a socket that is bound, until a signal says to stop."""
    router = create_app(settings)
    await router.start_endpoint_picker()
    server = RouterServer(router, settings)
    router.execution.url = url = address(listening)
    server.ending = router.execution.close
    server.serve_metrics(router.serve_internal)
    log_startup(settings, server.router.access.required, url)
    server.listening = ready and (lambda: ready(url))
    await server.serve(sockets=[listening])


def log_startup(settings: RouterSettings, keyed: bool, url: str) -> None:
    """Log the address and the number of workers, and warn if the router accepts requests without a key."""
    log.info(
        "The router listens on %s for %d decode and %d prefill workers%s.",
        url,
        len(settings.decode),
        len(settings.prefill),
        ", and for discovered workers" if settings.asks_for_workers else "",
    )
    warning = exposure.without_a_key(settings.host, int(url.rpartition(":")[2]), keyed)
    if warning:
        log.warning("%s", warning)


class RouterServer(uvicorn.Server):
    """uvicorn's server with an end in two steps: first say that it is coming, then stop listening."""

    def __init__(self, router: ServedApp, settings: RouterSettings) -> None:
        limits = ConnectionLimits(
            settings.max_header, settings.header_s, settings.body_s, settings.idle_s, router.memory
        )
        self._connections = http_protocol(limits)
        super().__init__(
            uvicorn.Config(
                exposure.with_cors(
                    router, exposure.allowed_origins(settings.allowed_origins, router.access.required)
                ),
                http=self._connections,
                ws="none",
                lifespan="on",
                backlog=BACKLOG,
                log_config=None,
                access_log=False,
                proxy_headers=False,  # the router does not use client addresses
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(settings.drain_s),
            )
        )
        self.router = router
        self._settings = settings
        self._metrics: MetricsServer | None = None
        self.notice_s = settings.drain_notice_s
        self.listening: Callable[[], None] | None = None
        self.ending: Callable[[], Awaitable[None]] | None = None
        """Stops the components that send requests to this server."""

    def serve_metrics(self, app: ASGIApp) -> None:
        """Serve `app` on --metrics-port, if it is set, as long as this server runs. Raises SetupError."""
        settings = self._settings
        if settings.metrics_port is not None:
            self._metrics = MetricsServer(app, bind(settings.host, settings.metrics_port, "--metrics-port"))
            log.info("The metrics are at %s/metrics.", self._metrics.url)

    @property
    def metrics_url(self) -> str:
        """The URL of the server of metrics; empty without one."""
        return "" if self._metrics is None else self._metrics.url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        for listening in sockets or []:
            listening.listen(BACKLOG)
            self.servers.append(Acceptor(listening, self._connection))  # type: ignore[arg-type]
        if self._metrics is not None:
            self._metrics.start()
        if self.listening is not None:
            self.listening()

    def _connection(self) -> asyncio.Protocol:
        return self._connections(self.config, self.server_state, self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.router.draining = True
        self._connections.leaving = self.notice_s > 0
        log.info("The router is draining.")
        await asyncio.sleep(self.notice_s)
        if self.ending is not None:
            await self.ending()
        await super().shutdown(sockets)
        if self._metrics is not None:
            self._metrics.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own raises the signal again at the end, which makes a clean end look like a crash."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


class MetricsServer:
    """The server of --metrics-port. Its memory is its own: scrapes work while clients use all of theirs."""

    def __init__(self, app: ASGIApp, listening: socket.socket) -> None:
        """`listening` is bound, and belongs to this object."""
        self.url = address(listening)
        self._listening = listening
        self._connections = http_protocol(ConnectionLimits())
        self._config = uvicorn.Config(
            app,
            http=self._connections,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._config.load()
        self._state = ServerState()
        self._acceptor: Acceptor | None = None

    def start(self) -> None:
        self._listening.listen(BACKLOG)
        self._acceptor = Acceptor(self._listening, lambda: self._connections(self._config, self._state, {}))

    def close(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        self._listening.close()
        for connection in list(self._state.connections):
            connection.shutdown()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's event loop where it is installed, otherwise asyncio's."""
    try:
        import uvloop
    except ModuleNotFoundError:  # not on Windows; asyncio's own does it more slowly
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A bound TCP socket. Raises SetupError with the way out; `flag` sets the port."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise SetupError(
            f"The router cannot listen on {host!r}: {error.strerror}. Give --host an address."
        ) from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            way_out = f"another process has it: stop that one or give another {flag} (0 takes a free one)"
        else:
            way_out = f"{error.strerror}: give another --host or {flag}"
        raise SetupError(f"The router cannot listen on {host}:{port}; {way_out}.") from error
    return listening


def address(listening: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
