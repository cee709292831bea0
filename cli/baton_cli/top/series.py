"""
Parse the metrics of a process, and compute increases and percentiles between two moments.

Series of one name are summed over the labels that a query does not name, such as `process`. Percentiles are
interpolated linearly within a bucket, as in Prometheus.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from baton_api.metrics import Metric


@dataclass(frozen=True, slots=True)
class Exposed:
    """The samples of one process."""

    samples: Mapping[str, Sequence[tuple[Mapping[str, str], float]]]
    """Labels and values, by name."""

    @classmethod
    def parse(cls, text: str) -> Exposed:
        """Parse the Prometheus text format. Raises ValueError."""
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return cls(samples)

    def total(self, metric: Metric, **labels: str) -> float | None:
        """Return the sum of all series with these labels. None if the metric does not exist."""
        values = [value for _, value in self._series(metric.name, labels)]
        return sum(values) if values else None

    def buckets(self, metric: Metric, **labels: str) -> dict[float, float]:
        """Return the buckets of a histogram: upper bound and cumulative count."""
        buckets: dict[float, float] = {}
        for given, value in self._series(f"{metric.name}_bucket", labels):
            bound = float(given["le"])
            buckets[bound] = buckets.get(bound, 0.0) + value
        return buckets

    def _series(self, name: str, labels: Mapping[str, str]) -> Iterator[tuple[Mapping[str, str], float]]:
        for given, value in self.samples.get(name, ()):
            if all(given.get(key) == wanted for key, wanted in labels.items()):
                yield given, value


def gained(before: Exposed, now: Exposed, metric: Metric, **labels: str) -> float | None:
    """
    Return the increase of a counter. None if the metric does not exist.

    A counter that is smaller than before was reset, and counts from 0.
    """
    later = now.total(metric, **labels)
    if later is None:
        return None
    earlier = before.total(metric, **labels) or 0.0
    return later - earlier if later >= earlier else later


def percentiles(
    before: Exposed, now: Exposed, metric: Metric, shares: Sequence[float], **labels: str
) -> tuple[float, ...] | None:
    """Return percentiles of the observations between two moments. None without observations."""
    later, earlier = now.buckets(metric, **labels), before.buckets(metric, **labels)
    if any(later.get(bound, 0.0) < count for bound, count in earlier.items()):
        earlier = {}  # the process restarted
    grown = {bound: count - earlier.get(bound, 0.0) for bound, count in sorted(later.items())}
    if not grown or not max(grown.values()):
        return None
    return tuple(quantile(grown, share) for share in shares)


def quantile(buckets: Mapping[float, float], share: float) -> float:
    """
    Return a quantile of cumulative buckets. In the last bucket it is the lower bound.

    >>> quantile({1.0: 10, 2.0: 20, math.inf: 20}, 0.75)
    1.5
    """
    rank = share * max(buckets.values())
    lower, below = 0.0, 0.0
    for bound, count in sorted(buckets.items()):
        if count >= rank:
            if math.isinf(bound) or count == below:
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower
