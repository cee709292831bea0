"""
SGLang's metrics, which its workers expose with `--enable-metrics`.

SGLang keeps requests of a pair in several queues. On a prefill worker they wait for the decode worker, for
the batch, and for the end of the transfer. On a decode worker they wait for KV blocks, for the transfer, and
for the batch.
"""

from __future__ import annotations

from baton_api.metrics import worker
from baton_api.metrics.engines.mapping import EngineMapping, MappedMetric, SourceSeries
from baton_api.metrics.metric import Metric
from baton_api.prompt_report import Fallback

ALL_PRIORITIES = {"priority": ("",)}
"""With priorities, a queue also has a series for each of them."""

MEBIBYTE = 2.0**20
MILLISECOND = 0.001
LATENCY_BOUNDS_MS = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000)

HIT_MODES = ("device_hit", "host_hit", "storage_hit")


def _same(metric: Metric, name: str, note: str = "") -> MappedMetric:
    return MappedMetric(metric, (SourceSeries(f"sglang:{name}"),), note)


def _requests(metric: Metric, name: str, *more: str, note: str = "") -> MappedMetric:
    """Map the number of requests in a queue, or in several."""
    also = tuple(f"sglang:{name}" for name in more)
    return MappedMetric(metric, (SourceSeries(f"sglang:{name}", ALL_PRIORITIES, also=also),), note)


def _tokens(mode: str, **labels: str) -> SourceSeries:
    return SourceSeries("sglang:realtime_tokens_total", {"mode": (mode,)}, labels)


def _cache(metric: Metric, *modes: str) -> MappedMetric:
    return MappedMetric(metric, (SourceSeries("sglang:prefill_effective_tokens_total", {"mode": modes}),))


def _failures(name: str, reason: Fallback) -> SourceSeries:
    # Both workers of a pair count a failure.
    return SourceSeries(f"sglang:{name}", {"engine_type": ("decode",)}, {"reason": reason.value})


MAPPING = EngineMapping(
    engine="sglang",
    title="SGLang",
    version="0.5.23",
    marker="engine_type",
    metrics=(
        MappedMetric(
            worker.WORKER_INFO,
            (SourceSeries("sglang:num_running_reqs", copied={"model": "model_name"}, how="group"),),
        ),
        MappedMetric(
            worker.WORKER_REQUESTS,
            (
                SourceSeries("sglang:num_requests_total"),
                SourceSeries("sglang:num_aborted_requests_total", labels={"finish_reason": "abort"}),
            ),
            "The reason of other requests is unknown: no label `finish_reason`.",
        ),
        MappedMetric(
            worker.WORKER_PROMPT_TOKENS,
            (_tokens("prefill_compute", source="computed"), _tokens("prefill_cache", source="cached")),
            "Tokens from prefill workers are unknown.",
        ),
        MappedMetric(
            worker.WORKER_GENERATION_TOKENS,
            (_tokens("decode"),),
            "Without the first token of each request. Counted every `--decode-log-interval` steps.",
        ),
        _same(worker.WORKER_PROMPT_LENGTH, "prompt_tokens_histogram"),
        _same(worker.WORKER_GENERATION_LENGTH, "generation_tokens_histogram"),
        _same(worker.WORKER_FIRST_TOKEN, "time_to_first_token_seconds"),
        _same(worker.WORKER_TOKEN, "inter_token_latency_seconds"),
        _same(worker.WORKER_REQUEST_TIME, "e2e_request_latency_seconds"),
        _requests(worker.WORKER_RUNNING, "num_running_reqs"),
        _requests(
            worker.WORKER_QUEUED,
            "num_queue_reqs",
            "num_grammar_queue_reqs",
            "num_prefill_bootstrap_queue_reqs",
            "num_decode_prealloc_queue_reqs",
        ),
        _requests(worker.WORKER_FETCHING, "num_decode_transfer_queue_reqs"),
        _requests(worker.WORKER_HELD, "num_prefill_inflight_queue_reqs"),
        _same(worker.WORKER_QUEUE_TIME, "queue_time_seconds"),
        MappedMetric(
            worker.WORKER_PREFILL_TIME,
            (SourceSeries("sglang:per_stage_req_latency_seconds", {"stage": ("prefill_forward",)}),),
            "Prompts of one batch overlap.",
        ),
        _same(worker.WORKER_GENERATION_RATE, "gen_throughput", "Over the last log interval."),
        _same(worker.WORKER_RETRACTIONS, "num_retracted_requests_total"),
        MappedMetric(
            worker.WORKER_KV_USAGE,
            (SourceSeries("sglang:token_usage", how="max"),),
            "The fullest pool of a hybrid model.",
        ),
        _cache(worker.WORKER_CACHE_QUERIES, "input", *HIT_MODES),
        _cache(worker.WORKER_CACHE_HITS, *HIT_MODES),
        MappedMetric(
            worker.WORKER_TRANSFER_BYTES,
            (SourceSeries("sglang:kv_transfer_total_mb_sum", factor=MEBIBYTE),),
            "On the prefill worker. The transport is unknown.",
        ),
        MappedMetric(
            worker.WORKER_TRANSFER_SECONDS,
            (SourceSeries("sglang:kv_transfer_latency_ms", factor=MILLISECOND, bounds=LATENCY_BOUNDS_MS),),
            "On the prefill worker. The transport is unknown.",
        ),
        MappedMetric(
            worker.WORKER_TRANSFER_FAILURES,
            (
                _failures("num_transfer_failed_reqs_total", Fallback.TRANSPORT),
                _failures("num_bootstrap_failed_reqs_total", Fallback.UNREACHABLE),
            ),
            "The transport is unknown.",
        ),
    ),
    notes=(
        "Workers expose metrics with `--enable-metrics`. Do not set `--enable-metrics-for-all-schedulers`: "
        "ranks of one replica would count several times.",
    ),
)
