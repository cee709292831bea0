"""The metrics of the operator, with the names of `baton_api.metrics`, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from baton_api import __version__, metrics
from baton_api.metrics import Metric
from baton_operator.cluster.leadership import Leadership
from baton_operator.cluster.reflector import Reflectors
from baton_operator.kinds.service_policies import Objectives
from baton_operator.manifests.objects import Manifest, Transition
from baton_operator.reconcilers.report import Status
from baton_operator.scaling.autoscaler import ScalingMetrics
from baton_operator.work_queue import WorkQueue

ROLES = ("prefill", "decode", "router")


class OperatorMetrics:
    """All metrics of the process. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.services = ServiceMetricsCollector()
        self.watches = WatchMetrics(clock)
        self.scaling = ScalingMetrics(clock)
        self.registry.register(self.scaling)
        self.registry.register(self.services)
        self.registry.register(self.watches)
        self._api = self._counter(metrics.OPERATOR_API)
        self._rollbacks = self._counter(metrics.OPERATOR_ROLLBACKS)
        spread = metrics.OPERATOR_RECONCILE
        self._reconcile = Histogram(
            spread.name, spread.help, spread.labels, registry=self.registry, buckets=spread.buckets
        )

    def answered(self, method: str, code: int) -> None:
        """Count a response of the API server; code 0 without a response."""
        self._api.labels(method, code).inc()

    def reconciled(self, kind: str, result: str, seconds: float) -> None:
        self._reconcile.labels(kind, result).observe(seconds)

    def happened(self, about: Manifest, transition: Transition) -> None:
        if transition.fact.reason == "RolledBack":
            self._rollbacks.labels(about["metadata"]["namespace"], about["metadata"]["name"]).inc()

    def watch(self, process: ProcessMetrics) -> None:
        """Add the metrics of the process."""
        self.registry.register(process)

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)


class ServiceMetricsCollector(Collector):
    """Metrics from the status and the objectives of services."""

    def __init__(self) -> None:
        self._status: dict[tuple[str, str], Status] = {}
        self._objectives: dict[tuple[str, str], Objectives] = {}

    def stands(
        self, namespace: str, name: str, status: Status | None, objectives: Objectives | None = None
    ) -> None:
        """Set status and objectives of a service; None removes them."""
        service = namespace, name
        self._status.pop(service, None)
        self._objectives.pop(service, None)
        if status is not None:
            self._status[service] = status
        if objectives is not None:
            self._objectives[service] = objectives

    def collect(self) -> Iterator[Family]:
        condition = _family(metrics.OPERATOR_CONDITION)
        desired = _family(metrics.OPERATOR_DESIRED)
        ready = _family(metrics.OPERATOR_READY)
        weight = _family(metrics.OPERATOR_WEIGHT)
        for service, status in self._status.items():
            for one in status.get("conditions", ()):
                condition.add_metric([*service, one["type"], one["status"]], 1)
            for role in ROLES:
                if replicas := status.get(role):
                    desired.add_metric([*service, role], replicas["desiredReplicas"])
                    ready.add_metric([*service, role], replicas["readyReplicas"])
            for revision in status.get("revisions", ()):
                weight.add_metric([*service, revision["name"]], revision["weight"])
        first, token = (
            _family(metrics.OPERATOR_OBJECTIVE_FIRST_TOKEN),
            _family(metrics.OPERATOR_OBJECTIVE_TOKEN),
        )
        share = _family(metrics.OPERATOR_OBJECTIVE_SHARE)
        for service, wanted in self._objectives.items():
            ttft_s, itl_s = wanted.time_to_first_token.seconds, wanted.inter_token_latency.seconds
            first.add_metric([*service, _bound(metrics.ROUTER_FIRST_BYTE, ttft_s)], ttft_s)
            token.add_metric([*service, _bound(metrics.ROUTER_OUTPUT_TOKEN, itl_s)], itl_s)
            share.add_metric(service, wanted.percentile / 100)
        yield from (condition, desired, ready, weight, first, token, share)


def _bound(metric: Metric, seconds: float) -> str:
    """
    Return the histogram bucket that an objective in seconds falls into, in Prometheus notation.

    >>> _bound(metrics.ROUTER_FIRST_BYTE, 2.0), _bound(metrics.ROUTER_FIRST_BYTE, 9999.0)
    ('2.5', '300.0')
    """
    return str(float(next((bound for bound in metric.buckets if bound >= seconds), metric.buckets[-1])))


class WatchMetrics(Collector):
    """Seconds since the last event of each kind's watch."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}

    def seen(self, resource: str) -> None:
        self._last[resource] = self._clock()

    def collect(self) -> Iterator[Family]:
        now = self._clock()
        last = _family(metrics.OPERATOR_LAST_EVENT)
        for resource, time in self._last.items():
            last.add_metric([resource], now - time)
        yield last


class ProcessMetrics(Collector):
    """Queue, Lease and cache, read at each scrape."""

    def __init__(self, queue: WorkQueue, leadership: Leadership, reflectors: Reflectors) -> None:
        self._queue = queue
        self._leadership = leadership
        self._reflectors = reflectors

    def collect(self) -> Iterator[Family]:
        for metric, value in (
            (metrics.OPERATOR_QUEUE, len(self._queue)),
            (metrics.OPERATOR_QUEUE_OLDEST, self._queue.oldest_s()),
            (metrics.OPERATOR_LEADER, float(self._leadership.holds)),
            (metrics.OPERATOR_WATCH_AGE, self._reflectors.age_s),
            (metrics.OPERATOR_UNSYNCED, len(self._reflectors.unsynced)),
        ):
            family = _family(metric)
            family.add_metric([], value)
            yield family
        build = _family(metrics.BUILD_INFO)
        build.add_metric(["operator", __version__], 1)
        yield build


def _family(metric: Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
