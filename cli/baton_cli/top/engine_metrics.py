"""
The metrics of workers of other engines, under the names of the metrics contract.

It evaluates the same mapping as the recording rules, on the samples of one worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton_api.metrics.engines import MAPPINGS
from baton_api.metrics.engines.mapping import EngineMapping, SourceSeries
from baton_cli.top.series import Exposed

PARTS: Mapping[str, tuple[str, ...]] = {
    "counter": ("",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}

Labels = tuple[tuple[str, str], ...]
"""Names and values, in order."""


def in_contract(exposed: Exposed) -> Exposed:
    """
    Return the samples of a worker with those that its engine reports under other names added.

    Metrics that the engine does not report stay absent.
    """
    samples = dict(exposed.samples)
    for mapping in MAPPINGS:
        for one in mapping.metrics:
            for source in one.sources:
                for part in PARTS[one.metric.kind]:
                    name = one.metric.name + part
                    mapped = [(dict(key), value) for key, value in _values(mapping, source, part, exposed)]
                    if mapped:
                        samples[name] = [*samples.get(name, ()), *mapped]
    return Exposed(samples)


def _values(
    mapping: EngineMapping, source: SourceSeries, part: str, exposed: Exposed
) -> Iterator[tuple[Labels, float]]:
    less: Mapping[Labels, float] = {}
    if source.less is not None:
        less = _aggregated(mapping, source.less, part, exposed)
    for key, value in _aggregated(mapping, source, part, exposed).items():
        yield (*key, *source.labels.items()), max(0.0, value - less[key]) if key in less else value


def _aggregated(
    mapping: EngineMapping, source: SourceSeries, part: str, exposed: Exposed
) -> Mapping[Labels, float]:
    """Return one value for each bucket or copied label."""
    values: dict[Labels, list[float]] = {}
    where = {mapping.marker: (), **source.where}
    for name in (source.name, *source.also):
        for labels, value in exposed.samples.get(name + part, ()):
            if not all(_matches(labels.get(label, ""), wanted) for label, wanted in where.items()):
                continue
            key = tuple((label, labels.get(theirs, "")) for label, theirs in source.copied.items())
            if part == "_bucket":
                key += (("le", str(float(labels["le"]) * source.factor)),)
            values.setdefault(key, []).append(value * (source.factor if part in ("", "_sum") else 1.0))
    if source.how == "group":
        return dict.fromkeys(values, 1.0)
    return {key: max(one) if source.how == "max" else sum(one) for key, one in values.items()}


def _matches(value: str, wanted: tuple[str, ...]) -> bool:
    """Return whether a label has one of these values; without any, whether it exists."""
    return value in wanted if wanted else bool(value)
