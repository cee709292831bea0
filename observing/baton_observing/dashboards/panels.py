"""
The parts of a dashboard: units, queries, panels, rows, variables, annotations.

They are plain values, from which Grafana's JSON is made. Tests read them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from baton_api import metrics
from baton_api.metrics import Metric
from baton_observing.promql import Scope

Kind = Literal["timeseries", "stacked", "stat", "timeline"]
"""Lines over time, stacked areas, the latest number, or a timeline of states per series."""

CLUSTER_MATCHER = 'cluster=~"$cluster"'
"""A Prometheus of one cluster has no such label; `.*` matches that too."""
NAMESPACE_MATCHER = 'namespace=~"$namespace"'
SERVICE_MATCHER = 'service=~"$service"'

SELECTED = Scope("$__rate_interval", (CLUSTER_MATCHER, NAMESPACE_MATCHER, SERVICE_MATCHER))
"""The services that the dashboard's variables select."""

SELECTED_CLUSTER = Scope("$__rate_interval", (CLUSTER_MATCHER,))
"""Series that belong to no service."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit: the name that Grafana uses, and the one that the description shows."""

    grafana: str
    name: str


SECONDS = Unit("s", "seconds")
PERCENT = Unit("percentunit", "percent")
BYTES = Unit("bytes", "bytes")
BYTES_PER_SECOND = Unit("Bps", "bytes per second")
REQUESTS_PER_SECOND = Unit("reqps", "requests per second")


def count(noun: str) -> Unit:
    """Return the unit of a number of things."""
    return Unit("short", noun)


def per_second(noun: str) -> Unit:
    """Return the unit of a rate of things other than requests and bytes."""
    return Unit("cps", f"{noun} per second")


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, and the legend of its series."""

    expression: str
    legend: str = ""


def quantiles(
    scope: Scope, metric: Metric, levels: tuple[float, ...] = (0.5, 0.95, 0.99), **labels: str
) -> tuple[Query, ...]:
    """Return one query per quantile of a histogram."""
    return tuple(Query(scope.quantile(level, metric, **labels), f"p{level * 100:g}") for level in levels)


@dataclass(frozen=True, slots=True)
class State:
    """The text and the Grafana color of a value in a timeline."""

    value: int
    text: str
    color: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel."""

    title: str
    description: str
    """The content of the panel, its normal values, and the action for others."""
    unit: Unit
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    states: tuple[State, ...] = ()
    """Every value of a timeline."""
    width: int = 8
    """Of 24 columns."""
    threshold: float | None = None
    """Values from here on are shown as bad."""
    runbook: str = ""
    """The alert whose runbook explains the panel."""


@dataclass(frozen=True, slots=True)
class Row:
    """A titled row of panels."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A selection at the top of a dashboard: the values of a label."""

    name: str
    label: str
    query: str


@dataclass(frozen=True, slots=True)
class Annotation:
    """A mark in all panels of a dashboard, at the times when the expression has series."""

    name: str
    text: str
    """A template of the series' labels."""
    expression: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A dashboard."""

    name: str
    """Names the file and the address in Grafana."""
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]
    annotations: tuple[Annotation, ...] = ()

    @property
    def panels(self) -> Iterator[Panel]:
        return (panel for row in self.rows for panel in row.panels)


def _label_values(label: str, title: str, scope: Scope, metric: Metric) -> Variable:
    return Variable(label, title, f"label_values({scope.series(metric)}, {label})")


_IN_CLUSTER = Scope("", (CLUSTER_MATCHER,))
_IN_NAMESPACE = Scope("", (CLUSTER_MATCHER, NAMESPACE_MATCHER))

CLUSTER = _label_values("cluster", "Cluster", Scope(""), metrics.BUILD_INFO)
NAMESPACE = _label_values("namespace", "Namespace", _IN_CLUSTER, metrics.ROUTER_IN_FLIGHT)
SERVICE = _label_values("service", "Service", _IN_NAMESPACE, metrics.ROUTER_IN_FLIGHT)
MODEL = _label_values("model", "Model", SELECTED, metrics.ROUTER_REQUESTS)
TENANT = _label_values("tenant", "Tenant", SELECTED, metrics.ROUTER_TENANT_TOKENS)
ROLE = _label_values("role", "Role", SELECTED, metrics.WORKER_RUNNING)
WORKER = _label_values("worker", "Worker", SELECTED, metrics.WORKER_RUNNING)

_BY_REVISION = ("namespace", "service", "revision")
_WEIGHT = SELECTED.series(metrics.OPERATOR_WEIGHT)
_SERVES = f"{SELECTED.gauge(metrics.OPERATOR_WEIGHT, *_BY_REVISION, how='max')} > 0"
_SERVED_BEFORE = f"max by ({', '.join(_BY_REVISION)}) ({_WEIGHT} offset 5m) > 0"

ROLLOUTS = Annotation(
    "Rollout",
    "{{service}}: revision {{revision}}",
    f"({_SERVES} unless {_SERVED_BEFORE}) and on (namespace, service) {_SERVED_BEFORE}",
)
"""The first five minutes of a revision with requests. The first revision of a service does not count."""
