"""
Aliases of worker metrics for dashboards that were made for vLLM and SGLang.

`--metrics-names` exposes the aliases beside Baton's names. They are derived at each scrape. Routers have no
aliases: these metrics belong to one engine, and a request would be counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from baton_api.metrics import worker
from baton_api.metrics.metric import Metric

Peer = Literal["vllm", "sglang"]

MODEL = "model_name"
"""The label for the model, on every alias."""


@dataclass(frozen=True, slots=True)
class PeerName:
    """An alias. Series that differ only in labels outside `labels` are added up."""

    name: str
    metric: Metric
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the metric, and their names on the alias."""
    over: Metric | None = None
    """Divisor of the metric. The alias is 0 while the divisor is 0."""


def _vllm(name: str, metric: Metric, **labels: str) -> PeerName:
    return PeerName(f"vllm:{name}", metric, labels)


def _sglang(name: str, metric: Metric, over: Metric | None = None) -> PeerName:
    return PeerName(f"sglang:{name}", metric, over=over)


PEER_NAMES: Mapping[Peer, tuple[PeerName, ...]] = {
    "vllm": (
        _vllm("e2e_request_latency_seconds", worker.WORKER_REQUEST_TIME),
        _vllm("time_to_first_token_seconds", worker.WORKER_FIRST_TOKEN),
        _vllm("inter_token_latency_seconds", worker.WORKER_TOKEN),
        _vllm("request_queue_time_seconds", worker.WORKER_QUEUE_TIME),
        _vllm("request_prefill_time_seconds", worker.WORKER_PREFILL_TIME),
        _vllm("request_decode_time_seconds", worker.WORKER_DECODE_TIME),
        _vllm("request_prompt_tokens", worker.WORKER_PROMPT_LENGTH),
        _vllm("request_generation_tokens", worker.WORKER_GENERATION_LENGTH),
        # vLLM takes the longest of several choices.
        _vllm("request_max_num_generation_tokens", worker.WORKER_GENERATION_LENGTH),
        _vllm("request_success_total", worker.WORKER_REQUESTS, finish_reason="finished_reason"),
        _vllm("prompt_tokens_total", worker.WORKER_PROMPT_TOKENS),
        _vllm("generation_tokens_total", worker.WORKER_GENERATION_TOKENS),
        _vllm("num_requests_running", worker.WORKER_RUNNING),
        _vllm("num_requests_waiting", worker.WORKER_QUEUED),
        _vllm("num_preemptions_total", worker.WORKER_RETRACTIONS),
        _vllm("spec_decode_num_drafts_total", worker.WORKER_DRAFTS),
        _vllm("spec_decode_num_draft_tokens_total", worker.WORKER_DRAFT_TOKENS),
        _vllm("spec_decode_num_accepted_tokens_total", worker.WORKER_ACCEPTED_TOKENS),
        _vllm("kv_cache_usage_perc", worker.WORKER_KV_USAGE),
        _vllm("prefix_cache_queries_total", worker.WORKER_CACHE_QUERIES),
        _vllm("prefix_cache_hits_total", worker.WORKER_CACHE_HITS),
        _vllm("external_prefix_cache_queries_total", worker.WORKER_PEER_CACHE_QUERIES),
        _vllm("external_prefix_cache_hits_total", worker.WORKER_PEER_CACHE_HITS),
        _vllm("kv_offload_tiering_block_queries_total", worker.WORKER_TIER_QUERIES, tier="tier"),
        _vllm("kv_offload_tiering_block_hits_total", worker.WORKER_TIER_HITS, tier="tier"),
        _vllm("kv_offload_tiering_read_time_total", worker.WORKER_TIER_READ_SECONDS, tier="tier"),
        _vllm("kv_offload_tiering_write_time_total", worker.WORKER_TIER_WRITE_SECONDS, tier="tier"),
    ),
    "sglang": (
        _sglang("e2e_request_latency_seconds", worker.WORKER_REQUEST_TIME),
        _sglang("time_to_first_token_seconds", worker.WORKER_FIRST_TOKEN),
        _sglang("inter_token_latency_seconds", worker.WORKER_TOKEN),
        _sglang("num_requests_total", worker.WORKER_REQUESTS),
        _sglang("prompt_tokens_total", worker.WORKER_PROMPT_TOKENS),
        _sglang("generation_tokens_total", worker.WORKER_GENERATION_TOKENS),
        _sglang("num_running_reqs", worker.WORKER_RUNNING),
        _sglang("num_queue_reqs", worker.WORKER_QUEUED),
        _sglang("gen_throughput", worker.WORKER_GENERATION_RATE),
        _sglang("token_usage", worker.WORKER_KV_USAGE),
        _sglang("cache_hit_rate", worker.WORKER_CACHE_HITS, worker.WORKER_CACHE_QUERIES),
    ),
}
