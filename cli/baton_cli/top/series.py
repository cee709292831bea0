"""
What one process exposes at one moment, and what follows from two such moments.

Series of the same name are added up over the labels that nobody asks for: those of a router's processes, for
example. Percentiles are read from histograms as Prometheus reads them, evenly within a bucket.
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
    """By name: labels and value."""

    @classmethod
    def parse(cls, text: str) -> Exposed:
        """Raises ValueError for what is no Prometheus text."""
        found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return cls(found)

    def total(self, metric: Metric, **labels: str) -> float | None:
        """The sum over all series with these labels; None if there is none."""
        values = [value for _, value in self._series(metric.name, labels)]
        return sum(values) if values else None

    def buckets(self, metric: Metric, **labels: str) -> dict[float, float]:
        """Of a histogram: by upper bound, how many observations were at most that."""
        found: dict[float, float] = {}
        for given, value in self._series(f"{metric.name}_bucket", labels):
            bound = float(given["le"])
            found[bound] = found.get(bound, 0.0) + value
        return found

    def _series(self, name: str, labels: Mapping[str, str]) -> Iterator[tuple[Mapping[str, str], float]]:
        for given, value in self.samples.get(name, ()):
            if all(given.get(key) == wanted for key, wanted in labels.items()):
                yield given, value


NOTHING = Exposed({})
"""Of a process that is not reached."""


def gained(before: Exposed, now: Exposed, metric: Metric, **labels: str) -> float | None:
    """
    By how much a counter has grown; None if it is not exposed.

    One that is smaller than before was started anew, and has grown from 0.
    """
    later = now.total(metric, **labels)
    if later is None:
        return None
    earlier = before.total(metric, **labels) or 0.0
    return later - earlier if later >= earlier else later


def percentiles(
    before: Exposed, now: Exposed, metric: Metric, shares: Sequence[float], **labels: str
) -> tuple[float, ...] | None:
    """What was observed between the two; None if nothing was."""
    later, earlier = now.buckets(metric, **labels), before.buckets(metric, **labels)
    if any(later.get(bound, 0.0) < count for bound, count in earlier.items()):
        earlier = {}  # started anew
    grown = {bound: count - earlier.get(bound, 0.0) for bound, count in sorted(later.items())}
    if not grown or not max(grown.values()):
        return None
    return tuple(quantile(grown, share) for share in shares)


def quantile(buckets: Mapping[float, float], share: float) -> float:
    """
    Below which `share` of the observations are; in the last bucket, its lower bound.

    >>> quantile({1.0: 10, 2.0: 20, math.inf: 20}, 0.75)
    1.5
    """
    wanted = share * max(buckets.values())
    lower, below = 0.0, 0.0
    for bound, count in sorted(buckets.items()):
        if count >= wanted:
            if math.isinf(bound) or count == below:
                return lower
            return lower + (bound - lower) * (wanted - below) / (count - below)
        lower, below = bound, count
    return lower
