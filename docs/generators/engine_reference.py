"""The section of `metrics.md` about other engines: their series for each worker metric."""

from __future__ import annotations

from collections.abc import Iterator

from baton_api import metrics
from baton_api.metrics import Metric
from baton_api.metrics.engines import MAPPINGS
from baton_api.metrics.engines.mapping import EngineMapping, MappedMetric, SourceSeries

HEAD = """\
## Workers of other engines

The recording rules in `charts/baton/rules/engines.yaml` map the metrics of these engines to the names above,
one series per worker. *unknown*: the engine does not report the metric, so it stays absent and is never 0.
Buckets are those of the engine.
"""

ESTIMATES = {
    metrics.WORKER_QUEUED_TOKENS.name: "estimated for prefill workers: queued prompts, and half of the "
    "running ones, times the mean of computed tokens per ended request"
}
"""Metrics that rules derive from several series."""


def engines_section() -> Iterator[str]:
    """Yield the lines of the section."""
    yield HEAD
    for mapping in MAPPINGS:
        yield f"### {mapping.title}\n"
        yield f"Read from {mapping.title} {mapping.version}.\n"
        yield from (f"{note}\n" for note in mapping.notes)
        yield f"| metric | {mapping.title} | difference |"
        yield "|---|---|---|"
        for metric in metrics.CONTRACT:
            if metric.name.startswith("baton_worker_"):
                yield _row(mapping, metric)
        yield ""


def _row(mapping: EngineMapping, metric: Metric) -> str:
    mapped = mapping.of(metric)
    if mapped is not None:
        return f"| `{metric.name}` | {_sources(mapped)} | {mapped.note} |"
    estimate = ESTIMATES.get(metric.name, "*unknown*")
    return f"| `{metric.name}` | {estimate} | |"


def _sources(mapped: MappedMetric) -> str:
    return "; ".join(
        _labels(source)
        + " + ".join((_series(source), *(f"`{name}`" for name in source.also)))
        + (f" - {_series(source.less)}" if source.less else "")
        for source in mapped.sources
    )


def _labels(source: SourceSeries) -> str:
    return "".join(f"{label} `{value}`: " for label, value in source.labels.items())


def _series(source: SourceSeries) -> str:
    # A bar would end the cell.
    where = ", ".join(
        f'{label}="{" or ".join(values)}"' for label, values in source.where.items() if any(values)
    )
    factor = f" * {source.factor:g}" if source.factor != 1 else ""
    return f"`{source.name}{{{where}}}`{factor}" if where else f"`{source.name}`{factor}"
