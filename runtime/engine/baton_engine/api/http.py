"""
An HTTP server around the app, started, drained and stopped by its owner.

uvicorn parses requests with h11, which bounds headers. The socket is bound here, so that a port in use is an
error with a way out, and port 0 is known before the address is published. Signals are the owner's. Draining
counts the requests that generate and admits no new ones.
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
from baton_api.errors import NotReady, SetupError

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Longer than clients and routers keep idle connections, so that they close first."""


class HttpServer:
    """One app on one port: `async with HttpServer(app, host, port, drain) as server`."""

    def __init__(
        self, app: ASGIApp, host: str, port: int, drain: RequestDrain, tls: ssl.SSLContext | None = None
    ) -> None:
        self.host = host
        self.scheme = "https" if tls else "http"
        self._drain = drain
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http="h11",
            h11_max_incomplete_event_size=2 * limits.HEAD.most,  # `Edge` refuses those up to here in words
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
        """Returns once connections are accepted."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        started = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({self._task, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._task.done():
            await self._task

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests, /ready included, and wait for those under way; false if some are left."""
        return await self._drain.drain(seconds)

    async def close(self) -> None:
        """Stop accepting and cut what is left."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()

    async def __aenter__(self) -> HttpServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Server(uvicorn.Server):
    """uvicorn, without its signal handlers and with a word when it is up."""

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
                f"{host}:{port} is in use by another process. Stop it, choose another --port, or take any "
                "free one with --port 0."
            ) from error
        raise SetupError(
            f"Cannot listen on {host}:{port}: {error.strerror}. Choose another --host or --port."
        ) from error
    return listener


class RequestDrain:
    """How many requests are under way, and whether new ones are welcome."""

    def __init__(self) -> None:
        self.draining = False
        self.running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """One request; raises NotReady while draining."""
        if self.draining:
            raise NotReady("This worker is shutting down and takes no new requests; ask another one.")
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    async def drain(self, seconds: float) -> bool:
        """Let no more in and wait for those under way; false if some were left after `seconds`."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
