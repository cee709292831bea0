"""The metrics of a worker without a model, by their contract. Times from token to token are modeled ones."""

from __future__ import annotations

from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from baton_api import metrics
from baton_api.metrics import Metric
from benchmarks.model_worker import ModelWorker
from benchmarks.scaling.case import BLOCK_TOKENS, BLOCKS, SLOTS


class Shown(Protocol):
    """A worker as its metrics show it."""

    model: ModelWorker
    running: int
    """Requests."""
    held: int
    """Prompts that were computed and not pulled."""


class WorkerMetrics:
    """Of one process."""

    def __init__(self, worker: Shown, scale: float) -> None:
        self._worker = worker
        self._scale = scale
        self._seen = 0
        self._registry = CollectorRegistry()
        self._generated = self._counter(metrics.WORKER_GENERATION_TOKENS)
        self._ended = self._counter(metrics.WORKER_REQUESTS).labels("length")
        self._computed = self._counter(metrics.WORKER_PROMPT_TOKENS).labels("computed")
        self._step = Histogram(metrics.WORKER_STEP.name, "x", registry=self._registry)
        token = metrics.WORKER_TOKEN
        self._token = Histogram(token.name, "x", buckets=token.buckets, registry=self._registry)
        for metric, value in (
            (metrics.WORKER_RUNNING, lambda: worker.running),
            (metrics.WORKER_RUNNING_LIMIT, lambda: SLOTS),
            (metrics.WORKER_FETCHING, lambda: 0),
            (metrics.WORKER_QUEUED, lambda: 0),
            (metrics.WORKER_HELD, lambda: worker.held),
            (metrics.WORKER_QUEUED_TOKENS, lambda: worker.model.queued_tokens),
            (metrics.WORKER_KV_USAGE, lambda: min(1.0, worker.model.context / (BLOCKS * BLOCK_TOKENS))),
        ):
            Gauge(metric.name, "x", registry=self._registry).set_function(value)

    def generated(self, tokens: int, step_s: float | None) -> None:
        """So many more tokens, each that long after the one before; None for the first."""
        self._generated.inc(tokens)
        if step_s is not None:
            for _ in range(tokens):
                self._token.observe(step_s * self._scale)

    def ended(self) -> None:
        """One more answer is whole."""
        self._ended.inc()

    def worked(self, seconds: float) -> None:
        self._step.observe(seconds)

    @property
    def text(self) -> bytes:
        """Return the text of `/metrics`."""
        model = self._worker.model
        computed = model.prompt_tokens - model.cached_tokens
        self._computed.inc(computed - self._seen)
        self._seen = computed
        return generate_latest(self._registry)

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.name, "x", metric.labels, registry=self._registry)
