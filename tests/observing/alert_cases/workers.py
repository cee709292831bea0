"""Workers: too much to do, no room, blocks that do not come over."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.promql import Scope
from tests.observing.told_series import DECODE, OF, PREFILL, Case, level, rise, workers

CASES = (
    Case(
        "BatonTransferFailing",
        "ticket",
        {
            **rise(metrics.WORKER_TRANSFER_SECONDS, 100, "_count", **DECODE, transport="nixl/ucx"),
            **rise(metrics.WORKER_TRANSFER_FAILURES, 5, **DECODE, transport="none", reason="transfer_failed"),
        },
        {
            **rise(metrics.WORKER_TRANSFER_SECONDS, 1000, "_count", **DECODE, transport="nixl/ucx"),
            **rise(metrics.WORKER_TRANSFER_FAILURES, 5, **DECODE, transport="none", reason="transfer_failed"),
        },
    ),
    Case(
        "BatonTransferFailing",
        "page",
        rise(metrics.WORKER_TRANSFER_FAILURES, 5, **DECODE, transport="none", reason="transfer_failed"),
        {
            **rise(metrics.WORKER_TRANSFER_SECONDS, 100, "_count", **DECODE, transport="nixl/ucx"),
            **rise(metrics.WORKER_TRANSFER_FAILURES, 5, **DECODE, transport="none", reason="transfer_failed"),
        },
    ),
    Case(
        "BatonTransfersMissing",
        "page",
        rise(metrics.ROUTER_DECISIONS, 10, **OF, path="remote", reason="cheaper"),
        {
            **rise(metrics.ROUTER_DECISIONS, 10, **OF, path="remote", reason="cheaper"),
            **rise(metrics.ROUTER_TRANSFER, 9, "_count", **OF),
        },
    ),
    Case(
        "BatonKvSaturated",
        "ticket",
        level(metrics.WORKER_KV_USAGE, 0.99, **DECODE),
        {Scope("").series(metrics.WORKER_KV_USAGE, **DECODE): "0.99 0.5 " * 250},
    ),
    Case(
        "BatonKvQuarantined",
        "ticket",
        level(metrics.WORKER_BLOCKS, 3, **DECODE, state="quarantined"),
        {Scope("").series(metrics.WORKER_BLOCKS, **DECODE, state="quarantined"): "3 0 0 " * 160},
    ),
    Case(
        "BatonRetractions",
        "ticket",
        rise(metrics.WORKER_RETRACTIONS, 90, **DECODE),
        rise(metrics.WORKER_RETRACTIONS, 30, **DECODE),
    ),
    Case(
        "BatonImbalance",
        "ticket",
        {**level(metrics.WORKER_QUEUED, 5, **PREFILL), **level(metrics.WORKER_KV_USAGE, 0.1, **DECODE)},
        {**level(metrics.WORKER_QUEUED, 5, **PREFILL), **level(metrics.WORKER_KV_USAGE, 0.8, **DECODE)},
        at=45,
    ),
    Case(
        "BatonWorkerSlow",
        "ticket",
        workers(a="0.01", b="0.01", c="0.1"),
        workers(a="0.01", b="0.1"),  # of two, who is the slow one?
        at=45,
    ),
)
