"""Dashboards made for vLLM and SGLang find their metrics."""

from __future__ import annotations

from typing import Any

import pytest

from baton_api import metrics
from baton_api.metrics.peers import PEER_NAMES
from tests.observing.telemetry import Telemetry

# Metrics in the panels of the dashboards that those projects ship:
# examples/observability/prometheus_grafana/grafana.json of vLLM,
# examples/monitoring/grafana/dashboards/json/sglang-dashboard.json of SGLang.
PEER_METRICS = {
    "vllm": """
        vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum
        vllm:e2e_request_latency_seconds_count vllm:prompt_tokens_total vllm:generation_tokens_total
        vllm:inter_token_latency_seconds_bucket vllm:inter_token_latency_seconds_sum
        vllm:inter_token_latency_seconds_count vllm:num_requests_running vllm:num_requests_waiting
        vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_sum
        vllm:time_to_first_token_seconds_count vllm:kv_cache_usage_perc vllm:request_prompt_tokens_bucket
        vllm:request_generation_tokens_bucket vllm:request_success_total vllm:request_queue_time_seconds_sum
        vllm:request_prefill_time_seconds_sum vllm:request_decode_time_seconds_sum
        vllm:request_max_num_generation_tokens_sum
    """,
    "sglang": """
        sglang:e2e_request_latency_seconds_bucket sglang:e2e_request_latency_seconds_sum
        sglang:e2e_request_latency_seconds_count sglang:time_to_first_token_seconds_bucket
        sglang:time_to_first_token_seconds_sum sglang:time_to_first_token_seconds_count
        sglang:num_running_reqs sglang:gen_throughput sglang:cache_hit_rate sglang:num_queue_reqs
    """,
}

LABELS = {"vllm:request_success_total": {"model_name", "finished_reason"}}
"""Labels besides the model that panels use."""


def samples(telemetry: Telemetry, process: str) -> dict[str, list[Any]]:
    by_name: dict[str, list[Any]] = {}
    for family in telemetry.families(process).values():
        for sample in family.samples:
            by_name.setdefault(sample.name, []).append(sample)
    return by_name


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEER_METRICS)
def test_peer_metric_exists_with_model_label(telemetry: Telemetry, peer: str) -> None:
    peer_samples = samples(telemetry, "decode")
    for name in PEER_METRICS[peer].split():
        assert name in peer_samples, name
        for sample in peer_samples[name]:
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels.keys() - {"le"} == LABELS.get(name, {"model_name"}), name


@pytest.mark.slow
def test_peer_metrics_equal_baton_metrics(telemetry: Telemetry) -> None:
    peer_samples = samples(telemetry, "decode")

    def total(name: str, **labels: str) -> float:
        return float(sum(one.value for one in peer_samples[name] if labels.items() <= one.labels.items()))

    for theirs, ours in (
        ("vllm:prompt_tokens_total", metrics.WORKER_PROMPT_TOKENS.name),
        ("vllm:generation_tokens_total", metrics.WORKER_GENERATION_TOKENS.name),
        ("vllm:e2e_request_latency_seconds_count", metrics.WORKER_REQUEST_TIME.name + "_count"),
        ("sglang:time_to_first_token_seconds_sum", metrics.WORKER_FIRST_TOKEN.name + "_sum"),
        ("sglang:token_usage", metrics.WORKER_KV_USAGE.name),
    ):
        assert total(theirs) == total(ours), theirs
    assert total("vllm:request_success_total", finished_reason="length") == total(
        metrics.WORKER_REQUESTS.name, finish_reason="length"
    )
    queries = total(metrics.WORKER_CACHE_QUERIES.name)
    assert total("sglang:cache_hit_rate") == total(metrics.WORKER_CACHE_HITS.name) / queries


@pytest.mark.slow
def test_router_has_no_peer_metrics(telemetry: Telemetry) -> None:
    names = {name.name for of_peer in PEER_NAMES.values() for name in of_peer}
    assert not names & samples(telemetry, "router").keys()
