"""Objectives that are not kept: the budget of 30 days is used up too fast, over a long and a short window."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from baton_observing.alerts.alert import WHICH, Alert
from baton_observing.objectives import AVAILABLE, BURNS, LEAST_FAILURES, LEAST_REQUESTS, MOST, Objective
from baton_observing.recording import BUDGET, FAILED, LATE, REQUESTS, SLOW, Family

Limit = Callable[[float], str]
"""How a share is compared with so many times what may go wrong."""

SECONDS = {"5m": 300, "30m": 1800, "1h": 3600, "6h": 21600}

MANY_FAILED = 0.05
"""A share at which nobody waits for an hour."""


def enough(window: str) -> str:
    """So many requests that a share of them says something."""
    return f"{REQUESTS.over(window)} * {SECONDS[window]} > {LEAST_REQUESTS}"


def several(window: str) -> str:
    """More failures than chance has on a service that few use."""
    return f"{FAILED.over(window)} * {REQUESTS.over(window)} * {SECONDS[window]} > {LEAST_FAILURES}"


def within(objective: Objective) -> Limit:
    """The same of all services."""
    return lambda times: f"> {times * objective.budget:.4g}"


def within_its_own(times: float) -> str:
    """As each service's spec says."""
    return f"> on (namespace, service) clamp_max({times:g} * {BUDGET.name}, {MOST})"


def _burns(name: str, share: Family, limited: Limit, what: str) -> Iterator[Alert]:
    for burn in BURNS:
        limit = limited(burn.times)
        yield Alert(
            name=name,
            severity=burn.severity,
            summary=f"{WHICH}: {{{{ $value | humanizePercentage }}}} of {what} within {burn.long}, "
            f"{burn.times:g} times of what the objective allows.",
            expression=f"{share.over(burn.long)} {limit} and {share.over(burn.short)} {limit}"
            f" and {enough(burn.long)}{f' and {several(burn.long)}' if share is FAILED else ''}",
            lasting="2m",
        )


ALERTS = (
    *_burns("BatonAvailabilityBurn", FAILED, within(AVAILABLE), "requests failed or were cut off"),
    *_burns("BatonFirstByteBurn", LATE, within_its_own, "streams began too late"),
    *_burns("BatonTokenTimeBurn", SLOW, within_its_own, "streams were too slow"),
    Alert(
        name="BatonErrors",
        severity="page",
        summary=f"{WHICH}: {{{{ $value | humanizePercentage }}}} of requests fail or are cut off.",
        expression=f"{FAILED.over('5m')} > {MANY_FAILED} and {enough('5m')} and {several('5m')}",
        lasting="2m",
    ),
)
