"""
Build PromQL queries from the metrics contract.

A query cannot name a metric, label or label value that the contract does not have, so a renamed metric
breaks the build and not a dashboard. Ratios, thresholds and comparisons are written as plain PromQL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton_api.metrics import Metric
from baton_api.request_classes import CLASSES

TARGET_LABELS = frozenset({"cluster", "namespace", "service", "role", "worker", "revision", "pod", "process"})
"""Labels of the scrape target. docs/guides/observability.md says where each comes from."""

_BACKGROUND = "|".join(name for name, row in CLASSES.items() if row.background)
IN_BACKGROUND, NOT_BACKGROUND = f"=~{_BACKGROUND}", f"!~{_BACKGROUND}"
"""Values of the label `class` for requests whose clients do not wait, and for those whose clients do."""

Aggregation = Literal["sum", "max", "min", "avg", "count"]
OverTime = Literal["avg", "max", "min", "changes", "deriv"]
Suffix = Literal["", "_count", "_sum", "_bucket"]


@dataclass(frozen=True, slots=True)
class Scope:
    """The window of rates and the label matchers that a group of queries shares."""

    window: str
    matchers: tuple[str, ...] = ()

    def series(self, metric: Metric, suffix: Suffix = "", **labels: str) -> str:
        """
        Return a selector. A value may begin with an operator (`=~`, `!~`, `!=`); `class_` means `class`.

        >>> from baton_api import metrics
        >>> Scope("5m").series(metrics.ROUTER_REQUESTS, code="=~5..", class_="batch")
        'baton_router_requests_total{code=~"5..", class="batch"}'
        """
        allowed = TARGET_LABELS | set(metric.labels) | ({"le"} if suffix == "_bucket" else set())
        values = {label.name: label.values for label in metric.by}
        matchers = list(self.matchers)
        for label, value in labels.items():
            name = label.rstrip("_")
            operator, text = (value[:2], value[2:]) if value[:2] in ("=~", "!~", "!=") else ("=", value)
            if name not in allowed:
                raise ValueError(f"{metric.name} has no label {name}")
            if values.get(name) and "$" not in text and not set(text.split("|")) <= set(values[name]):
                raise ValueError(f"{metric.name} has no {name} {text!r}. Values: {values[name]}")
            matchers.append(f'{name}{operator}"{text}"')
        return f"{metric.name}{suffix}{{{', '.join(matchers)}}}" if matchers else f"{metric.name}{suffix}"

    def gauge(self, metric: Metric, *by: str, how: Aggregation = "sum", **labels: str) -> str:
        """
        Return the current value of a gauge, aggregated.

        >>> from baton_api import metrics
        >>> Scope("5m").gauge(metrics.WORKER_RUNNING, "role", how="max")
        'max by (role) (baton_worker_requests_running)'
        """
        _check(metric, "gauge", by)
        return _aggregated(how, by, self.series(metric, "", **labels))

    def rate(self, metric: Metric, *by: str, suffix: Suffix = "", **labels: str) -> str:
        """
        Return the rate per second of a counter, or of a histogram's `_count` or `_sum`.

        >>> from baton_api import metrics
        >>> Scope("5m").rate(metrics.WORKER_GENERATION_TOKENS, "worker")
        'sum by (worker) (rate(baton_worker_generation_tokens_total[5m]))'
        """
        _check(metric, "histogram" if suffix else "counter", by)
        return _aggregated("sum", by, f"rate({self.series(metric, suffix, **labels)}[{self.window}])")

    def increase(self, metric: Metric, *by: str, suffix: Suffix = "", **labels: str) -> str:
        """Return the increase of a counter within the window."""
        _check(metric, "histogram" if suffix else "counter", by)
        return _aggregated("sum", by, f"increase({self.series(metric, suffix, **labels)}[{self.window}])")

    def over_time(
        self, how: OverTime, metric: Metric, *by: str, of: Aggregation = "sum", **labels: str
    ) -> str:
        """
        Return a function of a gauge over the window, aggregated.

        >>> from baton_api import metrics
        >>> Scope("6h").over_time("max", metrics.WORKER_QUEUED, "service")
        'sum by (service) (max_over_time(baton_worker_requests_queued[6h]))'
        """
        _check(metric, "gauge", by)
        function = how if how in ("changes", "deriv") else f"{how}_over_time"
        return _aggregated(of, by, f"{function}({self.series(metric, '', **labels)}[{self.window}])")

    def bucket_rate(self, metric: Metric, *by: str, **labels: str) -> str:
        """
        Return the rate of each bucket of a histogram.

        >>> from baton_api import metrics
        >>> Scope("5m").bucket_rate(metrics.WORKER_STEP, "worker")
        'sum by (le, worker) (rate(baton_worker_step_seconds_bucket[5m]))'
        """
        _check(metric, "histogram", by)
        buckets = f"rate({self.series(metric, '_bucket', **labels)}[{self.window}])"
        return _aggregated("sum", ("le", *by), buckets)

    def quantile(self, quantile: float, metric: Metric, *by: str, **labels: str) -> str:
        """
        Return a quantile of a histogram.

        >>> from baton_api import metrics
        >>> Scope("5m").quantile(0.9, metrics.WORKER_STEP)
        'histogram_quantile(0.9, sum by (le) (rate(baton_worker_step_seconds_bucket[5m])))'
        """
        return f"histogram_quantile({quantile:g}, {self.bucket_rate(metric, *by, **labels)})"

    def rate_below(self, metric: Metric, bound: float, *by: str, **labels: str) -> str:
        """Return the rate of observations up to `bound`, which must be a bucket of the histogram."""
        if bound not in metric.buckets:
            raise ValueError(f"{metric.name} has no bucket {bound:g}. Buckets: {metric.buckets}")
        return self.rate(metric, *by, suffix="_bucket", le=str(float(bound)), **labels)


def ratio(part: str, total: str) -> str:
    """Return a ratio that has no value, and not NaN, where the total is 0."""
    return f"{part} / ({total} > 0)"


def ratios(parts: str, total: str) -> str:
    """Return the ratio of each of several series to one total."""
    return f"({parts}) / on() group_left() ({total} > 0)"


def or_zero(expression: str, reported: str = "", **labels: str) -> str:
    """
    Return 0, with these labels for the legend, while a series does not exist yet.

    `reported`: an aggregation without labels that exists only where workers report the metric. Without it
    the metric is unknown, and there is no 0.

    >>> or_zero("errors", code="none")
    '(errors) or on() label_replace(vector(0), "code", "none", "", "")'
    >>> or_zero("errors", reported="sum(requests)")
    '(errors) or on() 0 * sum(requests)'
    """
    zero = f"0 * {reported}" if reported else "vector(0)"
    for label, value in labels.items():
        zero = f'label_replace({zero}, "{label}", "{value}", "", "")'
    return f"({expression}) or on() {zero}"


def _aggregated(how: Aggregation, by: tuple[str, ...], expression: str) -> str:
    return f"{how} by ({', '.join(by)}) ({expression})" if by else f"{how}({expression})"


def _check(metric: Metric, kind: str, by: tuple[str, ...]) -> None:
    if metric.kind != kind:
        raise ValueError(f"{metric.name} is a {metric.kind}, not a {kind}")
    unknown = set(by) - TARGET_LABELS - set(metric.labels)
    if unknown:
        raise ValueError(f"{metric.name} has no labels {sorted(unknown)}")
