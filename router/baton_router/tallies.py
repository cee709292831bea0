"""
What every request counts, as plain numbers that become Prometheus' figures when somebody asks for them.

prometheus-client takes a lock for each step of each figure, and walks through a histogram's buckets: that is
a tenth of all that a request costs here. A process counts on one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from baton_api.metrics import Metric


class Tally(Collector):
    """A counter by the values of its labels."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._counts: dict[tuple[str | int, ...], int] = {}

    def add(self, *labels: str | int) -> None:
        self._counts[labels] = self._counts.get(labels, 0) + 1

    def more(self, amount: int, *labels: str | int) -> None:
        """Count several at once."""
        self._counts[labels] = self._counts.get(labels, 0) + amount

    def collect(self) -> Iterator[Family]:
        family = CounterMetricFamily(self._metric.name, self._metric.help, labels=self._metric.labels)
        for labels, count in self._counts.items():
            family.add_metric([str(label) for label in labels], count)
        yield family


class Spread(Collector):
    """A histogram without labels."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._bounds = metric.buckets
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Family]:
        bounds = [str(float(bound)) for bound in self._bounds] + ["+Inf"]
        family = HistogramMetricFamily(self._metric.name, self._metric.help)
        family.add_metric([], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family
