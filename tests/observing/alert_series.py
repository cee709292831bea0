"""
Build promtool's input series for the alert tests: one value per minute, for one service.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton_api import metrics
from baton_api.metrics import Metric
from baton_observing.promql import Scope, Suffix

MINUTES = 370
HOUR = 60

Series = dict[str, str]

SERVICE: dict[str, Any] = {"namespace": "models", "service": "chat"}
DECODE: dict[str, Any] = {**SERVICE, "role": "decode", "worker": "decode-0"}
BOTH: dict[str, Any] = {**SERVICE, "role": "both", "worker": "both-0"}
PREFILL: dict[str, Any] = {**SERVICE, "role": "prefill", "worker": "prefill-0"}


@dataclass(frozen=True, slots=True)
class Case:
    """Series under which an alert fires, and similar series under which it stays silent."""

    name: str
    severity: str
    fires: Series
    silent: Series
    at: int = 30
    """The minute at which both are evaluated."""


def constant(metric: Metric, value: float, **labels: str) -> Series:
    """Return a gauge that keeps its value."""
    return {Scope("").series(metric, "", **labels): f"{value:g}+0x{MINUTES}"}


def counter(metric: Metric, per_minute: float, suffix: Suffix = "", **labels: str) -> Series:
    """Return a counter that rises steadily."""
    return {Scope("").series(metric, suffix, **labels): f"0+{per_minute:g}x{MINUTES}"}


def stopped_counter(metric: Metric, per_minute: float, until: int, **labels: str) -> Series:
    """Return a counter that rises until a minute and then keeps its value."""
    total = per_minute * until
    values = f"0+{per_minute:g}x{until} {total:g}+0x{MINUTES - until}"
    return {Scope("").series(metric, "", **labels): values}


def responses(code: int, per_minute: float | str) -> Series:
    """Return requests that end with an HTTP status, as a rate or as the values of the counter."""
    labels: dict[str, Any] = {
        **SERVICE,
        "path": "/v1/completions",
        "model": "m",
        "class": "default",
        "code": str(code),
    }
    if isinstance(per_minute, str):
        return {Scope("").series(metrics.ROUTER_REQUESTS, **labels): per_minute}
    return counter(metrics.ROUTER_REQUESTS, per_minute, **labels)


def streams(metric: Metric, bound: float, good: float, total: float, class_: str = "default") -> Series:
    """Return streams per minute, and how many of them kept the bound."""
    labels: dict[str, Any] = {**SERVICE, "class": class_}
    return {
        **counter(metric, good, "_bucket", le=str(bound), **labels),
        **counter(metric, total, "_count", **labels),
    }


def condition(type_: str, status: str) -> Series:
    return constant(metrics.OPERATOR_CONDITION, 1, **SERVICE, type=type_, status=status)


def replicas(role: str, wanted: float | str, ready: str) -> Series:
    labels: dict[str, Any] = {**SERVICE, "role": role}
    return {
        Scope("").series(metrics.OPERATOR_DESIRED, **labels): (
            wanted if isinstance(wanted, str) else f"{wanted:g}+0x{MINUTES}"
        ),
        Scope("").series(metrics.OPERATOR_READY, **labels): ready,
    }


def token_latency(worker: str, per_minute: float, bound: str) -> Series:
    """Return the tokens of a worker, all in one bucket."""
    labels: dict[str, Any] = {**SERVICE, "role": "decode", "worker": worker}
    buckets = ("0.005", "0.01", "0.025", "0.05", "0.1", "+Inf")
    series: Series = {}
    for one in buckets:
        within = one == "+Inf" or float(one) >= float(bound)
        series |= counter(metrics.WORKER_TOKEN, per_minute if within else 0, "_bucket", le=one, **labels)
    return series


def workers(**bounds: str) -> Series:
    """Return workers whose tokens all fall into one bucket each."""
    series: Series = {}
    for worker, bound in bounds.items():
        series |= token_latency(worker, 60, bound)
    return series


FIRST_BYTE = (metrics.ROUTER_FIRST_BYTE, 2.5)
OUTPUT_TOKEN = (metrics.ROUTER_OUTPUT_TOKEN, 0.05)
ENOUGH_REQUESTS = responses(200, 60)
LOST = "1+0x5 0+0x400"
"""Replicas that were ready and are no longer."""
NEVER_READY = "0+0x400"
