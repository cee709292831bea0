"""
Counters of requests: outcomes, models, and the usage of tenants.

Clients choose the model's name, so it becomes a label only after a worker was chosen for it. The number of
label values is bounded: later names count as `other`.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from baton_api import metrics
from baton_api.metrics.counters import LabeledCounter, LabeledHistogram
from baton_api.prompt_report import PromptReport

TENANT_LABELS = 100
MODEL_LABELS = 100


class RequestCounters(Collector):
    """Belongs to one process that holds clients' connections."""

    def __init__(self) -> None:
        self._requests = LabeledCounter(metrics.ROUTER_REQUESTS)
        self._tokens = LabeledCounter(metrics.ROUTER_TENANT_TOKENS)
        self._time = LabeledHistogram(metrics.ROUTER_REQUEST_TIME)
        self._per_token = LabeledHistogram(metrics.ROUTER_OUTPUT_TOKEN)
        self._prediction = LabeledHistogram(metrics.ROUTER_PREDICTION)
        self._models = BoundedLabels(MODEL_LABELS)
        self._tenants = BoundedLabels(TENANT_LABELS)

    def ended(self, path: str, model: str | None, priority_class: str, status: int, *, granted: bool) -> None:
        """Count a request to generate. `granted`: a worker was found, so the name of the model is trusted."""
        if model is not None:
            model = self._models.label(model) if granted else self._models.existing_label(model)
        self._requests.add(path, model or "", priority_class, status)

    def refused(self, path: str, status: int) -> None:
        """Count a request whose body was not read to its end, or is invalid."""
        self._requests.add(path, OTHER, OTHER, status)

    def used(self, tenant: str, prompt: int, report: PromptReport | None, tokens: int) -> None:
        """Count the tokens of a request's prompts and choices, as the tenant is charged for them."""
        name = self._tenants.label(tenant)
        if prompt:
            self._tokens.more(prompt, name, "prompt")
        if report is not None:
            self._tokens.more(report.cached or 0, name, "cached")
        if tokens:
            self._tokens.more(tokens, name, "generated")

    def began(self, predicted_s: float, actual_s: float) -> None:
        """Compare the predicted and the actual time to the first token of a stream."""
        if actual_s > 0:
            self._prediction.observe(predicted_s / actual_s)

    def served(self, seconds: float, priority_class: str) -> None:
        """Observe the seconds from a request's arrival to its complete answer."""
        self._time.observe(seconds, priority_class)

    def streamed(self, tokens: int, seconds: float, priority_class: str) -> None:
        """Observe a complete stream of `tokens`, `seconds` after its first token."""
        if tokens > 1:
            self._per_token.observe(seconds / (tokens - 1), priority_class)

    def collect(self) -> Iterator[Family]:
        for one in (self._requests, self._tokens, self._time, self._per_token, self._prediction):
            yield from one.collect()


OTHER = "other"


class BoundedLabels:
    """Label values: the first `limit` different names; all later ones share `other`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        """Return the label of a trusted name; a new one takes a place, if there is one left."""
        names = self._names
        if name in names:
            return name
        if len(names) >= self._limit:
            return OTHER
        names.add(name)
        return name

    def existing_label(self, name: str) -> str:
        """Return the label of an untrusted name; a new one counts as `other` and takes no place."""
        return name if name in self._names else OTHER
