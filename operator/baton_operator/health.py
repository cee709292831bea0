"""
The HTTP server of the operator process: `/healthz`, `/readyz` and `/metrics`.

It starts before everything else. An operator that waits for the Lease is alive; the leader is alive while
all its watches are. The leader is ready once its cache is synced, other operators while the API server
answers them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from baton_api.metrics import CONTENT_TYPE
from baton_operator.cluster.leadership import Leadership
from baton_operator.cluster.reflector import Reflectors

LATE_S = 120.0
"""Seconds without data from a watch after which the operator counts as dead. The reflector restarts a
silent watch long before, and the response to that counts as data."""

SILENT_S = 30.0
"""Seconds without a response about the Lease after which a waiting operator is not ready."""


_log = logging.getLogger(__name__)


def _is_fault_of_server(record: logging.LogRecord) -> bool:
    """Whether it is not about a request that cannot be read: anyone can send those, in any number."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_log.addFilter(_is_fault_of_server)


@dataclass(slots=True)
class HealthServer:
    """The server."""

    leadership: Leadership
    reflectors: Reflectors
    metrics: Callable[[], bytes]
    clock: Callable[[], float]
    """Monotonic."""
    led: bool = False
    """Whether this operator is the leader and its watches have started."""
    port: int = 0

    async def start(self, host: str, port: int) -> web.AppRunner:
        """Start to serve until the cleanup of the runner. Raises OSError if the port is in use."""
        app = web.Application()
        handlers = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._text}
        app.add_routes([web.get(path, handler) for path, handler in handlers.items()])
        runner = web.AppRunner(app, access_log=None, logger=_log)
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        self.port = int(runner.addresses[0][1])
        return runner

    async def _healthz(self, _: web.Request) -> web.Response:
        if self.led and (stale := self.reflectors.stale(LATE_S)):
            return _answer(503, f"no data from the watch of {', '.join(stale)} for {LATE_S:.0f} s")
        return _answer(200, "ok")

    async def _readyz(self, _: web.Request) -> web.Response:
        if self.led:
            if unsynced := self.reflectors.unsynced:
                return _answer(503, f"not listed yet: {', '.join(unsynced)}")
            if stale := self.reflectors.stale(LATE_S):
                return _answer(503, f"stale: {', '.join(stale)}")
            return _answer(200, "leader") if self.leadership.holds else _answer(503, "lost the Lease")
        looked = self.leadership.looked
        if looked is not None and self.clock() - looked < SILENT_S:
            return _answer(200, "waiting for the Lease")
        return _answer(503, "the API server does not answer")

    async def _text(self, _: web.Request) -> web.Response:
        return web.Response(body=self.metrics(), headers={"Content-Type": CONTENT_TYPE})


def _answer(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text + "\n")
