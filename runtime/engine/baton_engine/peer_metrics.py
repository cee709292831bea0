"""A worker's figures once more, under the names of others: made of its own when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from baton_api.metrics import Metric
from baton_api.metrics.peers import MODEL, PEER_NAMES, Peer, PeerName


class PeerMetrics(Collector):
    """What `registry` shows, as dashboards of `peers` look for it."""

    def __init__(self, registry: CollectorRegistry, peers: Sequence[Peer], model: str) -> None:
        self._registry = registry
        self._names = [name for peer in peers for name in PEER_NAMES[peer]]
        self._model = model

    def collect(self) -> Iterator[Family]:
        families = {family.name: family for family in self._registry.collect()}
        for name in self._names:
            yield self._shown(name, families)

    def _shown(self, name: PeerName, families: dict[str, Family]) -> Family:
        metric = name.metric
        kind = metric.kind if name.over is None else "gauge"
        shown = Family(name.name.removesuffix("_total"), metric.help, kind)
        if name.over is not None:
            whole = _total(families, name.over)
            shown.add_sample(
                name.name, {MODEL: self._model}, _total(families, metric) / whole if whole else 0.0
            )
            return shown
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in families[_family(metric)].samples:
            suffix = sample.name.removeprefix(_family(metric))
            if suffix == "_created":
                continue
            kept = {name.labels[key]: value for key, value in sample.labels.items() if key in name.labels}
            if "le" in sample.labels:
                kept["le"] = sample.labels["le"]
            key = shown.name + suffix, tuple(kept.items())
            sums[key] = sums.get(key, 0.0) + sample.value
        for (full, labels), value in sums.items():
            shown.add_sample(full, {MODEL: self._model, **dict(labels)}, value)
        return shown


def _family(metric: Metric) -> str:
    return metric.name.removesuffix("_total")


def _total(families: dict[str, Family], metric: Metric) -> float:
    return sum(one.value for one in families[_family(metric)].samples if one.name == metric.name)
