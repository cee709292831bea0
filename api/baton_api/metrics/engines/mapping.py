"""
How series of an engine become a metric of the contract.

An entry sums the engine's series over its own labels, such as ranks, so one series per worker remains. It is
data, because PromQL and Python both evaluate it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from baton_api.metrics.metric import Metric


@dataclass(frozen=True, slots=True)
class SourceSeries:
    """Series of an engine that yield one series of a metric, or one per bucket of a histogram."""

    name: str
    """As in the text format. Of a histogram without `_bucket`, `_sum` or `_count`."""
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Accepted values of the engine's labels."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the contract, with the values that these series stand for. A missing one is unknown."""
    copied: Mapping[str, str] = field(default_factory=dict)
    """Labels of the contract, and the engine's labels that their values come from."""
    also: tuple[str, ...] = ()
    """Further metrics to add, if they exist, with the same `where`."""
    less: SourceSeries | None = None
    """Series to subtract, if they exist."""
    how: Literal["sum", "max", "group"] = "sum"
    """Aggregation over the engine's labels. `group` yields 1."""
    factor: float = 1.0
    """Multiplied with the values, and with the bounds of buckets, for another unit."""
    bounds: tuple[float, ...] = ()
    """Bounds of the engine's buckets. Required if `factor` changes them."""


@dataclass(frozen=True, slots=True)
class MappedMetric:
    """A metric of the contract, and where an engine reports it."""

    metric: Metric
    sources: tuple[SourceSeries, ...]
    note: str = ""
    """How the meaning differs from the contract. Empty: it does not."""


@dataclass(frozen=True, slots=True)
class EngineMapping:
    """The mapping of one engine."""

    engine: str
    """Such as `vllm`, as in `EngineKind`."""
    title: str
    version: str
    """The version whose metrics were read."""
    marker: str
    """A label that the engine's series have and Baton's aliases of them lack."""
    metrics: tuple[MappedMetric, ...]
    notes: tuple[str, ...] = ()

    def of(self, metric: Metric) -> MappedMetric | None:
        """Return the entry of a metric. None if the engine does not report it."""
        return next((mapped for mapped in self.metrics if mapped.metric.name == metric.name), None)

    def source(self, metric: Metric, **labels: str) -> SourceSeries:
        """
        Return the series of a metric with these labels; an empty value matches any. Raises ValueError.
        """
        mapped = self.of(metric)
        for source in mapped.sources if mapped else ():
            if all(value in ("", source.labels.get(label)) for label, value in labels.items()):
                return source
        raise ValueError(f"{self.title} does not report {metric.name} with {labels}")

    @property
    def names(self) -> Iterator[str]:
        """Names of the engine's metrics that the mapping reads."""
        for mapped in self.metrics:
            for source in mapped.sources:
                yield from (source.name, *source.also)
                if source.less is not None:
                    yield source.less.name
