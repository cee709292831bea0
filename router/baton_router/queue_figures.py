"""What is measured of those who wait in the router, read off the queue when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from baton_api import metrics
from baton_router.queue import Queue
from baton_router.waiting_room import LEVELS

REASONS = ("requests", "tokens", "streams", "full", "late", "waited", "unready", "poison")
"""Why requests are refused: the first three are limits of their tenants."""


class QueueFigures(Collector):
    """How many wait, for how long, and who was sent away."""

    def __init__(self, queue: Queue, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._clock = clock

    def collect(self) -> Iterator[Family]:
        now = self._clock()
        depth, age = _gauge(metrics.ROUTER_QUEUE_DEPTH), _gauge(metrics.ROUTER_QUEUE_AGE)
        for name, level in LEVELS.items():
            oldest = self._queue.oldest(level)
            depth.add_metric([name], self._queue.count(level))
            age.add_metric([name], 0.0 if oldest is None else now - oldest)
        metric = metrics.ROUTER_REJECTS
        rejects = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        for reason in REASONS:
            rejects.add_metric([reason], self._queue.rejects[reason])
        yield from (depth, age, rejects)
        metric = metrics.ROUTER_DEMAND
        demand = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        for kind in metric.foreseen:
            demand.add_metric([kind], self._queue.demand[kind])
        yield demand
        for one, value in (
            (metrics.ROUTER_HELD, self._queue.held),
            (metrics.ROUTER_QUEUED_TOKENS, self._queue.queued_tokens),
        ):
            family = _gauge(one)
            family.add_metric([], value)
            yield family


def _gauge(metric: metrics.Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
