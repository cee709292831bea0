"""Metrics of Prometheus in modeled time: rates are lower and durations longer than in real time."""

from __future__ import annotations

from collections.abc import Mapping

from baton_api import metrics
from baton_operator.scaling.prometheus import METRIC_LABEL, MetricsLost, MetricsQuery, PrometheusClient
from baton_operator.scaling.signals import ServiceMetrics
from benchmarks.scaling.case import WINDOW_S

DEMANDS = {f"demand_{kind}{when}" for kind in ("prompt", "local", "answer") for when in ("", "_lately")}
RATES = {*DEMANDS, "prefill_speed", "decode_generated"}
TIMES = {"first_token", "age"}
"""Times from token to token are reported as meant."""

BUSY_S = 60.0
LEAST_WINDOW_S = 4
"""Of Prometheus' own time, which scrapes each second."""


class Measured:
    """Of one service. Close it at the end."""

    def __init__(self, url: str, scale: float) -> None:
        self._url = url
        self._prometheus = PrometheusClient()
        self._times = dict.fromkeys(TIMES, scale) | dict.fromkeys(RATES, 1 / scale)
        self._busy_s = max(LEAST_WINDOW_S, round(BUSY_S / scale))
        window_s = max(LEAST_WINDOW_S, round(WINDOW_S / scale))
        self._question = MetricsQuery("models", "chat", 95, window_s)

    async def metrics(self) -> ServiceMetrics:
        """Of the operator's one question."""
        try:
            samples = await self._prometheus.query(self._url, self._question.text, METRIC_LABEL)
        except MetricsLost as lost:
            return ServiceMetrics({}, str(lost))
        return ServiceMetrics({name: value * self._times.get(name, 1.0) for name, value in samples.items()})

    async def running(self) -> Mapping[str, float]:
        """Requests by worker."""
        return await self._by_pod(self._question.running)

    async def busy(self) -> Mapping[str, float]:
        """Share of the last minute that a worker was at work: what its CPU would show."""
        return await self._by_pod(f"sum by (pod) (rate({metrics.WORKER_STEP.name}_sum[{self._busy_s}s]))")

    async def close(self) -> None:
        await self._prometheus.close()

    async def _by_pod(self, query: str) -> Mapping[str, float]:
        try:
            return await self._prometheus.query(self._url, query, "pod")
        except MetricsLost:
            return {}
