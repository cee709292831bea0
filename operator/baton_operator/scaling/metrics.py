"""Metrics of the autoscaler: all inputs and all decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from baton_api import metrics
from baton_api.metrics import Metric
from baton_operator.manifests.objects import ObjectName
from baton_operator.rollout.decision import RoleName
from baton_operator.scaling.sample import RoleSample, ScalingDecision

INPUTS = ("demand", "backlog", "latency", "first_token", "utilisation", "rate", "requests", "queued", "held")


@dataclass(frozen=True, slots=True)
class RoleDecision:
    """The last decision of a role, with its inputs."""

    sample: RoleSample
    decision: ScalingDecision
    capacity: float | None


class ScalingMetrics(Collector):
    """Metrics of all scaled services. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._decided: dict[ObjectName, Mapping[RoleName, RoleDecision]] = {}
        self._measured: dict[ObjectName, float] = {}
        self._changes: Counter[tuple[ObjectName, RoleName, str]] = Counter()

    def decided(self, service: ObjectName, roles: Mapping[RoleName, RoleDecision], *, measured: bool) -> None:
        """Record the decisions of a service. `measured`: whether Prometheus answered."""
        self._decided[service] = roles
        if measured or service not in self._measured:
            self._measured[service] = self._clock()

    def changed(self, service: ObjectName, role: RoleName, direction: str) -> None:
        """Count a change of replicas; `direction` is up or down."""
        self._changes[service, role, direction] += 1

    def forget(self, service: ObjectName) -> None:
        self._decided.pop(service, None)
        self._measured.pop(service, None)

    def collect(self) -> Iterator[Family]:
        now = self._clock()
        gauges = {
            metric.name: GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for metric in GAUGES
        }

        def put(metric: Metric, value: float, *labels: str) -> None:
            gauges[metric.name].add_metric(labels, value)

        for service, since in self._measured.items():
            put(metrics.AUTOSCALER_METRICS_AGE, now - since, *service)
        for service, roles in self._decided.items():
            for role, one in roles.items():
                of_role = (*service, role)
                put(metrics.AUTOSCALER_DESIRED, one.decision.replicas, *of_role)
                put(metrics.AUTOSCALER_RECOMMENDED, one.decision.raw, *of_role)
                put(metrics.AUTOSCALER_DECIDED_BY, 1, *of_role, one.decision.reason)
                if one.decision.raw < one.decision.replicas == one.sample.replicas:
                    put(metrics.AUTOSCALER_HELD, 1, *of_role, one.decision.reason)
                if one.capacity is not None:
                    put(metrics.AUTOSCALER_CAPACITY, one.capacity, *of_role)
                for name in INPUTS:
                    reading = getattr(one.sample, name)
                    put(metrics.AUTOSCALER_UNKNOWN, float(not reading.has_value), *of_role, name)
                    if reading.value is not None:
                        put(metrics.AUTOSCALER_INPUT, reading.value, *of_role, name)
        yield from gauges.values()
        metric = metrics.AUTOSCALER_DECISIONS
        changes = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        for (service, role, direction), count in self._changes.items():
            changes.add_metric((*service, role, direction), count)
        yield changes


GAUGES = (
    metrics.AUTOSCALER_METRICS_AGE,
    metrics.AUTOSCALER_DESIRED,
    metrics.AUTOSCALER_RECOMMENDED,
    metrics.AUTOSCALER_DECIDED_BY,
    metrics.AUTOSCALER_HELD,
    metrics.AUTOSCALER_CAPACITY,
    metrics.AUTOSCALER_UNKNOWN,
    metrics.AUTOSCALER_INPUT,
)
