"""Alerts on the operator: no leader, no progress, failing reconciles or API requests."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.alerts.alert import Alert
from baton_observing.promql import Scope, ratio

NOW = Scope("5m")
BY_POD = ("namespace", "pod")

LEADER = f"{NOW.gauge(metrics.OPERATOR_LEADER, *BY_POD, how='max')} == 1"
WATCH_AGE = NOW.gauge(metrics.OPERATOR_WATCH_AGE, *BY_POD, how="max")
QUEUE_AGE = NOW.gauge(metrics.OPERATOR_QUEUE_OLDEST, *BY_POD, how="max")
RECONCILES = NOW.rate(metrics.OPERATOR_RECONCILE, "kind", suffix="_count")
FAILED_RECONCILES = NOW.rate(metrics.OPERATOR_RECONCILE, "kind", suffix="_count", result="error")
API_REQUESTS = NOW.rate(metrics.OPERATOR_API)
FAILED_API_REQUESTS = NOW.rate(metrics.OPERATOR_API, code="=~0|429|5..")

ALERTS = (
    Alert(
        name="BatonNoLeader",
        severity="page",
        summary="No operator holds the Lease: nothing is reconciled or scaled.",
        expression=f"absent({NOW.series(metrics.OPERATOR_LEADER)} == 1)",
    ),
    Alert(
        name="BatonOperatorStuck",
        severity="ticket",
        summary="{{ $labels.namespace }}/{{ $labels.pod }}: no watch event, or an object queued, for "
        "{{ $value | humanizeDuration }}.",
        expression=f"({WATCH_AGE} > 180 and {LEADER}) or ({QUEUE_AGE} > 300)",
        duration="3m",
    ),
    Alert(
        name="BatonReconcileFailing",
        severity="ticket",
        summary="{{ $value | humanizePercentage }} of reconciles of {{ $labels.kind }} fail.",
        expression=f"{ratio(FAILED_RECONCILES, RECONCILES)} > 0.1",
        duration="15m",
    ),
    Alert(
        name="BatonKubernetesApiErrors",
        severity="info",
        summary="{{ $value | humanizePercentage }} of requests to the Kubernetes API server fail.",
        expression=f"{ratio(FAILED_API_REQUESTS, API_REQUESTS)} > 0.1",
        duration="10m",
    ),
)
