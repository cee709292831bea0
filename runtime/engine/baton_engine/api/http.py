"""
An HTTP server for the app, with start, drain and stop.

Requests are parsed as the router parses them (`baton_http.protocol`). The socket is bound before uvicorn
starts, so that a port in use causes a clear error, and the port chosen for `--port 0` is known. The server
does not handle signals. Draining rejects new requests and waits for the running ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from baton_api import limits
from baton_api.capacity import SharedCapacity
from baton_api.errors import NotReady, SetupError
from baton_http.protocol import ConnectionLimits, http_protocol

BACKLOG = 2048
CONNECTION_LIMITS = ConnectionLimits(
    max_header=2 * limits.HEAD.most,  # `Edge` logs and rejects smaller ones
    idle_s=300.0,  # a router stops reading while its client does; it has a limit of its own
    memory=SharedCapacity(1024**3),
)
KEEP_ALIVE_S = 75
"""Longer than the idle timeout of clients and routers, so that they close connections first."""


class HttpServer:
    """One app on one port: `async with HttpServer(app, host, port, drain) as server`."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        drain: RequestDrain,
        tls: ssl.SSLContext | None = None,
        *,
        listening: socket.socket | None = None,
    ) -> None:
        """`listening` is a socket to accept from, instead of a new one at `host` and `port`."""
        self.host = host
        self.scheme = "https" if tls else "http"
        self._drain = drain
        self.socket = listening or _bind(host, port)
        """The listening socket, which other processes may inherit."""
        self.port: int = port if self.socket.family == socket.AF_UNIX else self.socket.getsockname()[1]
        self._protocol = http_protocol(CONNECTION_LIMITS)
        config = uvicorn.Config(
            app,
            http=self._protocol,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            ssl_context_factory=(lambda config, default: tls) if tls else None,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    async def start(self) -> None:
        """Start the server. Returns when it accepts connections."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self.socket]))
        started = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({self._task, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._task.done():
            await self._task

    async def drain(self, seconds: float) -> bool:
        """Reject new requests, including /ready, and wait for running ones. False if some remain."""
        return await self._drain.drain(seconds)

    def hand_over(self) -> None:
        """Leave new connections to other processes with the same socket; these close after an answer."""
        self._protocol.leaving = True
        for server in self._server.servers:
            server.close()

    async def close(self) -> None:
        """Stop accepting connections and close the remaining ones."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self.socket.close()

    async def __aenter__(self) -> HttpServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Server(uvicorn.Server):
    """uvicorn without signal handlers, with an event for its startup."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SetupError(
            f"Cannot listen on {host}:{port}: {error.strerror}. Choose another --host."
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise SetupError(
                f"{host}:{port} is in use by another process. Stop it, choose another --port, or use --port "
                "0 for any free port."
            ) from error
        raise SetupError(
            f"Cannot listen on {host}:{port}: {error.strerror}. Choose another --host or --port."
        ) from error
    return listener


class RequestDrain:
    """Counts running requests and rejects new ones while draining."""

    def __init__(self) -> None:
        self.draining = False
        self.running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count one request. Raises NotReady while draining."""
        if self.draining:
            raise NotReady("This worker is shutting down and rejects new requests. Use another worker.")
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    async def drain(self, seconds: float) -> bool:
        """Reject new requests and wait for running ones. False if some remain after `seconds`."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
