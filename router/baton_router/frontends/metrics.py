"""
The figures of several processes on one page: each sample says which process it is of.

Sums would go down whenever a front is started anew, and a counter that goes down counts all again; a
series of its own for each process restarts by itself, which Prometheus knows how to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from baton_router.frontends.link import Family

PROCESS = "process"
"""The label."""


def measured(registry: CollectorRegistry) -> list[Family]:
    """All that a process has counted."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, dict(sample.labels), sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def text(processes: Mapping[str, Sequence[Family]]) -> bytes:
    """One page of all processes, by name, in Prometheus' text format."""
    page = CollectorRegistry()
    page.register(_Merged(processes))
    return generate_latest(page)


class _Merged(Collector):
    def __init__(self, processes: Mapping[str, Sequence[Family]]) -> None:
        self._processes = processes

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for process, families in self._processes.items():
            for family in families:
                metric = merged.get(family.name)
                if metric is None:
                    metric = merged[family.name] = Metric(family.name, family.help, family.kind)
                for name, labels, value in family.samples:
                    metric.add_sample(name, {**labels, PROCESS: process}, value)
        yield from merged.values()
