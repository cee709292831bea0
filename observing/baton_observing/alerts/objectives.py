"""Alerts on objectives: the error budget of 30 days burns too fast, over a long and a short window."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from baton_observing.alerts.alert import SERVICE, Alert
from baton_observing.objectives import (
    AVAILABILITY,
    BURN_RATES,
    FAILED,
    FIRST_BYTE_LATE,
    LATENCY_BUDGET,
    MAX_LATE_RATIO,
    MIN_FAILURES,
    MIN_REQUESTS,
    REQUESTS,
    TOKENS_SLOW,
    BurnRate,
    Indicator,
)

Threshold = Callable[[float], str]
"""The comparison of an indicator with a multiple of the error budget."""

SECONDS = {"5m": 300, "30m": 1800, "1h": 3600, "6h": 21600}

OUTAGE_RATIO = 0.05
"""Pages within minutes, without waiting for the window of an hour."""


def enough_requests(window: str) -> str:
    """Return the condition that a ratio over the window means something."""
    return f"{REQUESTS.over(window)} * {SECONDS[window]} > {MIN_REQUESTS}"


def above_latency_budget(factor: float) -> str:
    """Return the comparison with the latency budget of each service's own spec."""
    return f"> on (namespace, service) clamp_max({factor:g} * {LATENCY_BUDGET.name}, {MAX_LATE_RATIO})"


def _enough_failures(window: str) -> str:
    return f"{FAILED.over(window)} * {REQUESTS.over(window)} * {SECONDS[window]} > {MIN_FAILURES}"


def _above_availability_budget(factor: float) -> str:
    return f"> {factor * AVAILABILITY.budget:.4g}"


def _burns(indicator: Indicator, burn: BurnRate, above: Threshold) -> str:
    threshold = above(burn.factor)
    return (
        f"{indicator.over(burn.long)} {threshold} and {indicator.over(burn.short)} {threshold}"
        f" and {enough_requests(burn.long)}"
    )


def _availability() -> Iterator[Alert]:
    outage = f"{FAILED.over('5m')} > {OUTAGE_RATIO} and {enough_requests('5m')} and {_enough_failures('5m')}"
    for burn in BURN_RATES:
        burns = f"{_burns(FAILED, burn, _above_availability_budget)} and {_enough_failures(burn.long)}"
        yield Alert(
            name="BatonAvailabilityBurn",
            severity=burn.severity,
            summary=f"{SERVICE}: {{{{ $value | humanizePercentage }}}} of requests failed or were cut off.",
            expression=f"({burns}) or ({outage})" if burn.severity == "page" else burns,
            duration="2m",
        )


def _latency(name: str, indicator: Indicator, what: str) -> Iterator[Alert]:
    for burn in BURN_RATES:
        yield Alert(
            name=name,
            severity=burn.severity,
            summary=f"{SERVICE}: {{{{ $value | humanizePercentage }}}} of {what} within {burn.long}. "
            f"The error budget burns {burn.factor:g} times too fast.",
            expression=_burns(indicator, burn, above_latency_budget),
            duration="2m",
        )


ALERTS = (
    *_availability(),
    *_latency("BatonTimeToFirstTokenBurn", FIRST_BYTE_LATE, "streams had a late first byte"),
    *_latency("BatonInterTokenLatencyBurn", TOKENS_SLOW, "streams were too slow per token"),
)
