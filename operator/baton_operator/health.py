"""
What Kubernetes and Prometheus ask of the operator itself: `/healthz`, `/readyz` and `/metrics`.

It answers before anything else begins. An operator that waits for the Lease is alive; the leader is alive
as long as all its watches are. The leader is ready once its cache is synced; others as long as the API
server answers them.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from baton_operator.cluster.leadership import Leadership
from baton_operator.cluster.reflector import Reflectors

LATE_S = 120.0
"""Seconds without anything from a watch after which the operator counts as dead. A watch that is silent is
begun anew long before, and the API server's answer to that counts."""

SILENT_S = 30.0
"""Seconds without an answer about the Lease after which an operator that waits is not ready."""


class HealthServer:
    """Answers on one address; `clock` is monotonic."""

    def __init__(
        self,
        leadership: Leadership,
        reflectors: Reflectors,
        metrics: Callable[[], bytes],
        clock: Callable[[], float],
    ) -> None:
        self._leadership = leadership
        self._reflectors = reflectors
        self._metrics = metrics
        self._clock = clock
        self.led = False
        """Whether the watches have begun."""
        self.port = 0

    async def start(self, host: str, port: int) -> web.AppRunner:
        """Answer from now on, until the runner's cleanup. Raises OSError if the port is taken."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._text),
            ]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        self.port = int(runner.addresses[0][1])
        return runner

    async def _healthz(self, _: web.Request) -> web.Response:
        if self.led and (stale := self._reflectors.stale(LATE_S)):
            return _answer(503, f"nothing has come by the watch of {', '.join(stale)} for {LATE_S:.0f} s")
        return _answer(200, "ok")

    async def _readyz(self, _: web.Request) -> web.Response:
        if self.led:
            if unsynced := self._reflectors.unsynced:
                return _answer(503, f"not listed yet: {', '.join(unsynced)}")
            if stale := self._reflectors.stale(LATE_S):
                return _answer(503, f"stale: {', '.join(stale)}")
            return _answer(200, "leads") if self._leadership.holds else _answer(503, "the Lease is lost")
        looked = self._leadership.looked
        if looked is not None and self._clock() - looked < SILENT_S:
            return _answer(200, "waits for the Lease")
        return _answer(503, "the API server does not answer")

    async def _text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _answer(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text + "\n")
