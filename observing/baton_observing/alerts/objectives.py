"""Objectives that are not kept: the budget of 30 days is used up too fast, over a long and a short window."""

from __future__ import annotations

from collections.abc import Iterator

from baton_observing.alerts.alert import WHICH, Alert
from baton_observing.objectives import AVAILABLE, BURNS, FLUENT, LEAST_REQUESTS, PROMPT, Objective
from baton_observing.recording import FAILED, LATE, REQUESTS, SLOW, Family

SECONDS = {"5m": 300, "30m": 1800, "1h": 3600, "6h": 21600}

MANY_FAILED = 0.05
"""A share at which nobody waits for an hour."""


def enough(window: str) -> str:
    """So many requests that a share of them says something."""
    return f"{REQUESTS.over(window)} * {SECONDS[window]} > {LEAST_REQUESTS}"


def _burns(name: str, share: Family, objective: Objective, what: str) -> Iterator[Alert]:
    for burn in BURNS:
        limit = f"{burn.times * objective.budget:.4g}"
        yield Alert(
            name=name,
            severity=burn.severity,
            summary=f"{WHICH}: {{{{ $value | humanizePercentage }}}} of {what} within {burn.long}, "
            f"{burn.times:g} times of what the objective allows.",
            expression=f"{share.over(burn.long)} > {limit} and {share.over(burn.short)} > {limit}"
            f" and {enough(burn.long)}",
            lasting="2m",
        )


ALERTS = (
    *_burns("BatonAvailabilityBurn", FAILED, AVAILABLE, "requests failed or were cut off"),
    *_burns("BatonFirstByteBurn", LATE, PROMPT, "streams began too late"),
    *_burns("BatonTokenTimeBurn", SLOW, FLUENT, "streams were too slow"),
    Alert(
        name="BatonErrors",
        severity="page",
        summary=f"{WHICH}: {{{{ $value | humanizePercentage }}}} of requests fail or are cut off.",
        expression=f"{FAILED.over('5m')} > {MANY_FAILED} and {enough('5m')}",
        lasting="2m",
    ),
)
