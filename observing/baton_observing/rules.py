"""
The rule files of Prometheus: `serving.yaml` for routers and workers, `operating.yaml` for the operator.

`engines.yaml` maps the metrics of other engines to the contract. Load `operating.yaml` only where an operator
runs: without one, its alert about a missing leader fires.

Each rule records one metric of the contract, one series per worker, so the autoscaler, dashboards and alerts
need no other queries. A rule whose source is missing records nothing: the metric stays unknown.

The rules read only series of workers that Baton scrapes: they have the labels `worker` and `role`. Baton's
own aliases of these names lack the marker label of the engine. Recorded series have the label `engine`, so
that no two rules record the same series.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import yaml

from baton_api import metrics
from baton_api.metrics.engines import MAPPINGS
from baton_api.metrics.engines.mapping import EngineMapping, MappedMetric, SourceSeries
from baton_observing.alerts import OPERATING, SERVING
from baton_observing.alerts.alert import RUNBOOK_ANNOTATION, Alert
from baton_observing.objectives import RECORDING_RULES, RecordingRule
from baton_observing.promql import Suffix

TARGET = ("cluster", "namespace", "service", "role", "revision", "worker", "pod", "job", "instance")
"""Labels of the scrape target, which recorded series keep."""

PARTS: Mapping[str, tuple[Suffix, ...]] = {
    "counter": ("",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}

LENGTH_WINDOW = "5m"
"""Window of the mean prompt length."""


def rules() -> Mapping[str, tuple[RecordingRule, ...]]:
    """Return the rules by engine, in the order in which Prometheus must evaluate them."""
    return {
        mapping.engine: tuple(
            replace(rule, labels={**rule.labels, "engine": mapping.engine})
            for rule in (*_mapped(mapping), *_queued_tokens(mapping))
        )
        for mapping in MAPPINGS
    }


def _mapped(mapping: EngineMapping) -> Iterator[RecordingRule]:
    for mapped in mapping.metrics:
        for source in mapped.sources:
            yield from _of_source(mapping, mapped, source)


def _of_source(mapping: EngineMapping, mapped: MappedMetric, source: SourceSeries) -> Iterator[RecordingRule]:
    for part in PARTS[mapped.metric.kind]:
        name = mapped.metric.name + part
        if part == "_bucket" and source.bounds:
            for bound in (*source.bounds, float("inf")):
                bucket = _selected(mapping, source, part, bound=bound)
                yield RecordingRule(name, bucket, {**source.labels, "le": _bound(bound * source.factor)})
        else:
            yield RecordingRule(name, _expression(mapping, source, part), source.labels)


def _expression(mapping: EngineMapping, source: SourceSeries, part: Suffix) -> str:
    expression = _selected(mapping, source, part)
    if source.factor != 1 and part in ("", "_sum"):
        expression = f"{expression} * {source.factor:.12g}"
    for label, theirs in source.copied.items():
        copied = f'label_replace({expression}, "{label}", "$1", "{theirs}", "(.+)")'
        expression = f"{source.how} by ({', '.join((*TARGET, label))}) ({copied})"
    if source.less is None:
        return expression
    part_of_it = _selected(mapping, source.less, part)
    # Two gauges of one scrape may differ by a step.
    return f"clamp_min({expression} - {part_of_it}, 0) or {expression}"


def _selected(
    mapping: EngineMapping,
    source: SourceSeries,
    part: Suffix,
    *,
    bound: float | None = None,
    role: str = "",
    window: str = "",
) -> str:
    """
    Return an aggregation of the engine's series.

    `bound`: of this bucket only. `role`: of workers of this role only. `window`: the rate over it.
    """
    matchers = ['worker!=""', f'role="{role}"' if role else 'role=~"both|decode|prefill"']
    if mapping.marker not in source.where:
        matchers.append(f'{mapping.marker}!=""')
    for label, values in source.where.items():
        operator = "=" if len(values) == 1 else "=~"
        matchers.append(f'{label}{operator}"{"|".join(values)}"')
    labels: tuple[str, ...] = (*TARGET, *source.copied.values())
    if bound is not None:
        matchers.append(f'le=~"{_bound_pattern(bound)}"')
    elif part == "_bucket":
        labels = (*labels, "le")
    name = f"{source.name}{part}"
    if source.also:
        names = "|".join(f"{metric}{part}" for metric in (source.name, *source.also))
        name, matchers = "", [f'__name__=~"{names}"', *matchers]
    series = f"{name}{{{', '.join(matchers)}}}"
    series = f"rate({series}[{window}])" if window else series
    return f"{source.how} by ({', '.join(labels)}) ({series})"


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(float(f"{bound:.6g}"))


def _bound_pattern(bound: float) -> str:
    """Return a pattern for both spellings of a bound: 1 and 1.0."""
    if bound == float("inf"):
        return r"\\+Inf"
    text = f"{bound:.10g}".replace(".", r"\\.")
    return text if "." in text else rf"{text}(\\.0)?"


def _queued_tokens(mapping: EngineMapping) -> Iterator[RecordingRule]:
    """
    Yield the rule that estimates the prompt tokens left to compute, which no engine reports.

    For a prefill worker it is the number of queued prompts, and half of the running ones, times the mean of
    computed tokens per ended request. Without any prompt it is exactly 0. With prompts, but without an ended
    request in the window, it is unknown.
    """
    queued, running, computed, ended = (
        mapping.source(metric, source=kind)
        for metric, kind in (
            (metrics.WORKER_QUEUED, ""),
            (metrics.WORKER_RUNNING, ""),
            (metrics.WORKER_PROMPT_TOKENS, "computed"),
            (metrics.WORKER_PROMPT_LENGTH, ""),
        )
    )
    prompts = (
        f"({_selected(mapping, queued, '', role='prefill')} + "
        f"{_selected(mapping, running, '', role='prefill')} / 2)"
    )
    tokens = _selected(mapping, computed, "", role="prefill", window=LENGTH_WINDOW)
    requests = _selected(mapping, ended, "_count", role="prefill", window=LENGTH_WINDOW)
    yield RecordingRule(
        metrics.WORKER_QUEUED_TOKENS.name, f"{prompts} * ({tokens} / ({requests} > 0)) or {prompts} == 0"
    )


LINE_WIDTH = 110
HEADER = "# Generated from baton_observing by `make fix`. Do not edit.\n"

EVALUATION_INTERVAL = "30s"
"""Of the recording rules."""

ENGINE_INTERVAL = "15s"
"""Of the rules of engines: the scrape interval, so that rates lose no samples."""


def files() -> dict[str, str]:
    """Return the rule files: name and text."""
    recording = _recording("baton-recording", EVALUATION_INTERVAL, RECORDING_RULES)
    return {
        "engines.yaml": _text(
            [_recording(f"baton-{name}", ENGINE_INTERVAL, records) for name, records in rules().items()]
        ),
        "serving.yaml": _text([recording, _group("baton-serving", SERVING)]),
        "operating.yaml": _text([_group("baton-operating", OPERATING)]),
    }


def _recording(name: str, interval: str, records: Iterable[RecordingRule]) -> dict[str, Any]:
    rules = [
        {"record": rule.name, "expr": rule.expression}
        | ({"labels": dict(rule.labels)} if rule.labels else {})
        for rule in records
    ]
    return {"name": name, "interval": interval, "rules": rules}


def _group(name: str, alerts: Iterable[Alert]) -> dict[str, Any]:
    return {
        "name": name,
        "rules": [
            {
                "alert": alert.name,
                "expr": alert.expression,
                "for": alert.duration,
                "labels": {"severity": alert.severity},
                "annotations": {"summary": alert.summary, RUNBOOK_ANNOTATION: alert.runbook},
            }
            for alert in alerts
        ],
    }


def _text(groups: list[dict[str, Any]]) -> str:
    return HEADER + yaml.safe_dump({"groups": groups}, sort_keys=False, width=LINE_WIDTH)
