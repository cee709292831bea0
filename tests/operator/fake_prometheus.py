"""A Prometheus that answers the autoscaler's questions with what the test says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from baton_operator.scaling.prometheus import METRIC_LABEL

NOTHING = {
    "age": 1.0, "routers": 9.0, "demand_prompt": 0.0, "demand_answer": 0.0, "queued_prompt": 0.0,
    "in_flight": 0.0, "waiting": 0.0, "held": 0.0, "prefill_workers": 9.0, "decode_workers": 9.0,
    "prefill_queued_tokens": 0.0, "prefill_queued": 0.0, "decode_queued_tokens": 0.0, "decode_queued": 0.0,
    "decode_fullest": 0.0,
    "decode_fullest_slots": 0.0, "decode_slots": 64.0, "decode_running": 0.0,
}  # fmt: skip
"""All is well, and there are no requests."""


class FakePrometheus:
    """At `url`."""

    def __init__(self) -> None:
        self.url = ""
        self.values_by_name: dict[str, float] = dict(NOTHING)
        self.running: dict[str, float] = {}
        """Requests by pod."""

    async def answer(self, request: web.Request) -> web.Response:
        query = str((await request.post())["query"])
        label, values = (
            (METRIC_LABEL, self.values_by_name) if METRIC_LABEL in query else ("pod", self.running)
        )
        result = [{"metric": {label: name}, "value": [1.0, str(value)]} for name, value in values.items()]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})


@asynccontextmanager
async def fake_prometheus() -> AsyncIterator[FakePrometheus]:
    prometheus = FakePrometheus()
    app = web.Application()
    app.router.add_post("/api/v1/query", prometheus.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    prometheus.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield prometheus
    finally:
        await runner.cleanup()
