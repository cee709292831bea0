"""
The router's metrics registry, under the names of `baton_api.metrics`, and the text format for several
processes.

With several processes each sample has a `process` label instead of being summed. A sum would fall whenever a
process restarts, and Prometheus would count everything again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.registry import Collector

from baton_api import __version__, metrics
from baton_api.metrics import Metric
from baton_api.metrics.counters import LabeledHistogram
from baton_api.mutual_tls import CertificateValidity
from baton_router.metrics.request_counters import RequestCounters
from baton_router.workers.worker import Workers, WorkerStatus


class RouterMetrics:
    """The counters that requests move."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.counters = RequestCounters()
        """Of whole requests."""
        self.lag = LoopLag()
        self.response_store_errors = self.counter(metrics.ROUTER_RESPONSE_STORE_ERRORS)
        self.scheduler_unavailable = self.counter(metrics.ROUTER_SCHEDULER_UNAVAILABLE)
        self.in_flight = 0
        """Requests that are being served."""
        self.overhead = LabeledHistogram(metrics.ROUTER_OVERHEAD)
        self.first_byte = LabeledHistogram(metrics.ROUTER_FIRST_BYTE)
        for collector in (self.counters, self.lag, self.overhead, self.first_byte):
            self.registry.register(collector)
        self.gauge(metrics.ROUTER_IN_FLIGHT, lambda: self.in_flight)
        self.registry.register(BuildInfo())

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def gauge(self, metric: Metric, value: Callable[[], int]) -> None:
        """Export the result of `value` at each scrape."""
        Gauge(*_text(metric), registry=self.registry).set_function(value)

    def counter(self, metric: Metric) -> Counter:
        """Export a counter, which its owner increments: once for each metric."""
        counter = Counter(*_text(metric), metric.labels, registry=self.registry)
        for value in metric.foreseen:
            counter.labels(value)
        return counter


class BuildInfo(Collector):
    """The version of this router."""

    def collect(self) -> Iterator[PrometheusMetric]:
        family = _family(metrics.BUILD_INFO)
        family.add_metric(["router", __version__], 1)
        yield family


class CertificateMetrics(Collector):
    """The expiry of the certificate that this router presents to workers."""

    def __init__(self, term: Callable[[], CertificateValidity | None]) -> None:
        self._term = term

    def collect(self) -> Iterator[PrometheusMetric]:
        end, life = _family(metrics.ROUTER_CERTIFICATE_END), _family(metrics.ROUTER_CERTIFICATE_LIFE)
        if (term := self._term()) is not None:
            end.add_metric([], term.end)
            life.add_metric([], term.end - term.begin)
        yield from (end, life)


class WorkerStatusMetrics(Collector):
    """States and running requests of workers, read at each scrape."""

    def __init__(self, workers: Workers, clock: Callable[[], float]) -> None:
        self._workers = workers
        self._clock = clock

    def collect(self) -> Iterator[PrometheusMetric]:
        now = self._clock()
        state = _family(metrics.ROUTER_WORKER_STATE)
        in_flight = _family(metrics.ROUTER_WORKER_IN_FLIGHT)
        for worker in self._workers.all:
            current = worker.state(now)
            in_flight.add_metric([worker.name, worker.own_name, worker.listed], worker.in_flight)
            for one in WorkerStatus:
                state.add_metric([worker.name, worker.own_name, worker.listed, one], float(one is current))
        yield state
        yield in_flight


def _text(metric: Metric) -> tuple[str, str]:
    return metric.name, metric.help


def _family(metric: Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)


LAG_INTERVAL_S = 0.1
"""Seconds between two measurements: the event loop cannot stand still for longer unnoticed."""


class LoopLag(Collector):
    """Delay of the event loop, measured while `watch` runs."""

    def __init__(self) -> None:
        self._lag = LabeledHistogram(metrics.ROUTER_LOOP_LAG)

    async def watch(self) -> None:
        """Measure until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._lag.observe(max(0.0, clock() - due))

    def collect(self) -> Iterator[PrometheusMetric]:
        yield from self._lag.collect()


PROCESS_LABEL = "process"
"""Label of each sample, with several processes."""


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """The samples of one metric, as one process sends them to another."""

    name: str
    help: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


def export_families(registry: CollectorRegistry) -> list[MetricFamily]:
    """The metrics of a process."""
    return [
        MetricFamily(
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, dict(sample.labels), sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def merged_text(processes: Mapping[str, Sequence[MetricFamily]]) -> bytes:
    """The metrics of all processes, by their names, in Prometheus' text format."""
    page = CollectorRegistry()
    page.register(_MergedCollector(processes))
    return generate_latest(page)


class _MergedCollector(Collector):
    def __init__(self, processes: Mapping[str, Sequence[MetricFamily]]) -> None:
        self._processes = processes

    def describe(self) -> Iterable[PrometheusMetric]:
        return ()

    def collect(self) -> Iterator[PrometheusMetric]:
        merged: dict[str, PrometheusMetric] = {}
        for process, families in self._processes.items():
            for family in families:
                metric = merged.get(family.name)
                if metric is None:
                    metric = merged[family.name] = PrometheusMetric(family.name, family.help, family.kind)
                for name, labels, value in family.samples:
                    metric.add_sample(name, {**labels, PROCESS_LABEL: process}, value)
        yield from merged.values()
