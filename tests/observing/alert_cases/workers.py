"""Cases of alerts on workers."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.promql import Scope
from tests.observing.alert_series import DECODE, PREFILL, SERVICE, Case, constant, counter, workers

FAILURES = counter(metrics.WORKER_TRANSFER_FAILURES, 5, **DECODE, transport="none", reason="transfer_failed")

CASES = (
    Case(
        "BatonTransferFailing",
        "ticket",
        {
            **counter(metrics.WORKER_TRANSFER_SECONDS, 100, "_count", **DECODE, transport="nixl/ucx"),
            **counter(
                metrics.WORKER_TRANSFER_FAILURES, 5, **DECODE, transport="none", reason="transfer_failed"
            ),
        },
        {
            **counter(metrics.WORKER_TRANSFER_SECONDS, 1000, "_count", **DECODE, transport="nixl/ucx"),
            **counter(
                metrics.WORKER_TRANSFER_FAILURES, 5, **DECODE, transport="none", reason="transfer_failed"
            ),
        },
    ),
    Case(
        "BatonTransferFailing",
        "page",
        FAILURES,
        {
            **counter(metrics.WORKER_TRANSFER_SECONDS, 100, "_count", **DECODE, transport="nixl/ucx"),
            **counter(
                metrics.WORKER_TRANSFER_FAILURES, 5, **DECODE, transport="none", reason="transfer_failed"
            ),
        },
    ),
    Case(
        "BatonTransferFailing",
        "page",
        counter(metrics.ROUTER_DECISIONS, 10, **SERVICE, path="remote", reason="cheaper"),
        {
            **counter(metrics.ROUTER_DECISIONS, 10, **SERVICE, path="remote", reason="cheaper"),
            **counter(metrics.ROUTER_TRANSFER, 9, "_count", **SERVICE),
        },
    ),
    # vLLM's workers count transfers but do not report them to the router.
    Case(
        "BatonTransferFailing",
        "page",
        counter(metrics.ROUTER_DECISIONS, 10, **SERVICE, path="remote", reason="cheaper"),
        {
            **counter(metrics.ROUTER_DECISIONS, 10, **SERVICE, path="remote", reason="cheaper"),
            **counter(metrics.WORKER_TRANSFER_SECONDS, 9, "_count", **DECODE, transport="nixl"),
        },
    ),
    Case(
        "BatonKvCacheFull",
        "info",
        constant(metrics.WORKER_KV_USAGE, 0.99, **DECODE),
        {Scope("").series(metrics.WORKER_KV_USAGE, **DECODE): "0.99 0.5 " * 250},
    ),
    Case(
        "BatonKvQuarantined",
        "info",
        constant(metrics.WORKER_BLOCKS, 3, **DECODE, state="quarantined"),
        {Scope("").series(metrics.WORKER_BLOCKS, **DECODE, state="quarantined"): "3 0 0 " * 160},
    ),
    Case(
        "BatonKvTierFailing",
        "ticket",
        counter(metrics.WORKER_TIER_CORRUPT, 1, **DECODE, tier="disk"),
        counter(metrics.WORKER_TIER_CORRUPT, 0.01, **DECODE, tier="disk"),
    ),
    Case(
        "BatonKvTierFailing",
        "ticket",
        {Scope("").series(metrics.WORKER_TIER_PAUSED, **DECODE, tier="disk"): "1 1 0 " * 160},
        {Scope("").series(metrics.WORKER_TIER_PAUSED, **DECODE, tier="disk"): "1 0 0 " * 160},
    ),
    Case(
        "BatonKvCacheFull",
        "ticket",
        counter(metrics.WORKER_RETRACTIONS, 90, **DECODE),
        counter(metrics.WORKER_RETRACTIONS, 30, **DECODE),
    ),
    Case(
        "BatonImbalance",
        "info",
        {**constant(metrics.WORKER_QUEUED, 5, **PREFILL), **constant(metrics.WORKER_KV_USAGE, 0.1, **DECODE)},
        {**constant(metrics.WORKER_QUEUED, 5, **PREFILL), **constant(metrics.WORKER_KV_USAGE, 0.8, **DECODE)},
        at=45,
    ),
    Case(
        "BatonWorkerSlow",
        "info",
        workers(a="0.01", b="0.01", c="0.1"),
        workers(a="0.01", b="0.1"),  # of two workers, neither is an outlier
        at=45,
    ),
)
