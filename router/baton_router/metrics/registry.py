"""
The router's metrics: counters of requests, values read at a scrape, and the text format for several
processes.

With several processes each sample has a `process` label instead of being summed. A sum would fall whenever a
process restarts, and Prometheus would count everything again.

Clients choose the model's name, so it becomes a label only after a worker was chosen for it. The number of
label values is bounded: later names count as `other`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.registry import Collector

from baton_api import __version__, metrics
from baton_api.metrics import Metric
from baton_api.metrics.counters import LabeledCounter, LabeledHistogram
from baton_api.mutual_tls import CertificateValidity
from baton_api.prompt_report import PromptReport
from baton_router.scheduling.priority_queue import LEVELS
from baton_router.scheduling.queue import Queue
from baton_router.tenants.tenants import Tenants
from baton_router.workers.kv_subscriber import KvSubscribers
from baton_router.workers.worker import WorkerStatus
from baton_router.workers.worker_list import Workers
from baton_router.workers.worker_state import WorkerStates


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
            for status in WorkerStatus:
                state.add_metric(
                    [worker.name, worker.own_name, worker.listed, status], float(status is current)
                )
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


TENANT_LABELS = 100
MODEL_LABELS = 100


class RequestCounters(Collector):
    """Belongs to one process that holds clients' connections."""

    def __init__(self) -> None:
        self._requests = LabeledCounter(metrics.ROUTER_REQUESTS)
        self._tokens = LabeledCounter(metrics.ROUTER_TENANT_TOKENS)
        self._time = LabeledHistogram(metrics.ROUTER_REQUEST_TIME)
        self._per_token = LabeledHistogram(metrics.ROUTER_OUTPUT_TOKEN)
        self._prediction = LabeledHistogram(metrics.ROUTER_PREDICTION)
        self._models = BoundedLabels(MODEL_LABELS)
        self._tenants = BoundedLabels(TENANT_LABELS)

    def ended(self, path: str, model: str | None, priority_class: str, status: int, *, granted: bool) -> None:
        """Count a request to generate. `granted`: a worker was found, so the name of the model is trusted."""
        if model is not None:
            model = self._models.label(model) if granted else self._models.existing_label(model)
        self._requests.add(path, model or "", priority_class, status)

    def refused(self, path: str, status: int) -> None:
        """Count a request whose body was not read to its end, or is invalid."""
        self._requests.add(path, OTHER, OTHER, status)

    def used(self, tenant: str, prompt: int, report: PromptReport | None, tokens: int) -> None:
        """Count the tokens of a request's prompts and choices, as the tenant is charged for them."""
        name = self._tenants.label(tenant)
        if prompt:
            self._tokens.more(prompt, name, "prompt")
        if report is not None:
            self._tokens.more(report.cached or 0, name, "cached")
        if tokens:
            self._tokens.more(tokens, name, "generated")

    def began(self, predicted_s: float, actual_s: float) -> None:
        """Compare the predicted and the actual time to the first token of a stream."""
        if actual_s > 0:
            self._prediction.observe(predicted_s / actual_s)

    def served(self, seconds: float, priority_class: str) -> None:
        """Observe the seconds from a request's arrival to its complete answer."""
        self._time.observe(seconds, priority_class)

    def streamed(self, tokens: int, seconds: float, priority_class: str) -> None:
        """Observe a complete stream of `tokens`, `seconds` after its first token."""
        if tokens > 1:
            self._per_token.observe(seconds / (tokens - 1), priority_class)

    def collect(self) -> Iterator[Family]:
        for one in (self._requests, self._tokens, self._time, self._per_token, self._prediction):
            yield from one.collect()


OTHER = "other"


class BoundedLabels:
    """Label values: the first `limit` different names; all later ones share `other`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        """Return the label of a trusted name; a new one takes a place, if there is one left."""
        names = self._names
        if name in names:
            return name
        if len(names) >= self._limit:
            return OTHER
        names.add(name)
        return name

    def existing_label(self, name: str) -> str:
        """Return the label of an untrusted name; a new one counts as `other` and takes no place."""
        return name if name in self._names else OTHER


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
        for gauge, value in self._queue.gauges().items():
            family = _gauge(gauge)
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
