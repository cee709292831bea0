"""Alerts on workers: failing KV transfers, a full KV cache, imbalance, one slow worker."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.alerts.alert import SERVICE, Alert
from baton_observing.objectives import BY_SERVICE
from baton_observing.promql import Scope, ratio

SHORT, MEDIUM, LONG = Scope("5m"), Scope("10m"), Scope("15m")

FAILURES = SHORT.rate(metrics.WORKER_TRANSFER_FAILURES, *BY_SERVICE)
TRANSFERS = SHORT.rate(metrics.WORKER_TRANSFER_SECONDS, *BY_SERVICE, suffix="_count")
FAILED_RATIO = ratio(FAILURES, f"({FAILURES} + ({TRANSFERS} or 0 * {FAILURES}))")

SENT_TO_PREFILL = MEDIUM.rate(metrics.ROUTER_DECISIONS, *BY_SERVICE, path="remote")
RECEIVED = MEDIUM.rate(metrics.ROUTER_TRANSFER, *BY_SERVICE, suffix="_count")
COMPLETED = MEDIUM.rate(metrics.WORKER_TRANSFER_SECONDS, *BY_SERVICE, suffix="_count")
"""Only Baton's workers report their transfers to the router as well."""

RETRACTIONS = SHORT.rate(metrics.WORKER_RETRACTIONS, *BY_SERVICE)
KV_USAGE = SHORT.over_time("min", metrics.WORKER_KV_USAGE, *BY_SERVICE, "role", of="max")
QUARANTINED = SHORT.over_time("min", metrics.WORKER_BLOCKS, *BY_SERVICE, "worker", state="quarantined")

CORRUPT = Scope("1h").increase(metrics.WORKER_TIER_CORRUPT, *BY_SERVICE, "worker", "tier")
PAUSED = LONG.over_time("avg", metrics.WORKER_TIER_PAUSED, *BY_SERVICE, "worker", "tier", of="max")
"""Fraction of the time: a tier that fails is tried again in between."""

PREFILL_QUEUED = LONG.over_time("avg", metrics.WORKER_QUEUED, *BY_SERVICE, role="prefill")
PREFILL_QUEUED_TOKENS = LONG.over_time("max", metrics.WORKER_QUEUED_TOKENS, *BY_SERVICE, role="prefill")
DECODE_KV_USAGE = LONG.over_time("avg", metrics.WORKER_KV_USAGE, *BY_SERVICE, of="avg", role="decode")

TOKEN_LATENCY = LONG.quantile(0.5, metrics.WORKER_TOKEN, *BY_SERVICE, "worker")
MEDIAN_TOKEN_LATENCY = f"quantile by (namespace, service) (0.5, {TOKEN_LATENCY})"
AT_LEAST_THREE = f"count by (namespace, service) ({TOKEN_LATENCY}) > 2"
"""Of two workers, neither is an outlier."""

ALERTS = (
    Alert(
        name="BatonTransferFailing",
        severity="ticket",
        summary=f"{SERVICE}: {{{{ $value | humanizePercentage }}}} of KV transfers from prefill fail.",
        expression=f"{FAILED_RATIO} > 0.01",
    ),
    Alert(
        name="BatonTransferFailing",
        severity="page",
        summary=f"{SERVICE}: most KV transfers from prefill workers fail, or none completes.",
        expression=f"({FAILED_RATIO} > 0.25) or "
        f"({SENT_TO_PREFILL} > 0.02 unless ({RECEIVED} > 0 or {COMPLETED} > 0))",
    ),
    Alert(
        name="BatonKvCacheFull",
        severity="ticket",
        summary=f"{SERVICE}: {{{{ $value | humanize }}}} sequences per second are retracted because the KV "
        "cache is full.",
        expression=f"{RETRACTIONS} > 1",
        duration="10m",
    ),
    Alert(
        name="BatonKvCacheFull",
        severity="info",
        summary=f"{SERVICE}: {{{{ $value | humanizePercentage }}}} of a {{{{ $labels.role }}}} worker's KV "
        "cache is in use.",
        expression=f"{KV_USAGE} > 0.95",
    ),
    Alert(
        name="BatonKvQuarantined",
        severity="info",
        summary=f"{SERVICE}: {{{{ $value }}}} KV blocks of {{{{ $labels.worker }}}} stay in quarantine.",
        expression=f"{QUARANTINED} > 0",
        duration="10m",
    ),
    Alert(
        name="BatonKvTierFailing",
        severity="ticket",
        summary=f"{SERVICE}: the {{{{ $labels.tier }}}} tier of {{{{ $labels.worker }}}} has corrupt blocks, "
        "or is left alone.",
        expression=f"({CORRUPT} > 3) or ({PAUSED} > 0.5)",
        duration="10m",
    ),
    Alert(
        name="BatonImbalance",
        severity="info",
        summary=f"{SERVICE}: one role is saturated while the other is idle.",
        expression=f"({PREFILL_QUEUED} > 1 and {DECODE_KV_USAGE} < 0.3) or "
        f"({DECODE_KV_USAGE} > 0.9 and {PREFILL_QUEUED_TOKENS} == 0)",
        duration="15m",
    ),
    Alert(
        name="BatonWorkerSlow",
        severity="info",
        summary=f"{SERVICE}: {{{{ $labels.worker }}}} takes three times as long per token as its peers.",
        expression=f"{TOKEN_LATENCY} > on (namespace, service) group_left() 3 * {MEDIAN_TOKEN_LATENCY} "
        f"and on (namespace, service) {AT_LEAST_THREE}",
        duration="15m",
    ),
)
