"""
Series as Prometheus would have them, in words: what rises, what stays, and who is meant.

Everything is told by the minute, of one service; a number of minutes says when it is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton_api import metrics
from baton_api.metrics import Metric
from baton_observing.promql import Part, Scope

MINUTES = 370
HOUR = 60

Series = dict[str, str]

OF: dict[str, Any] = {"namespace": "models", "service": "chat"}
DECODE: dict[str, Any] = {**OF, "role": "decode", "worker": "decode-0"}
BOTH: dict[str, Any] = {**OF, "role": "both", "worker": "both-0"}
PREFILL: dict[str, Any] = {**OF, "role": "prefill", "worker": "prefill-0"}


@dataclass(frozen=True, slots=True)
class Case:
    """One alert. An alert has a case for each way in which it once was wrong."""

    name: str
    severity: str
    fires: Series
    silent: Series
    at: int = 30


def level(metric: Metric, value: float, **labels: str) -> Series:
    """A gauge that stays what it is."""
    return {Scope("").series(metric, "", **labels): f"{value:g}+0x{MINUTES}"}


def rise(metric: Metric, a_minute: float, part: Part = "", **labels: str) -> Series:
    """A counter."""
    return {Scope("").series(metric, part, **labels): f"0+{a_minute:g}x{MINUTES}"}


def once(metric: Metric, a_minute: float, until: int, **labels: str) -> Series:
    """A counter that moves for some minutes only."""
    most = a_minute * until
    return {Scope("").series(metric, "", **labels): f"0+{a_minute:g}x{until} {most:g}+0x{MINUTES - until}"}


def answered(code: int, a_minute: float) -> Series:
    labels: dict[str, Any] = {
        **OF,
        "path": "/v1/completions",
        "model": "m",
        "class": "default",
        "code": str(code),
    }
    return rise(metrics.ROUTER_REQUESTS, a_minute, **labels)


def streams(metric: Metric, bound: float, well: float, all_: float, class_: str = "default") -> Series:
    """So many a minute, of which so many were within the bound."""
    labels: dict[str, Any] = {**OF, "class": class_}
    return {
        **rise(metric, well, "_bucket", le=str(bound), **labels),
        **rise(metric, all_, "_count", **labels),
    }


def condition(type_: str, status: str) -> Series:
    return level(metrics.OPERATOR_CONDITION, 1, **OF, type=type_, status=status)


def replicas(role: str, wanted: float | str, ready: str) -> Series:
    labels: dict[str, Any] = {**OF, "role": role}
    return {
        Scope("").series(metrics.OPERATOR_DESIRED, **labels): (
            wanted if isinstance(wanted, str) else f"{wanted:g}+0x{MINUTES}"
        ),
        Scope("").series(metrics.OPERATOR_READY, **labels): ready,
    }


def took(worker: str, a_minute: float, bound: str) -> Series:
    """Tokens of a worker, all in one bucket."""
    labels: dict[str, Any] = {**OF, "role": "decode", "worker": worker}
    buckets = ("0.005", "0.01", "0.025", "0.05", "0.1", "+Inf")
    found: Series = {}
    for one in buckets:
        there = one == "+Inf" or float(one) >= float(bound)
        found |= rise(metrics.WORKER_TOKEN, a_minute if there else 0, "_bucket", le=one, **labels)
    return found


def workers(**bounds: str) -> Series:
    found: Series = {}
    for worker, bound in bounds.items():
        found |= took(worker, 60, bound)
    return found


BYTE = (metrics.ROUTER_FIRST_BYTE, 2.5)
TOKEN = (metrics.ROUTER_OUTPUT_TOKEN, 0.05)
ENOUGH = answered(200, 60)
CAME = "1+0x5 0+0x400"
"""Replicas that were ready and are no more."""
NEVER = "0+0x400"
