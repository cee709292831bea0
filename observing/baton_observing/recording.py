"""
Recording rules: shares of requests that were not well, over the windows that alerts and panels look at.

Each is per service, and is nothing where there was no request. Whether a stream was in time is judged by the
objectives of its service, if an operator tells them, and else by those of `objectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton_api import metrics
from baton_api.metrics import Metric
from baton_observing.objectives import BURNS, FIRST_TOKEN_S, STREAMS, TOKEN_S
from baton_observing.promql import Scope, ratio

BY = ("namespace", "service")

WINDOWS = tuple(sorted({window for burn in BURNS for window in (burn.long, burn.short)}))


@dataclass(frozen=True, slots=True)
class Record:
    """One rule: a name, and what is known by it."""

    name: str
    expression: str


@dataclass(frozen=True, slots=True)
class Family:
    """The same over several windows."""

    name: str
    expression: Callable[[Scope], str]

    def over(self, window: str) -> str:
        """The name of its series."""
        return f"baton:{self.name}_rate{window}"

    @property
    def records(self) -> Iterator[Record]:
        return (Record(self.over(window), self.expression(Scope(window))) for window in WINDOWS)


def _failed(scope: Scope) -> str:
    whole = scope.per_second(metrics.ROUTER_REQUESTS, *BY)
    errors = scope.per_second(metrics.ROUTER_REQUESTS, *BY, code="=~5..")
    cut = scope.per_second(metrics.ROUTER_CUT, *BY)
    return ratio(f"(({errors} or 0 * {whole}) + ({cut} or 0 * {whole}))", whole)


def _beyond(scope: Scope, metric: Metric, objective: Metric, bound: float) -> str:
    """Of streams for which somebody sits and waits; `bound` where nobody tells the service's own."""
    told = f'label_replace({scope.series(objective)}, "le", "$1", "bound", "(.+)")'
    judged = f"{scope.by_bound(metric, *BY, class_='!=batch')} and on (namespace, service, le) {told}"
    own = f"max by (namespace, service) ({judged})"
    well = f"({own} or {scope.within(metric, bound, *BY, class_='!=batch')})"
    return f"1 - {ratio(well, scope.per_second(metric, *BY, part='_count', class_='!=batch'))}"


REQUESTS = Family("requests", lambda scope: scope.per_second(metrics.ROUTER_REQUESTS, *BY))
"""How many there were a second."""

FAILED = Family("requests_failed:ratio", _failed)
"""Of requests, those that ended with an error of ours or were cut off."""

LATE = Family(
    "first_byte_late:ratio",
    lambda scope: _beyond(
        scope, metrics.ROUTER_FIRST_BYTE, metrics.OPERATOR_OBJECTIVE_FIRST_TOKEN, FIRST_TOKEN_S
    ),
)
"""Of streams outside of batches, those whose first byte came too late."""

SLOW = Family(
    "token_slow:ratio",
    lambda scope: _beyond(scope, metrics.ROUTER_OUTPUT_TOKEN, metrics.OPERATOR_OBJECTIVE_TOKEN, TOKEN_S),
)
"""Of streams outside of batches, those whose tokens came too slowly."""

BUDGET = Record(
    "baton:stream_budget:ratio",
    f"1 - {Scope('').now(metrics.OPERATOR_OBJECTIVE_SHARE, *BY, how='max')} "
    f"or 0 * {REQUESTS.over('1h')} + {STREAMS.budget:.4g}",
)
"""Of streams, those that may be late or slow."""

RECORDS = (*(record for family in (REQUESTS, FAILED, LATE, SLOW) for record in family.records), BUDGET)
"""All of them, in the order in which they are made."""
