"""
vLLM's metrics.

vLLM counts requests that wait for their KV blocks as waiting. The contract has a separate metric for them.
"""

from __future__ import annotations

from baton_api.metrics import worker
from baton_api.metrics.engines.mapping import EngineMapping, MappedMetric, SourceSeries
from baton_api.metrics.metric import Metric
from baton_api.prompt_report import Fallback

NIXL = {"transport": "nixl"}
"""vLLM reports no transport below NIXL."""

FETCHING = SourceSeries("vllm:num_requests_kv_fetch_by_stage", {"stage": ("in_progress",)})


def _same(metric: Metric, name: str, note: str = "", **labels: str) -> MappedMetric:
    return MappedMetric(metric, (SourceSeries(f"vllm:{name}", labels=labels),), note)


def _prompt_tokens(source: str, *theirs: str) -> SourceSeries:
    return SourceSeries("vllm:prompt_tokens_by_source_total", {"source": theirs}, {"source": source})


def _requests(reason: str, *theirs: str) -> SourceSeries:
    where = {"finished_reason": theirs}
    return SourceSeries("vllm:request_success_total", where, {"finish_reason": reason})


MAPPING = EngineMapping(
    engine="vllm",
    title="vLLM",
    version="0.32.0",
    marker="engine",
    metrics=(
        MappedMetric(
            worker.WORKER_INFO,
            (SourceSeries("vllm:num_requests_running", copied={"model": "model_name"}, how="group"),),
        ),
        MappedMetric(
            worker.WORKER_REQUESTS,
            (
                _requests("stop", "stop", "repetition"),
                _requests("length", "length"),
                _requests("abort", "abort"),
                _requests("error", "error"),
            ),
            "A prefill worker ends each prompt with `length`.",
        ),
        MappedMetric(
            worker.WORKER_PROMPT_TOKENS,
            (
                _prompt_tokens("computed", "local_compute"),
                _prompt_tokens("remote", "external_kv_transfer"),
                _prompt_tokens("cached", "local_cache_hit"),
            ),
        ),
        _same(worker.WORKER_GENERATION_TOKENS, "generation_tokens_total"),
        _same(worker.WORKER_PROMPT_LENGTH, "request_prompt_tokens"),
        _same(worker.WORKER_GENERATION_LENGTH, "request_generation_tokens"),
        _same(worker.WORKER_FIRST_TOKEN, "time_to_first_token_seconds"),
        _same(worker.WORKER_TOKEN, "inter_token_latency_seconds"),
        _same(worker.WORKER_REQUEST_TIME, "e2e_request_latency_seconds"),
        _same(worker.WORKER_DECODE_TIME, "request_decode_time_seconds"),
        _same(worker.WORKER_RUNNING, "num_requests_running"),
        MappedMetric(
            worker.WORKER_QUEUED,
            (SourceSeries("vllm:num_requests_waiting", less=FETCHING),),
            "Versions without `vllm:num_requests_kv_fetch_by_stage` include the requests of "
            "`baton_worker_requests_fetching`.",
        ),
        MappedMetric(
            worker.WORKER_FETCHING,
            (FETCHING,),
            "Transfers in progress. The router does not send a prompt to the decode worker before its "
            "prefill ends.",
        ),
        _same(
            worker.WORKER_QUEUE_TIME,
            "request_queue_time_seconds",
            "On a decode worker it includes the transfer.",
        ),
        _same(
            worker.WORKER_PREFILL_TIME,
            "request_prefill_time_seconds",
            "Counted when a request ends. Prompts of one batch overlap.",
        ),
        _same(worker.WORKER_RETRACTIONS, "num_preemptions_total"),
        MappedMetric(
            worker.WORKER_KV_USAGE,
            (SourceSeries("vllm:kv_cache_usage_perc", how="max"),),
            "A ratio, despite its name.",
        ),
        _same(worker.WORKER_CACHE_QUERIES, "prefix_cache_queries_total"),
        _same(worker.WORKER_CACHE_HITS, "prefix_cache_hits_total"),
        MappedMetric(
            worker.WORKER_TRANSFER_BYTES, (SourceSeries("vllm:nixl_bytes_transferred_sum", labels=NIXL),)
        ),
        _same(
            worker.WORKER_TRANSFER_SECONDS,
            "nixl_xfer_time_seconds",
            "One per prompt and tensor parallel rank.",
            **NIXL,
        ),
        _same(
            worker.WORKER_TRANSFER_FAILURES,
            "nixl_num_failed_transfers_total",
            "All with the reason `transport`.",
            reason=Fallback.TRANSPORT.value,
            **NIXL,
        ),
    ),
)
