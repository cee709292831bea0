"""
Queries, made of the metrics' contract: of a metric that is renamed, or loses a label, no query can be made.

What needs no metric (ratios, thresholds, comparisons) is written as it is; only names, labels and kinds go
wrong unseen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton_api.metrics import Metric

SCRAPED = frozenset({"cluster", "namespace", "service", "role", "worker", "revision", "pod", "process"})
"""Labels that Prometheus adds when it scrapes (docs/guides/observability.md)."""

Aggregation = Literal["sum", "max", "min", "avg", "count"]
Over = Literal["avg", "max", "min", "changes", "deriv"]
Part = Literal["", "_count", "_sum", "_bucket"]


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose series, and over how long."""

    window: str
    """Of rates."""
    chosen: tuple[str, ...] = ()
    """Matchers that every series is given."""

    def series(self, metric: Metric, part: Part = "", **labels: str) -> str:
        """
        A label's value is what it has to be, or begins with how it is to be compared; `class_` is `class`.

        >>> from baton_api import metrics
        >>> Scope("5m").series(metrics.ROUTER_REQUESTS, code="=~5..", class_="batch")
        'baton_router_requests_total{code=~"5..", class="batch"}'
        """
        known = SCRAPED | set(metric.labels) | ({"le"} if part == "_bucket" else set())
        values = {label.name: label.values for label in metric.by}
        matchers = list(self.chosen)
        for label, value in labels.items():
            name = label.rstrip("_")
            how, text = (value[:2], value[2:]) if value[:2] in ("=~", "!~", "!=") else ("=", value)
            if name not in known:
                raise ValueError(f"{metric.name} has no label {name}")
            if values.get(name) and "$" not in text and not set(text.split("|")) <= set(values[name]):
                raise ValueError(f"{metric.name} has no {name} {text!r}: it has {values[name]}")
            matchers.append(f'{name}{how}"{text}"')
        return f"{metric.name}{part}{{{', '.join(matchers)}}}" if matchers else f"{metric.name}{part}"

    def now(self, metric: Metric, *by: str, how: Aggregation = "sum", **labels: str) -> str:
        """
        Of a gauge.

        >>> from baton_api import metrics
        >>> Scope("5m").now(metrics.WORKER_RUNNING, "role", how="max")
        'max by (role) (baton_worker_requests_running)'
        """
        _check(metric, "gauge", by)
        return _grouped(how, by, self.series(metric, "", **labels))

    def per_second(self, metric: Metric, *by: str, part: Part = "", **labels: str) -> str:
        """
        Of a counter, or of a histogram's `_count` or `_sum`.

        >>> from baton_api import metrics
        >>> Scope("5m").per_second(metrics.WORKER_GENERATION_TOKENS, "worker")
        'sum by (worker) (rate(baton_worker_generation_tokens_total[5m]))'
        """
        _check(metric, "histogram" if part else "counter", by)
        return _grouped("sum", by, f"rate({self.series(metric, part, **labels)}[{self.window}])")

    def times(self, metric: Metric, *by: str, part: Part = "", **labels: str) -> str:
        """How often, within the window."""
        _check(metric, "histogram" if part else "counter", by)
        return _grouped("sum", by, f"increase({self.series(metric, part, **labels)}[{self.window}])")

    def over(self, how: Over, metric: Metric, *by: str, of: Aggregation = "sum", **labels: str) -> str:
        """
        Of a gauge, over the window.

        >>> from baton_api import metrics
        >>> Scope("6h").over("max", metrics.WORKER_QUEUED, "service")
        'sum by (service) (max_over_time(baton_worker_requests_queued[6h]))'
        """
        _check(metric, "gauge", by)
        function = how if how in ("changes", "deriv") else f"{how}_over_time"
        return _grouped(of, by, f"{function}({self.series(metric, '', **labels)}[{self.window}])")

    def by_bound(self, metric: Metric, *by: str, **labels: str) -> str:
        """
        Of a histogram, how many a second were at most each of its bounds.

        >>> from baton_api import metrics
        >>> Scope("5m").by_bound(metrics.WORKER_STEP, "worker")
        'sum by (le, worker) (rate(baton_worker_step_seconds_bucket[5m]))'
        """
        _check(metric, "histogram", by)
        buckets = f"rate({self.series(metric, '_bucket', **labels)}[{self.window}])"
        return _grouped("sum", ("le", *by), buckets)

    def quantile(self, share: float, metric: Metric, *by: str, **labels: str) -> str:
        """
        Of a histogram.

        >>> from baton_api import metrics
        >>> Scope("5m").quantile(0.9, metrics.WORKER_STEP)
        'histogram_quantile(0.9, sum by (le) (rate(baton_worker_step_seconds_bucket[5m])))'
        """
        return f"histogram_quantile({share:g}, {self.by_bound(metric, *by, **labels)})"

    def mean(self, metric: Metric, *by: str, **labels: str) -> str:
        """Of a histogram."""
        total = self.per_second(metric, *by, part="_sum", **labels)
        return ratio(total, self.per_second(metric, *by, part="_count", **labels))

    def within(self, metric: Metric, bound: float, *by: str, **labels: str) -> str:
        """How many a second were at most `bound`, which is one of the histogram's."""
        if bound not in metric.buckets:
            raise ValueError(f"{metric.name} has no bucket {bound:g}: it has {metric.buckets}")
        return self.per_second(metric, *by, part="_bucket", le=str(float(bound)), **labels)


def ratio(part: str, whole: str) -> str:
    """Nothing, rather than not a number, where there is nothing to be a part of."""
    return f"{part} / ({whole} > 0)"


def shares(parts: str, whole: str) -> str:
    """Of each of several parts, its ratio to one whole."""
    return f"{parts} / on() group_left() ({whole} > 0)"


def or_zero(expression: str, **labels: str) -> str:
    """
    For what is not there until it happens for the first time. `labels`: of the zero, for the legend.

    >>> or_zero("errors", code="none")
    '(errors) or on() label_replace(vector(0), "code", "none", "", "")'
    """
    zero = "vector(0)"
    for label, value in labels.items():
        zero = f'label_replace({zero}, "{label}", "{value}", "", "")'
    return f"({expression}) or on() {zero}"


def _grouped(how: Aggregation, by: tuple[str, ...], expression: str) -> str:
    return f"{how} by ({', '.join(by)}) ({expression})" if by else f"{how}({expression})"


def _check(metric: Metric, kind: str, by: tuple[str, ...]) -> None:
    if metric.kind != kind:
        raise ValueError(f"{metric.name} is no {kind} but a {metric.kind}")
    unknown = set(by) - SCRAPED - set(metric.labels)
    if unknown:
        raise ValueError(f"{metric.name} has no labels {sorted(unknown)}")
