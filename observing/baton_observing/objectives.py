"""
Service level objectives, and the recording rules that measure them.

The rules record, per service and window, the ratio of requests that missed an objective. The operator
exports the latency objectives of each service's spec; the defaults below hold where there is no operator.
Bounds are bucket bounds of the histograms: between two buckets a quantile is only an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from baton_api import metrics
from baton_api.metrics import Metric
from baton_observing.promql import NOT_BACKGROUND, Scope, ratio

BY_SERVICE = ("namespace", "service")


@dataclass(frozen=True, slots=True)
class Objective:
    """The ratio of requests that must succeed over 30 days."""

    target: float

    @property
    def budget(self) -> float:
        """The error budget: the ratio of requests that may fail."""
        return 1 - self.target


AVAILABILITY = Objective(0.999)
"""Requests that neither fail with a 5xx status nor are cut off. Client errors do not count."""

LATENCY = Objective(0.95)
"""Streams that keep the bound of the first byte, and streams that keep the bound per output token."""

FIRST_BYTE_S = 2.5
OUTPUT_TOKEN_S = 0.05


@dataclass(frozen=True, slots=True)
class BurnRate:
    """A burn rate at which an alert fires, over a long and a short window."""

    factor: float
    """The error budget of 30 days burns this many times too fast."""
    long: str
    short: str
    """Resolves the alert soon after the trouble ends."""
    severity: Literal["page", "ticket"]


BURN_RATES = (BurnRate(14.4, "1h", "5m", "page"), BurnRate(6, "6h", "30m", "ticket"))
"""2 % of the budget in one hour, 5 % in six: https://sre.google/workbook/alerting-on-slos/."""

MAX_LATE_RATIO = 0.9
"""The highest threshold of a latency alert, for objectives whose budget is very large."""

MIN_REQUESTS = 20
"""In the long window. A ratio of fewer requests means nothing."""

MIN_FAILURES = 4
"""In the long window, so that a few failures in a quiet night do not page."""

WINDOWS = tuple(sorted({window for burn in BURN_RATES for window in (burn.long, burn.short)}))


@dataclass(frozen=True, slots=True)
class RecordingRule:
    """The name and the expression of one recorded series."""

    name: str
    expression: str
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that the rule adds."""


@dataclass(frozen=True, slots=True)
class Indicator:
    """A service level indicator, recorded over each window."""

    name: str
    expression: Callable[[Scope], str]

    def over(self, window: str) -> str:
        """Return the name of the recorded series."""
        return f"baton:{self.name}_rate{window}"

    @property
    def rules(self) -> Iterator[RecordingRule]:
        return (RecordingRule(self.over(window), self.expression(Scope(window))) for window in WINDOWS)


def _failed(scope: Scope) -> str:
    total = scope.rate(metrics.ROUTER_REQUESTS, *BY_SERVICE)
    errors = scope.rate(metrics.ROUTER_REQUESTS, *BY_SERVICE, code="=~5..")
    cut = scope.rate(metrics.ROUTER_CUT, *BY_SERVICE)
    return ratio(f"(({errors} or 0 * {total}) + ({cut} or 0 * {total}))", total)


def _late(scope: Scope, metric: Metric, objective: Metric, default_bound: float) -> str:
    """Return the ratio of interactive streams beyond the bound of their service's spec, or the default."""
    bound = f'label_replace({scope.series(objective)}, "le", "$1", "bound", "(.+)")'
    rates = scope.bucket_rate(metric, *BY_SERVICE, class_=NOT_BACKGROUND)
    by_objective = f"max by (namespace, service) ({rates} and on (namespace, service, le) {bound})"
    good = (
        f"({by_objective} or {scope.rate_below(metric, default_bound, *BY_SERVICE, class_=NOT_BACKGROUND)})"
    )
    return f"1 - {ratio(good, scope.rate(metric, *BY_SERVICE, suffix='_count', class_=NOT_BACKGROUND))}"


REQUESTS = Indicator("requests", lambda scope: scope.rate(metrics.ROUTER_REQUESTS, *BY_SERVICE))
"""Requests per second."""

FAILED = Indicator("requests_failed:ratio", _failed)
"""The ratio of requests that failed with a 5xx status or were cut off."""

FIRST_BYTE_LATE = Indicator(
    "first_byte_late:ratio",
    lambda scope: _late(
        scope, metrics.ROUTER_FIRST_BYTE, metrics.OPERATOR_OBJECTIVE_FIRST_TOKEN, FIRST_BYTE_S
    ),
)
"""The ratio of interactive streams whose first byte was late."""

TOKENS_SLOW = Indicator(
    "token_slow:ratio",
    lambda scope: _late(scope, metrics.ROUTER_OUTPUT_TOKEN, metrics.OPERATOR_OBJECTIVE_TOKEN, OUTPUT_TOKEN_S),
)
"""The ratio of interactive streams whose mean time per output token was too long."""

LATENCY_BUDGET = RecordingRule(
    "baton:stream_budget:ratio",
    f"1 - {Scope('').gauge(metrics.OPERATOR_OBJECTIVE_SHARE, *BY_SERVICE, how='max')} "
    f"or 0 * {REQUESTS.over('1h')} + {LATENCY.budget:.4g}",
)
"""The ratio of streams that may be late or slow."""

INDICATORS = (REQUESTS, FAILED, FIRST_BYTE_LATE, TOKENS_SLOW)
RECORDING_RULES = (*(rule for indicator in INDICATORS for rule in indicator.rules), LATENCY_BUDGET)
"""In the order in which Prometheus must evaluate them."""
