"""
Of each alert, series under which it fires and series, hardly different, under which it stays silent.

Everything is told by the minute, of one service; a number of minutes says when it is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton_api import metrics
from baton_api.metrics import Metric
from baton_observing.promql import Part, Scope

MINUTES = 370
HOUR = 60

Series = dict[str, str]

OF: dict[str, Any] = {"namespace": "models", "service": "chat"}
DECODE: dict[str, Any] = {**OF, "role": "decode", "worker": "decode-0"}
PREFILL: dict[str, Any] = {**OF, "role": "prefill", "worker": "prefill-0"}


@dataclass(frozen=True, slots=True)
class Case:
    """One alert."""

    name: str
    severity: str
    fires: Series
    silent: Series
    at: int = 30


def level(metric: Metric, value: float, **labels: str) -> Series:
    """A gauge that stays what it is."""
    return {Scope("").series(metric, "", **labels): f"{value:g}+0x{MINUTES}"}


def rise(metric: Metric, a_minute: float, part: Part = "", **labels: str) -> Series:
    """A counter."""
    return {Scope("").series(metric, part, **labels): f"0+{a_minute:g}x{MINUTES}"}


def once(metric: Metric, a_minute: float, until: int, **labels: str) -> Series:
    """A counter that moves for some minutes only."""
    most = a_minute * until
    return {Scope("").series(metric, "", **labels): f"0+{a_minute:g}x{until} {most:g}+0x{MINUTES - until}"}


def answered(code: int, a_minute: float) -> Series:
    labels: dict[str, Any] = {
        **OF,
        "path": "/v1/completions",
        "model": "m",
        "class": "default",
        "code": str(code),
    }
    return rise(metrics.ROUTER_REQUESTS, a_minute, **labels)


def streams(metric: Metric, bound: float, well: float, all_: float, class_: str = "default") -> Series:
    """So many a minute, of which so many were within the bound."""
    labels: dict[str, Any] = {**OF, "class": class_}
    return {
        **rise(metric, well, "_bucket", le=str(bound), **labels),
        **rise(metric, all_, "_count", **labels),
    }


def condition(type_: str, status: str) -> Series:
    return level(metrics.OPERATOR_CONDITION, 1, **OF, type=type_, status=status)


def replicas(role: str, wanted: float, ready: str) -> Series:
    labels: dict[str, Any] = {**OF, "role": role}
    return {
        **level(metrics.OPERATOR_DESIRED, wanted, **labels),
        Scope("").series(metrics.OPERATOR_READY, **labels): ready,
    }


def took(worker: str, a_minute: float, bound: str) -> Series:
    """Tokens of a worker, all in one bucket."""
    labels: dict[str, Any] = {**OF, "role": "decode", "worker": worker}
    buckets = ("0.005", "0.01", "0.025", "0.05", "0.1", "+Inf")
    found: Series = {}
    for one in buckets:
        there = one == "+Inf" or float(one) >= float(bound)
        found |= rise(metrics.WORKER_TOKEN, a_minute if there else 0, "_bucket", le=one, **labels)
    return found


def workers(**bounds: str) -> Series:
    found: Series = {}
    for worker, bound in bounds.items():
        found |= took(worker, 60, bound)
    return found


BYTE = (metrics.ROUTER_FIRST_BYTE, 2.5)
TOKEN = (metrics.ROUTER_OUTPUT_TOKEN, 0.05)
ENOUGH = answered(200, 60)
CAME = "1+0x5 0+0x400"
"""Replicas that were ready and are no more."""
NEVER = "0+0x400"

CASES = (
    Case(
        "BatonAvailabilityBurn",
        "page",
        {**answered(200, 98), **answered(503, 2)},
        # As bad, but it has been over for ten minutes.
        {**answered(200, 98), **once(metrics.ROUTER_CUT, 2, 50, **OF, cause="reset")},
        at=HOUR + 5,
    ),
    Case(
        "BatonAvailabilityBurn",
        "ticket",
        {**answered(200, 99), **rise(metrics.ROUTER_CUT, 1, **OF, cause="reset")},
        {**answered(200, 995), **answered(429, 90), **answered(503, 5)},
        at=6 * HOUR + 5,
    ),
    Case(
        "BatonFirstByteBurn",
        "page",
        {**ENOUGH, **streams(*BYTE, 1, 10)},
        # Batches may wait.
        {**ENOUGH, **streams(*BYTE, 9, 10), **streams(*BYTE, 1, 100, "batch")},
        at=HOUR + 5,
    ),
    Case(
        "BatonFirstByteBurn",
        "ticket",
        {**ENOUGH, **streams(*BYTE, 6, 10)},
        {**ENOUGH, **streams(*BYTE, 8, 10)},
        at=6 * HOUR + 5,
    ),
    Case(
        "BatonTokenTimeBurn",
        "page",
        {**ENOUGH, **streams(*TOKEN, 1, 10)},
        {**answered(200, 0.2), **streams(*TOKEN, 0, 0.2)},  # twelve requests in an hour
        at=HOUR + 5,
    ),
    Case(
        "BatonTokenTimeBurn",
        "ticket",
        {**ENOUGH, **streams(*TOKEN, 6, 10)},
        {**ENOUGH, **streams(*TOKEN, 8, 10)},
        at=6 * HOUR + 5,
    ),
    Case(
        "BatonErrors",
        "page",
        {**answered(200, 90), **answered(500, 10)},
        {**answered(200, 90), **answered(400, 10), **answered(499, 10)},
    ),
    Case(
        "BatonNoWorker",
        "page",
        {
            **ENOUGH,
            **level(metrics.ROUTER_WORKER_STATE, 0, **DECODE, state="ready"),
            **level(metrics.ROUTER_WORKER_STATE, 1, **DECODE, state="down"),
        },
        {
            **level(metrics.ROUTER_WORKER_STATE, 0, **DECODE, state="ready"),
            **level(metrics.ROUTER_WORKER_STATE, 1, **DECODE, state="starting"),
        },
    ),
    Case(
        "BatonWorkersMissing",
        "ticket",
        level(metrics.ROUTER_WORKER_STATE, 1, **DECODE, state="down"),
        level(metrics.ROUTER_WORKER_STATE, 1, **DECODE, state="draining"),
    ),
    Case(
        "BatonQueueGrowing",
        "ticket",
        {Scope("").series(metrics.ROUTER_QUEUE_DEPTH, **OF, class_="default"): "0+2x400"},
        {
            Scope("").series(metrics.ROUTER_QUEUE_DEPTH, **OF, class_="default"): "50-1x50",
            Scope("").series(metrics.ROUTER_QUEUE_DEPTH, **OF, class_="batch"): "0+2x400",
        },
    ),
    Case(
        "BatonQueueOld",
        "page",
        level(metrics.ROUTER_QUEUE_AGE, 40, **OF, class_="interactive"),
        level(metrics.ROUTER_QUEUE_AGE, 400, **OF, class_="batch"),
    ),
    Case(
        "BatonSendingAway",
        "ticket",
        {**ENOUGH, **rise(metrics.ROUTER_REJECTS, 5, **OF, reason="full")},
        {**ENOUGH, **rise(metrics.ROUTER_REJECTS, 5, **OF, reason="tokens")},
    ),
    Case(
        "BatonTenantsStale",
        "ticket",
        level(metrics.ROUTER_TENANTS_STALE, 1, **OF),
        level(metrics.ROUTER_TENANTS_STALE, 0, **OF),
    ),
    Case(
        "BatonRetrying",
        "ticket",
        {**ENOUGH, **rise(metrics.ROUTER_RETRIES, 6, **OF, cause="reset")},
        {**ENOUGH, **rise(metrics.ROUTER_RETRIES, 1, **OF, cause="reset")},
    ),
    Case(
        "BatonSchedulerAway",
        "ticket",
        {**ENOUGH, **rise(metrics.ROUTER_UNASKED, 6, **OF, reason="away")},
        {**ENOUGH, **once(metrics.ROUTER_UNASKED, 6, 10, **OF, reason="away")},
    ),
    Case(
        "BatonRouterSlow",
        "ticket",
        {
            **rise(metrics.ROUTER_LOOP_LAG, 500, "_bucket", **OF, le="0.25"),
            **rise(metrics.ROUTER_LOOP_LAG, 600, "_bucket", **OF, le="0.5"),
            **rise(metrics.ROUTER_LOOP_LAG, 600, "_bucket", **OF, le="+Inf"),
        },
        {
            **rise(metrics.ROUTER_LOOP_LAG, 599, "_bucket", **OF, le="0.25"),
            **rise(metrics.ROUTER_LOOP_LAG, 600, "_bucket", **OF, le="0.5"),
            **rise(metrics.ROUTER_LOOP_LAG, 600, "_bucket", **OF, le="+Inf"),
        },
    ),
    Case(
        "BatonCacheIgnored",
        "ticket",
        level(metrics.ROUTER_CACHE_IGNORED, 1, **OF, worker="decode-0"),
        level(metrics.ROUTER_CACHE_IGNORED, 0, **OF, worker="decode-0"),
    ),
    Case(
        "BatonKvEventsMissing",
        "ticket",
        level(metrics.ROUTER_KV_DEGRADED, 1, **OF, worker="decode-0"),
        level(metrics.ROUTER_KV_DEGRADED, 0, **OF, worker="decode-0"),
    ),
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
    Case(
        "BatonBatchesStuck",
        "ticket",
        level(metrics.BATCH_LINES_LEFT, 100, **OF),
        {
            **level(metrics.BATCH_LINES_LEFT, 100, **OF),
            **rise(metrics.BATCH_LINES, 1, **OF, result="completed"),
        },
        at=45,
    ),
    Case(
        "BatonBatchesLate",
        "ticket",
        level(metrics.BATCHES_LATE, 1, **OF),
        level(metrics.BATCHES_LATE, 0, **OF),
    ),
    Case(
        "BatonBatchLinesFailing",
        "ticket",
        {
            **rise(metrics.BATCH_LINES, 5, **OF, result="completed"),
            **rise(metrics.BATCH_LINES, 5, **OF, result="failed"),
        },
        {
            **rise(metrics.BATCH_LINES, 50, **OF, result="completed"),
            **rise(metrics.BATCH_LINES, 5, **OF, result="failed"),
        },
        at=45,
    ),
    Case(
        "BatonBatchStorageFailing",
        "ticket",
        rise(metrics.BATCH_STORAGE_ERRORS, 1, **OF, error="unavailable"),
        once(metrics.BATCH_STORAGE_ERRORS, 1, 10, **OF, error="unavailable"),
    ),
    Case("BatonNoDecode", "page", replicas("decode", 2, CAME), replicas("decode", 0, CAME)),
    Case("BatonNoPrefill", "page", replicas("prefill", 2, CAME), replicas("prefill", 2, NEVER)),
    Case("BatonNoRouter", "page", replicas("router", 2, CAME), replicas("router", 2, "2+0x5 1+0x400")),
    Case(
        "BatonServiceNotReady",
        "ticket",
        {**condition("Ready", "False"), **replicas("decode", 1, NEVER)},
        {**condition("Ready", "False"), **replicas("decode", 0, NEVER), **replicas("router", 1, NEVER)},
    ),
    Case(
        "BatonModelMissing",
        "ticket",
        condition("ModelReady", "False"),
        condition("ModelReady", "True"),
        at=45,
    ),
    Case(
        "BatonSpecUnsupported",
        "ticket",
        condition("SpecSupported", "False"),
        condition("SpecSupported", "True"),
    ),
    Case(
        "BatonRolloutStuck",
        "ticket",
        condition("Progressing", "True"),
        condition("Progressing", "False"),
        at=45,
    ),
    Case("BatonRolledBack", "ticket", condition("Degraded", "True"), condition("Degraded", "False")),
    Case(
        "BatonMetricsMissing",
        "ticket",
        replicas("decode", 1, "1+0x400"),
        {**replicas("decode", 1, "1+0x400"), **level(metrics.WORKER_RUNNING, 0, **DECODE)},
    ),
    Case(
        "BatonMetricsLost",
        "ticket",
        level(metrics.AUTOSCALER_METRICS_AGE, 200, **OF),
        level(metrics.AUTOSCALER_METRICS_AGE, 20, **OF),
    ),
    Case(
        "BatonMetricsLost",
        "page",
        level(metrics.AUTOSCALER_METRICS_AGE, 1000, **OF),
        level(metrics.AUTOSCALER_METRICS_AGE, 200, **OF),
    ),
    Case(
        "BatonScalingLimited",
        "ticket",
        {
            **level(metrics.AUTOSCALER_RECOMMENDED, 5, **OF, role="decode"),
            **level(metrics.AUTOSCALER_DESIRED, 2, **OF, role="decode"),
            **streams(*TOKEN, 5, 10),
        },
        {
            **level(metrics.AUTOSCALER_RECOMMENDED, 5, **OF, role="decode"),
            **level(metrics.AUTOSCALER_DESIRED, 2, **OF, role="decode"),
            **streams(*TOKEN, 10, 10),
        },
    ),
    Case(
        "BatonScalingFlapping",
        "ticket",
        {Scope("").series(metrics.OPERATOR_DESIRED, **OF, role="decode"): "1 2 " * 250},
        {Scope("").series(metrics.OPERATOR_DESIRED, **OF, role="decode"): "1+0x10 2+0x10 3+0x10 4+0x400"},
        at=35,
    ),
    Case(
        "BatonNoLeader",
        "page",
        level(metrics.OPERATOR_LEADER, 0, namespace="baton-system", pod="a"),
        {
            **level(metrics.OPERATOR_LEADER, 0, namespace="baton-system", pod="a"),
            **level(metrics.OPERATOR_LEADER, 1, namespace="baton-system", pod="b"),
        },
    ),
    Case(
        "BatonWatchStale",
        "page",
        {
            **level(metrics.OPERATOR_LEADER, 1, namespace="baton-system", pod="a"),
            **level(metrics.OPERATOR_HEARTBEAT, 200, namespace="baton-system", pod="a"),
        },
        {
            **level(metrics.OPERATOR_LEADER, 0, namespace="baton-system", pod="a"),
            **level(metrics.OPERATOR_HEARTBEAT, 200, namespace="baton-system", pod="a"),
        },
    ),
    Case(
        "BatonOperatorQueueStuck",
        "page",
        level(metrics.OPERATOR_QUEUE_OLDEST, 400, namespace="baton-system", pod="a"),
        level(metrics.OPERATOR_QUEUE_OLDEST, 100, namespace="baton-system", pod="a"),
    ),
    Case(
        "BatonReconcileFailing",
        "ticket",
        {
            **rise(metrics.OPERATOR_RECONCILE, 8, "_count", kind="InferenceService", result="success"),
            **rise(metrics.OPERATOR_RECONCILE, 2, "_count", kind="InferenceService", result="error"),
        },
        {
            **rise(metrics.OPERATOR_RECONCILE, 8, "_count", kind="InferenceService", result="success"),
            **once(metrics.OPERATOR_RECONCILE, 2, 10, kind="InferenceService", result="error"),
        },
        at=45,
    ),
    Case(
        "BatonApiErrors",
        "ticket",
        {
            **rise(metrics.OPERATOR_API, 8, method="PATCH", code="200"),
            **rise(metrics.OPERATOR_API, 2, method="PATCH", code="503"),
        },
        {
            **rise(metrics.OPERATOR_API, 8, method="PATCH", code="200"),
            **rise(metrics.OPERATOR_API, 2, method="PATCH", code="409"),
        },
    ),
)
