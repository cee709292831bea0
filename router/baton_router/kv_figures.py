"""What is measured of the router's knowledge of caches, read off it when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from baton_api import metrics
from baton_api.metrics import Metric
from baton_router.knowledge import Knowledge
from baton_router.kv_subscriber import Feeds
from baton_router.workers import Workers


class CacheFigures(Collector):
    """The index, the feeds, and how right both were."""

    def __init__(self, workers: Workers, knowledge: Knowledge, feeds: Feeds) -> None:
        self._workers = workers
        self._knowledge = knowledge
        self._feeds = feeds

    def collect(self) -> Iterator[Family]:
        chunks = _gauge(metrics.ROUTER_INDEX_CHUNKS)
        chunks.add_metric([], len(self._knowledge))
        yield chunks
        memory = _gauge(metrics.ROUTER_INDEX_BYTES)
        memory.add_metric([], self._knowledge.bytes)
        yield memory
        parity, ignored = _gauge(metrics.ROUTER_CACHE_PARITY), _gauge(metrics.ROUTER_CACHE_IGNORED)
        for worker in self._workers.all:
            if worker.health.load is None:
                continue
            known = self._knowledge.of(worker)
            parity.add_metric([worker.name], known.parity.ratio)
            ignored.add_metric([worker.name], float(known.parity.broken))
        yield parity
        yield ignored
        yield from self._of_feeds()

    def _of_feeds(self) -> Iterator[Family]:
        events, gaps = _counter(metrics.ROUTER_KV_EVENTS), _counter(metrics.ROUTER_KV_GAPS)
        lag, degraded = _gauge(metrics.ROUTER_KV_LAG), _gauge(metrics.ROUTER_KV_DEGRADED)
        for name, follower in self._feeds.followed.items():
            events.add_metric([name], follower.events)
            gaps.add_metric([name], follower.feed.gaps)
            lag.add_metric([name], follower.lag_s)
            degraded.add_metric([name], float(follower.known.degraded))
        yield events
        yield gaps
        yield lag
        yield degraded


def _gauge(metric: Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)


def _counter(metric: Metric) -> CounterMetricFamily:
    return CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
