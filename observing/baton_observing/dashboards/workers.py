"""The dashboard "Prefill and decode": load, KV cache, KV transfer and GPUs of workers."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.dashboards.panels import (
    BYTES,
    BYTES_PER_SECOND,
    CLUSTER,
    NAMESPACE,
    PERCENT,
    REQUESTS_PER_SECOND,
    ROLE,
    ROLLOUTS,
    SECONDS,
    SELECTED,
    SERVICE,
    WORKER,
    Dashboard,
    Panel,
    Query,
    Row,
    count,
    per_second,
    quantiles,
)
from baton_observing.promql import Scope, or_zero, ratio

WORKERS = Scope(SELECTED.window, (*SELECTED.matchers, 'role=~"$role"', 'worker=~"$worker"'))
"""The workers that the dashboard's variables select."""

LOAD = Row(
    "Load",
    (
        Panel(
            title="Running sequences",
            description="Sequences in the running batch, and the limit. While all workers are at the limit, "
            "requests queue.",
            unit=count("sequences"),
            queries=(
                Query(WORKERS.gauge(metrics.WORKER_RUNNING, "worker"), "{{worker}}"),
                Query(WORKERS.gauge(metrics.WORKER_RUNNING_LIMIT, "worker", how="max"), "{{worker}} limit"),
            ),
        ),
        Panel(
            title="Queued sequences",
            description="Sequences queued in workers for the running batch. The router holds requests back, "
            "so there should be few.",
            unit=count("sequences"),
            queries=(Query(WORKERS.gauge(metrics.WORKER_QUEUED, "worker"), "{{worker}}"),),
            kind="stacked",
            runbook="BatonImbalance",
        ),
        Panel(
            title="Queued prompt tokens",
            description="Prompt tokens that are not computed yet. Divided by the prompt tokens that a worker "
            "computes per second, it is the wait of a new prompt. If it grows, add prefill workers.",
            unit=count("tokens"),
            queries=(Query(WORKERS.gauge(metrics.WORKER_QUEUED_TOKENS, "worker"), "{{worker}}"),),
            kind="stacked",
        ),
        Panel(
            title="Prompt tokens",
            description="Prompt tokens by the source of their KV: computed by this worker, transferred from "
            "a prefill worker (remote), or cached.",
            unit=per_second("tokens"),
            queries=(
                Query(
                    WORKERS.rate(metrics.WORKER_PROMPT_TOKENS, "role", "source"),
                    "{{role}} {{source}}",
                ),
            ),
            kind="stacked",
        ),
        Panel(
            title="Generated tokens",
            description="Tokens generated for clients, by worker. Workers of one role should be about equal.",
            unit=per_second("tokens"),
            queries=(Query(WORKERS.rate(metrics.WORKER_GENERATION_TOKENS, "worker"), "{{worker}}"),),
            kind="stacked",
        ),
        Panel(
            title="Queue time and prefill time, p95",
            description="From a prompt's arrival at the engine to its first forward pass, and from there to "
            "its first token. If queue time rises, add prefill workers. If prefill time rises, prompts are "
            "longer or workers slower.",
            unit=SECONDS,
            queries=(
                Query(WORKERS.quantile(0.95, metrics.WORKER_QUEUE_TIME, "role"), "{{role}} queue"),
                Query(WORKERS.quantile(0.95, metrics.WORKER_PREFILL_TIME, "role"), "{{role}} prefill"),
            ),
        ),
    ),
)

KV_CACHE = Row(
    "KV cache",
    (
        Panel(
            title="KV cache usage",
            description="Ratio of KV blocks that a new request cannot use. Near 100 % sequences are "
            "retracted and responses slow down: add decode workers, or lower --max-running.",
            unit=PERCENT,
            queries=(Query(WORKERS.gauge(metrics.WORKER_KV_USAGE, "worker", how="max"), "{{worker}}"),),
            threshold=0.95,
            runbook="BatonKvCacheFull",
        ),
        Panel(
            title="KV blocks by state",
            description="Cached blocks can be reused at any time. Quarantined blocks belong to transfers "
            "that may not have ended; they should return within a minute.",
            unit=count("blocks"),
            queries=(Query(WORKERS.gauge(metrics.WORKER_BLOCKS, "state"), "{{state}}"),),
            kind="stacked",
            runbook="BatonKvQuarantined",
        ),
        Panel(
            title="Prefix cache hit rate",
            description="Ratio of prompt tokens found in the worker's prefix cache. It falls when prompts "
            "share less, or when blocks are evicted too early.",
            unit=PERCENT,
            queries=(
                Query(
                    ratio(
                        WORKERS.rate(metrics.WORKER_CACHE_HITS, "role"),
                        WORKERS.rate(metrics.WORKER_CACHE_QUERIES, "role"),
                    ),
                    "{{role}}",
                ),
            ),
        ),
        Panel(
            title="Retractions",
            description="Sequences that gave up their KV blocks and continue later; their streams pause. "
            "Above one per second the KV cache is too small for the load.",
            unit=per_second("sequences"),
            queries=(
                Query(WORKERS.rate(metrics.WORKER_RETRACTIONS, "worker"), "{{worker}}"),
                Query(WORKERS.rate(metrics.WORKER_OUT_OF_MEMORY, "worker"), "{{worker}}, out of memory"),
            ),
            threshold=1,
            runbook="BatonKvCacheFull",
            width=12,
        ),
        Panel(
            title="Evictions",
            description="Cached blocks dropped to make room. Many evictions with a low hit rate: more memory "
            "for the KV cache would help.",
            unit=per_second("blocks"),
            queries=(Query(WORKERS.rate(metrics.WORKER_CACHE_EVICTIONS, "worker"), "{{worker}}"),),
            width=12,
        ),
        Panel(
            title="Tiers of the KV cache",
            description="KV blocks that were restored from a tier, and those that were evicted before they "
            "were copied to it. Corrupt blocks are computed; more than a few mean broken memory, or a broken "
            "disk.",
            unit=per_second("blocks"),
            queries=(
                Query(
                    or_zero(WORKERS.rate(metrics.WORKER_TIER_HITS, "tier"), tier="any tier"),
                    "{{tier}} restored",
                ),
                Query(
                    or_zero(WORKERS.rate(metrics.WORKER_TIER_DROPPED, "tier"), tier="any tier"),
                    "{{tier}} dropped",
                ),
                Query(
                    or_zero(WORKERS.rate(metrics.WORKER_TIER_CORRUPT, "tier"), tier="any tier"),
                    "{{tier}} corrupt",
                ),
            ),
            width=12,
            runbook="BatonKvTierFailing",
        ),
        Panel(
            title="Size of the tiers",
            description="KV blocks in the tiers behind the KV cache, and what fits.",
            unit=BYTES,
            queries=(
                Query(or_zero(WORKERS.gauge(metrics.WORKER_TIER_BYTES, "tier"), tier="any tier"), "{{tier}}"),
                Query(
                    or_zero(WORKERS.gauge(metrics.WORKER_TIER_LIMIT, "tier"), tier="any tier"),
                    "{{tier}}, limit",
                ),
            ),
            width=12,
        ),
        Panel(
            title="Accepted draft tokens",
            description="Ratio of draft tokens that became part of an answer. No data: speculation computed "
            "no drafts, because they would not have made the answers faster.",
            unit=PERCENT,
            queries=(
                Query(
                    ratio(
                        WORKERS.rate(metrics.WORKER_ACCEPTED_TOKENS, "worker"),
                        WORKERS.rate(metrics.WORKER_DRAFT_TOKENS, "worker"),
                    ),
                    "{{worker}}",
                ),
            ),
            width=12,
        ),
        Panel(
            title="Engine step and forward pass, p95",
            description="Duration of an engine step, and of its forward pass. The difference is the engine's "
            "overhead; it should stay below 1 ms.",
            unit=SECONDS,
            queries=(
                Query(WORKERS.quantile(0.95, metrics.WORKER_STEP, "role"), "{{role}} step"),
                Query(WORKERS.quantile(0.95, metrics.WORKER_FORWARD, "role"), "{{role}} forward"),
            ),
            width=12,
        ),
    ),
)

TRANSFER = Row(
    "KV transfer",
    (
        Panel(
            title="KV transfer throughput",
            description="KV bytes pulled from prefill workers, by transport. TCP where RDMA or shared memory "
            "is available: run `baton doctor`.",
            unit=BYTES_PER_SECOND,
            queries=(Query(WORKERS.rate(metrics.WORKER_TRANSFER_BYTES, "transport"), "{{transport}}"),),
            kind="stacked",
        ),
        Panel(
            title="KV transfer duration",
            description="Time during which the KV blocks of a prompt were in transfer. Most of it overlaps "
            "with prefill.",
            unit=SECONDS,
            queries=quantiles(WORKERS, metrics.WORKER_TRANSFER_SECONDS),
        ),
        Panel(
            title="Failed KV transfers",
            description="Prompts whose KV did not arrive completely, by reason. The decode worker computes "
            "the rest itself, so clients only notice a delay.",
            unit=REQUESTS_PER_SECOND,
            queries=(
                Query(
                    or_zero(
                        WORKERS.rate(metrics.WORKER_TRANSFER_FAILURES, "reason") + " > 0",
                        WORKERS.gauge(metrics.WORKER_FETCHING),
                        reason="none",
                    ),
                    "{{reason}}",
                ),
            ),
            kind="stacked",
            runbook="BatonTransferFailing",
        ),
        Panel(
            title="Prefill location",
            description="Prompts by where they are computed: by a prefill worker (remote), by the decode "
            "worker because that is faster (local), or by it after a failure (fallback).",
            unit=REQUESTS_PER_SECOND,
            queries=(Query(SELECTED.rate(metrics.ROUTER_DECISIONS, "path"), "{{path}}"),),
            kind="stacked",
        ),
        Panel(
            title="Prompts in transfer and held",
            description="Prompts whose KV is being pulled, and computed prompts whose KV the prefill worker "
            "holds. Held for long: decode workers do not pull.",
            unit=count("prompts"),
            queries=(
                Query(WORKERS.gauge(metrics.WORKER_FETCHING), "in transfer"),
                Query(WORKERS.gauge(metrics.WORKER_HELD), "held"),
            ),
        ),
        Panel(
            title="Blocks put into quarantine",
            description="Blocks of cancelled reads. They are reused once it is certain that nothing writes "
            "to them.",
            unit=per_second("blocks"),
            queries=(
                Query(
                    or_zero(
                        WORKERS.rate(metrics.WORKER_QUARANTINES, "transport"),
                        WORKERS.gauge(metrics.WORKER_BLOCKS, state="quarantined"),
                        transport="none",
                    ),
                    "{{transport}}",
                ),
            ),
            runbook="BatonKvQuarantined",
        ),
    ),
)

# Metrics of NVIDIA's DCGM exporter. With `honorLabels: true` in its ServiceMonitor, the labels `namespace`
# and `pod` are those of the pod that uses the GPU. A worker is named like its pod.
GPU_UTILIZATION = "DCGM_FI_DEV_GPU_UTIL"
"""Percent of the time during which a kernel ran."""
TENSOR_ACTIVITY = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"
"""Ratio of the time during which tensor cores were active. Not available on all GPUs, nor with MIG."""
GPU_MEMORY_USED = "DCGM_FI_DEV_FB_USED"
GPU_MEMORY_FREE = "DCGM_FI_DEV_FB_FREE"
XID = "DCGM_FI_DEV_XID_ERRORS"
"""Code of the last error, or 0."""


def _by_pod(metric: str, how: str = "avg") -> str:
    """Return a GPU metric of the selected workers, one value per worker."""
    return f'{how} by (pod) ({metric}{{cluster=~"$cluster", namespace=~"$namespace", pod=~"$worker"}})'


GPUS = Row(
    "GPUs",
    (
        Panel(
            title="GPU utilization",
            description="Ratio of the time during which a kernel ran, and during which tensor cores were "
            "active. Busy without tensor cores: small batches or long contexts. Needs NVIDIA's DCGM "
            "exporter.",
            unit=PERCENT,
            queries=(
                Query(f"{_by_pod(GPU_UTILIZATION)} / 100", "{{pod}}"),
                Query(_by_pod(TENSOR_ACTIVITY), "{{pod}} tensor cores"),
            ),
        ),
        Panel(
            title="GPU memory usage",
            description="Weights, KV cache and buffers. It is constant after a worker has started. Near 100 "
            "% the next allocation may fail.",
            unit=PERCENT,
            queries=(
                Query(
                    f"{_by_pod(GPU_MEMORY_USED, 'sum')} / ({_by_pod(GPU_MEMORY_USED, 'sum')} + "
                    f"{_by_pod(GPU_MEMORY_FREE, 'sum')})",
                    "{{pod}}",
                ),
            ),
        ),
        Panel(
            title="Last GPU error (Xid)",
            description="Code of the last Xid error of each GPU, or 0. NVIDIA's "
            "list of Xid errors says which of them require draining the node.",
            unit=count("Xid code, not a quantity"),
            queries=(Query(_by_pod(XID, "max"), "{{pod}}"),),
        ),
    ),
)

DASHBOARD = Dashboard(
    name="workers",
    title="Baton: Prefill and decode",
    description="Load, KV cache, KV transfer and GPUs of prefill and decode workers.",
    variables=(CLUSTER, NAMESPACE, SERVICE, ROLE, WORKER),
    rows=(LOAD, KV_CACHE, TRANSFER, GPUS),
    annotations=(ROLLOUTS,),
)
