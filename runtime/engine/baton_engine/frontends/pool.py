"""
The frontends of one worker: started with it, restarted when they end, and ended with it.

A frontend is a process of its own program, not a fork: the worker has threads. It inherits one end of a pair
of sockets and the listening socket of the worker's port. The pair tells either side at once that the other
one is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from baton_api import logs
from baton_api.errors import SetupError
from baton_engine.api.http import HttpServer, RequestDrain
from baton_engine.api.served import Served
from baton_engine.frontends.engine_service import EngineService, FrontendConnection, adapters_of
from baton_engine.frontends.messages import Hello

log = logging.getLogger(__name__)

RESTART_S, RESTART_LIMIT_S = 0.1, 5.0
"""Seconds before a restart: doubled each time, up to this limit."""
STEADY_S = 10.0
"""Seconds of running after which earlier ends of a frontend no longer count."""
START_S = 120.0
"""Seconds for a frontend to start."""
END_S = 10.0
"""Seconds for the frontends to end, before they are killed."""


class FrontendPool:
    """All frontends of a worker."""

    def __init__(self, count: int, listening: socket.socket, name: str, service: EngineService) -> None:
        """Frontends accept from `listening`, which the pool closes. `name` is the worker's, for logs."""
        self._listening = listening
        self._name = name
        self._service = service
        self._hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._ready = [asyncio.Event() for _ in range(count)]
        self._closing = False
        self._tasks = [asyncio.create_task(self._keep(number)) for number in range(count)]

    async def serve(self, hello: Hello) -> None:
        """Let all frontends serve; return when they do. Raises SetupError if one cannot."""
        self._hello.set_result(hello)
        all_ready = asyncio.gather(*(event.wait() for event in self._ready))
        try:
            async with asyncio.timeout(START_S):
                waits: list[asyncio.Future[Any]] = [all_ready, *self._tasks]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        if not all_ready.done():
            all_ready.cancel()
            raise SetupError(
                "An API process did not start; the log has the reason. Start without --api-processes."
            )

    async def close(self) -> None:
        """End all frontends. Their streams have ended, or are cut."""
        self._closing = True
        if not self._hello.done():
            self._hello.cancel()
        for connection in list(self._service.connections):
            connection.transport.close()
        await asyncio.wait(self._tasks, timeout=END_S)
        for connection in list(self._service.connections):
            connection.transport.abort()  # it reads nothing
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listening.close()

    async def _keep(self, number: int) -> None:
        """Run one frontend again and again. Returns if it ends before it was ever ready."""
        failures = 0
        while not self._closing:
            began = time.monotonic()
            try:
                status = await self._run(number)
            except OSError:  # such as a limit of processes or of memory
                log.exception("The API process %d cannot be started.", number)
                status = -1
            if self._closing or not self._ready[number].is_set():
                return
            failures = 1 if time.monotonic() - began >= STEADY_S else failures + 1
            log.error("The API process %d ended with %d and is started again.", number, status)
            await asyncio.sleep(min(RESTART_LIMIT_S, RESTART_S * 2.0 ** (failures - 1)))

    async def _run(self, number: int) -> int:
        """Start a frontend, and return its exit status when it has ended."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as stack:
            stack.callback(ours.close)  # unless it starts
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "baton_engine.frontends.process",
                str(theirs.fileno()),
                str(self._listening.fileno()),
                logs.for_children()[logs.VARIABLE],
                f"{self._name}-api-{number}",
                pass_fds=(theirs.fileno(), self._listening.fileno()),
            )
            stack.pop_all()
        ended = asyncio.create_task(process.wait())
        try:
            waits: list[asyncio.Future[Any]] = [self._hello, ended]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._hello.done() and not self._hello.cancelled() and not ended.done():
                ours.setblocking(False)
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(
                    lambda: FrontendConnection(self._service), sock=ours
                )
                connection.hello(self._hello.result())
                serving = asyncio.create_task(connection.serving.wait())
                begun: list[asyncio.Future[Any]] = [serving, connection.closed, ended]
                await asyncio.wait(begun, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
                serving.cancel()
                if connection.serving.is_set():
                    self._ready[number].set()
                else:
                    connection.transport.abort()
                await asyncio.wait((connection.closed, ended), return_when=asyncio.FIRST_COMPLETED)
                connection.transport.close()
            ours.close()
            await asyncio.wait((ended,), timeout=END_S)
        finally:
            ours.close()
            if not ended.done():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        return await ended


def hello_of(served: Served, checkpoint: str, worker: str, block_size: int, control: str) -> Hello:
    """What frontends of a worker serve."""
    return Hello(
        pickle.dumps(served.settings),
        checkpoint,
        served.names,
        served.max_model_len,
        block_size,
        served.created,
        served.remote is not None,
        served.defaults.sampling,
        adapters_of(served.adapters),
        control,
        worker,
    )


@contextlib.asynccontextmanager
async def control_server(app: ASGIApp, drain: RequestDrain) -> AsyncIterator[str]:
    """Serve `app` on a Unix socket that only this user can reach; its path."""
    folder = Path(tempfile.mkdtemp(prefix="baton-worker-"))
    try:
        path = str(folder / "control")
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(path)
        listening.listen()
        listening.setblocking(False)
        async with HttpServer(app, "127.0.0.1", 0, drain, listening=listening):
            yield path
    finally:
        shutil.rmtree(folder, ignore_errors=True)
