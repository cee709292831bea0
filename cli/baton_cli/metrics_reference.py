"""The page of metrics, written from the contract that all processes are built from."""

from __future__ import annotations

from collections.abc import Iterator

from baton_api import metrics
from baton_api.metrics import Label, Metric

METRICS = """\
# Metrics

Written by `make fix` from `baton_api.metrics`; change the contract there.

All are at `GET /metrics`, of workers and routers at the port of their API and of the operator at that of its
health, without a key. Times are in seconds. A router of several processes adds the label `process` to each
series. [Observability](../guides/observability.md) says what to look at first.
"""

PARTS = {
    "Every process": "baton_build_",
    "Workers": "baton_worker_",
    "Routers": "baton_router_",
    "Batches, at the router": "baton_batch",
    "The operator": "baton_operator_",
    "The autoscaler, at the operator": "baton_autoscaler_",
}
"""Headings, and how the names of their metrics begin."""


def metrics_page() -> str:
    parts = (line for title, begins in PARTS.items() for line in _part(title, begins))
    return "\n".join([METRICS, *parts])


def _part(title: str, begins: str) -> Iterator[str]:
    yield f"## {title}\n"
    for metric in metrics.CONTRACT:
        if metric.name.startswith(begins):
            yield from _entry(metric)


def _entry(metric: Metric) -> Iterator[str]:
    yield f"### `{metric.name}`\n"
    yield f"{metric.help}\n"
    yield f"A {metric.kind}, in {metric.unit}.\n" if metric.unit != "yes or no" else "A gauge, 0 or 1.\n"
    for label in metric.by:
        yield f"- `{label.name}`: {_values(label)}."
    if metric.by:
        yield ""
    if metric.buckets:
        yield f"Buckets: {', '.join(f'{bound:.10g}' for bound in metric.buckets)}.\n"


def _values(label: Label) -> str:
    return ", ".join(f"`{value}`" for value in label.values) or label.bound
