"""
What Kubernetes and Prometheus ask of the operator itself: `/healthz`, `/readyz` and `/metrics`.

It answers before anything else begins. Alive is who waits for the Lease, and who holds it and hears of
changes; ready is whom the API server answers.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from baton_operator.heartbeat import Heartbeat
from baton_operator.leadership import Leadership

SILENT_S = 30.0
"""Seconds without an answer about the Lease after which an operator that waits is not ready."""


class Health:
    """Answers on one address; `clock` is monotonic."""

    def __init__(
        self,
        leadership: Leadership,
        heartbeat: Heartbeat,
        metrics: Callable[[], bytes],
        clock: Callable[[], float],
    ) -> None:
        self._leadership = leadership
        self._heartbeat = heartbeat
        self._metrics = metrics
        self._clock = clock
        self.led = False
        """Whether the work has begun, from when on watches have to live."""
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
        if self.led and not self._heartbeat.alive:
            age = self._heartbeat.age_s
            return _answer(503, f"no heartbeat has come back by a watch for {age:.0f} s")
        return _answer(200, "ok")

    async def _readyz(self, _: web.Request) -> web.Response:
        if self.led:
            ready = self._leadership.holds and self._heartbeat.watching and self._heartbeat.alive
            return _answer(200, "leads") if ready else _answer(503, "its watches do not live yet")
        looked = self._leadership.looked
        if looked is not None and self._clock() - looked < SILENT_S:
            return _answer(200, "waits for the Lease")
        return _answer(503, "the API server does not answer")

    async def _text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _answer(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text + "\n")
