"""
A worker's Prometheus metrics: the API's observations, the engine's counters, and aliases of other engines.

A collector converts a snapshot of the engine's counters to samples. Each worker has its own registry, because
tests run several workers in one process. Metrics under the names of vLLM and SGLang are derived from Baton's
metrics at a scrape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample as PrometheusSample

from baton_api import __version__, metrics
from baton_api.metrics import Metric
from baton_api.metrics.peers import MODEL, PEER_NAMES, Peer, PeerName
from baton_api.mutual_tls import CertificateValidity
from baton_engine.metrics import counters
from baton_engine.metrics.counters import EngineSnapshot, Times
from baton_engine.requests import RelayRecord

Sample = tuple[str, str, dict[str, str], float]
"""A value of another process: family, name, labels and value."""


@dataclass(frozen=True, slots=True)
class WorkerLabels:
    """Identity of the worker in metrics."""

    worker: str = "worker"
    role: str = "both"
    model: str = ""
    """The model's name in responses."""


class Durations(Collector):
    """Collector of a histogram without labels that is observed for each token."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._histogram = counters.Histogram(metric.buckets)

    def add(self, seconds: float, count: int) -> None:
        """Count `count` durations of `seconds` each."""
        self._histogram.add(seconds, count)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        yield _times(self._metric, self._histogram.times())


class ApiMetrics:
    """The observations of the API in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._requests = self._counter(metrics.WORKER_REQUESTS)
        self._tokens = self._counter(metrics.WORKER_GENERATION_TOKENS)
        self._first_token = self._histogram(metrics.WORKER_FIRST_TOKEN)
        self._token = Durations(metrics.WORKER_TOKEN)  # prometheus_client's would take 2 us for each token
        self.registry.register(self._token)
        self._request_time = self._histogram(metrics.WORKER_REQUEST_TIME)
        self._decode_time = self._histogram(metrics.WORKER_DECODE_TIME)
        self._prompt_length = self._histogram(metrics.WORKER_PROMPT_LENGTH)
        self._generation_length = self._histogram(metrics.WORKER_GENERATION_LENGTH)
        self._transfer_bytes = self._counter(metrics.WORKER_TRANSFER_BYTES)
        self._transfer_seconds = self._histogram(metrics.WORKER_TRANSFER_SECONDS)

    def first_token(self, seconds: float) -> None:
        """Record the first token of a choice, `seconds` after its request."""
        self._first_token.observe(seconds)

    def tokens(self, seconds: float, count: int) -> None:
        """Record `count` tokens of one choice, `seconds` after the preceding token."""
        self._token.add(seconds / count, count)

    def relayed(self, relay: RelayRecord) -> None:
        """Record a prompt that was transferred from a prefill worker."""
        self._transfer_bytes.labels(relay.transport).inc(relay.bytes)
        self._transfer_seconds.labels(relay.transport).observe(relay.transfer_s)

    def ended(
        self, finish_reason: str, prompt: int, tokens: int, seconds: float, decode_s: float = 0.0
    ) -> None:
        """
        Record the end of a choice, `seconds` after its request and `decode_s` after its first token.

        `prompt` and `tokens` are the numbers of its prompt tokens and generated tokens.
        """
        self._requests.labels(finish_reason).inc()
        self._prompt_length.observe(prompt)
        self._request_time.observe(seconds)
        if tokens:
            self._tokens.inc(tokens)
            self._generation_length.observe(tokens)
            self._decode_time.observe(decode_s)

    def samples(self) -> list[Sample]:
        """Return all values but times of creation, for another process."""
        return [
            (family.name, sample.name, sample.labels, sample.value)
            for family in self.registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        ]

    def text(self, others: Iterable[Sample] = ()) -> bytes:
        """Return all metrics in Prometheus' text format. The values of `others` are added to them."""
        return generate_latest(self.registry)

    def _counter(self, metric: Metric) -> Counter:
        counter = Counter(metric.name, metric.help, metric.labels, registry=self.registry)
        for value in metric.foreseen:
            counter.labels(value)
        return counter

    def _histogram(self, metric: Metric) -> Histogram:
        return Histogram(
            metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=self.registry
        )


class WorkerMetrics(ApiMetrics):
    """The registry of one worker, with the observations of its API in this process."""

    def __init__(
        self,
        snapshot: Callable[[], EngineSnapshot],
        kv_batches: Callable[[], int] = lambda: 0,
        worker_labels: WorkerLabels = WorkerLabels(),
        peers: Sequence[Peer] = (),
        term: Callable[[], CertificateValidity | None] = lambda: None,
    ) -> None:
        """
        Create the registry.

        `kv_batches` returns the number of published batches of KV events. `peers` are the engines whose
        metric names are exposed too. `term` returns the validity of the worker's certificate, if it has one.
        """
        super().__init__()
        self._peers = peers
        self._model = worker_labels.model
        self.registry.register(EngineCollector(snapshot, kv_batches, worker_labels))
        self.registry.register(CertificateCollector(term))

    def text(self, others: Iterable[Sample] = ()) -> bytes:
        others = list(others)
        every = SummedRegistry(self.registry, others) if others else self.registry
        peers = CollectorRegistry(auto_describe=False)
        if self._peers:
            peers.register(PeerMetrics(every, self._peers, self._model))
        return generate_latest(every) + generate_latest(peers)


class SummedRegistry(CollectorRegistry):
    """The metrics of a registry, with the values of other processes added to them."""

    def __init__(self, registry: CollectorRegistry, others: Iterable[Sample]) -> None:
        super().__init__(auto_describe=False)
        self._registry = registry
        self._others = list(others)

    def collect(self) -> Iterator[Family]:
        sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for family, name, labels, value in self._others:
            values = sums.setdefault(family, {})
            key = name, tuple(labels.items())
            values[key] = values.get(key, 0.0) + value
        for metric in self._registry.collect():
            added = sums.get(metric.name, {})
            samples = [
                sample._replace(
                    value=sample.value + added.pop((sample.name, tuple(sample.labels.items())), 0.0)
                )
                for sample in metric.samples
            ]
            metric.samples = samples + [
                PrometheusSample(name, dict(labels), value) for (name, labels), value in added.items()
            ]
            yield metric


class CertificateCollector(Collector):
    """Collector of the expiry of the worker's certificate."""

    def __init__(self, term: Callable[[], CertificateValidity | None]) -> None:
        self._term = term

    def collect(self) -> Iterable[GaugeMetricFamily]:
        term = self._term()
        yield _gauge(metrics.WORKER_CERTIFICATE_END, {} if term is None else {(): term.end})
        yield _gauge(metrics.WORKER_CERTIFICATE_LIFE, {} if term is None else {(): term.end - term.begin})


class EngineCollector(Collector):
    """Collector of an engine's snapshot."""

    def __init__(
        self,
        snapshot: Callable[[], EngineSnapshot],
        kv_batches: Callable[[], int],
        worker_labels: WorkerLabels,
    ) -> None:
        self._snapshot = snapshot
        self._kv_batches = kv_batches
        self._worker_labels = worker_labels

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]:
        now, worker_labels = self._snapshot(), self._worker_labels
        totals = now.totals
        yield _gauge(metrics.BUILD_INFO, {("worker", __version__): 1})
        yield _gauge(
            metrics.WORKER_INFO, {(worker_labels.worker, worker_labels.role, worker_labels.model): 1}
        )
        yield _gauge(metrics.WORKER_RUNNING, {(): now.running})
        yield _gauge(metrics.WORKER_RUNNING_LIMIT, {(): now.max_running})
        yield _gauge(metrics.WORKER_QUEUED, {(): now.queued})
        yield _gauge(metrics.WORKER_FETCHING, {(): now.fetching})
        yield _gauge(metrics.WORKER_HELD, {(): now.held})
        yield _gauge(metrics.WORKER_QUEUED_TOKENS, {(): now.queued_tokens})
        yield _gauge(metrics.WORKER_BLOCKS, _blocks_by_state(now))
        yield _gauge(metrics.WORKER_KV_USAGE, {(): now.usage})
        yield _gauge(metrics.WORKER_GENERATION_RATE, {(): now.generated_per_s})
        yield _gauge(metrics.WORKER_PROMPT_RATE, {(): now.computed_per_s})
        yield _counter(metrics.WORKER_CACHE_QUERIES, {(): totals.prompt_tokens_looked_up})
        yield _counter(metrics.WORKER_CACHE_HITS, {(): totals.prompt_tokens_cached})
        yield _counter(metrics.WORKER_CACHE_EVICTIONS, {(): now.evictions})
        yield _counter(
            metrics.WORKER_PROMPT_TOKENS,
            {
                ("computed",): totals.prompt_tokens_computed,
                ("cached",): totals.prompt_tokens_cached,
                ("remote",): totals.prompt_tokens_remote,
                ("peer",): totals.prompt_tokens_peer,
                **{(tier,): tokens for tier, tokens in totals.prompt_tokens_restored.items()},
            },
        )
        yield _counter(metrics.WORKER_PEER_CACHE_QUERIES, {(): totals.prompt_tokens_peer_looked_up})
        yield _counter(metrics.WORKER_PEER_CACHE_HITS, {(): totals.prompt_tokens_peer})
        yield _counter(
            metrics.WORKER_PEER_READS, {(outcome,): count for outcome, count in totals.peer_reads.items()}
        )
        yield from _tiers(now)
        yield _counter(metrics.WORKER_RETRACTIONS, {(): totals.retractions})
        yield _counter(metrics.WORKER_OUT_OF_MEMORY, {(): totals.out_of_memory})
        yield _counter(metrics.WORKER_DRAFTS, {(): totals.drafts})
        yield _counter(metrics.WORKER_DRAFT_TOKENS, {(): totals.draft_tokens})
        yield _counter(metrics.WORKER_ACCEPTED_TOKENS, {(): totals.accepted_tokens})
        yield _counter(
            metrics.WORKER_LOCAL_PREFILLS,
            {(reason,): count for reason, count in totals.local_prefills.items()},
        )
        yield _counter(metrics.WORKER_TRANSFER_FAILURES, dict(totals.transfer_failures.items()))
        yield _counter(
            metrics.WORKER_QUARANTINES,
            {(transport,): count for transport, count in totals.quarantined.items()},
        )
        yield _times(metrics.WORKER_QUEUE_TIME, now.queue_times)
        yield _times(metrics.WORKER_PREFILL_TIME, now.prefill_times)
        yield _times(metrics.WORKER_STEP, now.step_times)
        yield _times(metrics.WORKER_FORWARD, now.forward_times)
        yield _counter(metrics.WORKER_KV_BATCHES, {(): self._kv_batches()})


def _tiers(now: EngineSnapshot) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    tiers = [((tier.name,), tier, tier.totals) for tier in now.tiers]
    yield _gauge(metrics.WORKER_TIER_BLOCKS, {name: tier.blocks for name, tier, _ in tiers})
    yield _gauge(metrics.WORKER_TIER_BYTES, {name: tier.blocks * tier.block_bytes for name, tier, _ in tiers})
    yield _gauge(
        metrics.WORKER_TIER_LIMIT, {name: tier.capacity * tier.block_bytes for name, tier, _ in tiers}
    )
    yield _counter(metrics.WORKER_TIER_QUERIES, {name: totals.queries for name, _, totals in tiers})
    yield _counter(metrics.WORKER_TIER_HITS, {name: totals.hits for name, _, totals in tiers})
    yield _counter(metrics.WORKER_TIER_READ_SECONDS, {name: totals.read_s for name, _, totals in tiers})
    yield _counter(metrics.WORKER_TIER_WRITES, {name: totals.writes for name, _, totals in tiers})
    yield _counter(metrics.WORKER_TIER_WRITE_SECONDS, {name: totals.write_s for name, _, totals in tiers})
    yield _counter(metrics.WORKER_TIER_DROPPED, {name: totals.dropped for name, _, totals in tiers})
    yield _counter(metrics.WORKER_TIER_CORRUPT, {name: totals.corrupt for name, _, totals in tiers})
    yield _counter(metrics.WORKER_TIER_ERRORS, {name: totals.errors for name, _, totals in tiers})
    yield _gauge(metrics.WORKER_TIER_PAUSED, {name: tier.paused for name, tier, _ in tiers})
    yield _counter(metrics.WORKER_TIER_READS, dict(now.totals.restores.items()))


def _blocks_by_state(now: EngineSnapshot) -> dict[tuple[str, ...], float]:
    return {
        ("free",): now.free_blocks,
        ("cached",): now.cached_blocks,
        ("owned",): now.owned_blocks - now.pinned_blocks,
        ("pinned",): now.pinned_blocks,
        ("quarantined",): now.quarantined_blocks,
    }


def _gauge(metric: Metric, values: Mapping[tuple[str, ...], float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _counter(metric: Metric, values: Mapping[tuple[str, ...], float]) -> CounterMetricFamily:
    family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _times(metric: Metric, times: Times) -> HistogramMetricFamily:
    buckets = [("+Inf" if math.isinf(bound) else str(bound), float(count)) for bound, count in times.buckets]
    family = HistogramMetricFamily(metric.name, metric.help)
    family.add_metric((), buckets, times.total_s)
    return family


class PeerMetrics(Collector):
    """Collector of the metrics in `registry` under the names of other engines, `peers`."""

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
            total = _total(families, name.over)
            shown.add_sample(
                name.name, {MODEL: self._model}, _total(families, metric) / total if total else 0.0
            )
            return shown
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in families[_family(metric)].samples:
            suffix = sample.name.removeprefix(_family(metric))
            if suffix == "_created":
                continue
            labels_shown = {
                name.labels[key]: value for key, value in sample.labels.items() if key in name.labels
            }
            if "le" in sample.labels:
                labels_shown["le"] = sample.labels["le"]
            key = shown.name + suffix, tuple(labels_shown.items())
            sums[key] = sums.get(key, 0.0) + sample.value
        for (full, labels), value in sums.items():
            shown.add_sample(full, {MODEL: self._model, **dict(labels)}, value)
        return shown


def _family(metric: Metric) -> str:
    return metric.name.removesuffix("_total")


def _total(families: dict[str, Family], metric: Metric) -> float:
    return sum(sample.value for sample in families[_family(metric)].samples if sample.name == metric.name)
