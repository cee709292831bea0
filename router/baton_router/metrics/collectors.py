"""Metrics that are read off the router's state at a scrape: worker caches, queue, tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from baton_api import metrics
from baton_api.metrics import Metric
from baton_router.scheduling.priority_queue import LEVELS
from baton_router.scheduling.queue import Queue
from baton_router.tenants.tenants import Tenants
from baton_router.workers.kv_subscriber import KvSubscribers
from baton_router.workers.worker import Workers
from baton_router.workers.worker_state import WorkerStates


class CacheMetrics(Collector):
    """The prefix index, the feeds of KV events, and the accuracy of both."""

    def __init__(self, workers: Workers, worker_states: WorkerStates, feeds: KvSubscribers) -> None:
        self._workers = workers
        self._worker_states = worker_states
        self._feeds = feeds

    def collect(self) -> Iterator[Family]:
        chunks = _gauge(metrics.ROUTER_INDEX_CHUNKS)
        chunks.add_metric([], len(self._worker_states))
        yield chunks
        tiers = _gauge(metrics.ROUTER_INDEX_TIER_CHUNKS)
        for tier, count in self._worker_states.tier_chunks.items():
            tiers.add_metric([tier], count)
        yield tiers
        memory = _gauge(metrics.ROUTER_INDEX_BYTES)
        memory.add_metric([], self._worker_states.bytes)
        yield memory
        accuracy, ignored = _gauge(metrics.ROUTER_CACHE_ACCURACY), _gauge(metrics.ROUTER_CACHE_IGNORED)
        for worker in self._workers.all:
            if worker.health.load is None:
                continue
            state = self._worker_states.of(worker)
            accuracy.add_metric([worker.name], state.accuracy.ratio)
            ignored.add_metric([worker.name], float(state.accuracy.broken))
        yield accuracy
        yield ignored
        yield from self._of_feeds()

    def _of_feeds(self) -> Iterator[Family]:
        events, gaps = _counter(metrics.ROUTER_KV_EVENTS), _counter(metrics.ROUTER_KV_GAPS)
        lag, degraded = _gauge(metrics.ROUTER_KV_LAG), _gauge(metrics.ROUTER_KV_DEGRADED)
        for name, subscriber in self._feeds.subscribers.items():
            events.add_metric([name], subscriber.events)
            gaps.add_metric([name], subscriber.feed.gaps)
            lag.add_metric([name], subscriber.lag_s)
            degraded.add_metric([name], float(subscriber.state.degraded))
        yield events
        yield gaps
        yield lag
        yield degraded


def _gauge(metric: Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)


def _counter(metric: Metric) -> CounterMetricFamily:
    return CounterMetricFamily(metric.name, metric.help, labels=metric.labels)


class QueueMetrics(Collector):
    """Queued requests, their waiting times, and rejections."""

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
        for reason in metric.foreseen:
            rejects.add_metric([reason], self._queue.rejects[reason])
        yield from (depth, age, rejects)
        metric = metrics.ROUTER_DEMAND
        demand = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        for kind in metric.foreseen:
            demand.add_metric([kind], self._queue.demand[kind])
        yield demand
        for one, value in self._queue.gauges().items():
            family = _gauge(one)
            family.add_metric([], value)
            yield family


class TenantMetrics(Collector):
    """The number of tenants, and whether their file is invalid."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    def collect(self) -> Iterator[Family]:
        self._tenants.reload_if_changed()
        for metric, value in (
            (metrics.ROUTER_TENANTS, len(self._tenants)),
            (metrics.ROUTER_TENANTS_STALE, bool(self._tenants.problem)),
        ):
            yield GaugeMetricFamily(metric.name, metric.help, value=float(value))
