"""
Alerts on services in a cluster, as the operator reports them (replicas, conditions, autoscaling), and on the
operator itself.
"""

from __future__ import annotations

from baton_api import metrics
from baton_observing.alerts.alert import SERVICE, Alert, Severity
from baton_observing.alerts.objectives import above_latency_budget
from baton_observing.objectives import BY_SERVICE, FIRST_BYTE_LATE, TOKENS_SLOW
from baton_observing.promql import Scope, ratio

NOW, HALF_HOUR = Scope("5m"), Scope("30m")
HISTORY = "6h"
BY_ROLE = (*BY_SERVICE, "role")

WANTED_WORKERS = NOW.gauge(metrics.OPERATOR_DESIRED, *BY_ROLE, how="max", role="!=router")
READY_WORKERS = NOW.gauge(metrics.OPERATOR_READY, *BY_ROLE, how="max", role="!=router")
SCRAPED_WORKERS = NOW.gauge(metrics.WORKER_RUNNING, *BY_ROLE, how="count")
AGGREGATED = NOW.gauge(metrics.WORKER_RUNNING, *BY_ROLE, how="count", role="both")
"""Without prefill workers, the operator's role `decode` is the workers' role `both`."""

METRICS_AGE = NOW.gauge(metrics.AUTOSCALER_METRICS_AGE, *BY_SERVICE, how="max")
RECOMMENDED = NOW.gauge(metrics.AUTOSCALER_RECOMMENDED, *BY_ROLE, how="max")
DESIRED = NOW.gauge(metrics.AUTOSCALER_DESIRED, *BY_ROLE, how="max")
BUDGET_EXHAUSTED = NOW.over_time("max", metrics.AUTOSCALER_DECIDED_BY, *BY_ROLE, of="max", reason="GpuBudget")


def _condition(type_: str, status: str) -> str:
    return f"{NOW.gauge(metrics.OPERATOR_CONDITION, *BY_SERVICE, how='max', type=type_, status=status)} == 1"


def _last_time(condition: str) -> str:
    """Return when the condition last held within six hours, as a Unix time."""
    return f"max_over_time(timestamp({condition})[{HISTORY}:1m])"


def _no_ready_replicas(severity: Severity, roles: str) -> Alert:
    """
    Return an alert on roles that lost their last ready replica.

    It stays silent while a model loads at a first start or a scale from zero, however long that takes.
    """
    wanted = NOW.gauge(metrics.OPERATOR_DESIRED, *BY_ROLE, how="max", role=roles)
    ready = NOW.gauge(metrics.OPERATOR_READY, *BY_ROLE, how="max", role=roles)
    was_ready, was_zero = _last_time(f"{ready} > 0"), _last_time(f"{wanted} == 0")
    return Alert(
        name="BatonNoReadyReplicas",
        severity=severity,
        summary=f"{SERVICE}: no {{{{ $labels.role }}}} replica is ready any more.",
        expression=f"{ready} == 0 and {wanted} > 0 and {was_ready} > 0 unless {was_zero} >= {was_ready}",
        duration="3m",
    )


ALERTS = (
    _no_ready_replicas("page", "=~decode|router"),
    _no_ready_replicas("ticket", "prefill"),
    Alert(
        name="BatonServiceNotReady",
        severity="ticket",
        summary=f"{SERVICE} is not ready.",
        expression=f"{_condition('Ready', '!=True')} and sum by (namespace, service) ({WANTED_WORKERS}) > 0",
        duration="15m",
    ),
    Alert(
        name="BatonRolloutStuck",
        severity="ticket",
        summary=f"{SERVICE}: a rollout has not finished within half an hour.",
        expression=_condition("Progressing", "True"),
        duration="30m",
    ),
    Alert(
        name="BatonRolledBack",
        severity="ticket",
        summary=f"{SERVICE}: the newest revision failed and was rolled back.",
        expression=_condition("Degraded", "True"),
        duration="1m",
    ),
    Alert(
        name="BatonModelMissing",
        severity="info",
        summary=f"{SERVICE}: the model files are still not downloaded.",
        expression=_condition("ModelReady", "!=True"),
        duration="30m",
    ),
    Alert(
        name="BatonSpecUnsupported",
        severity="info",
        summary=f"{SERVICE} uses an API that this cluster does not have.",
        expression=_condition("SpecSupported", "!=True"),
    ),
    Alert(
        name="BatonMetricsMissing",
        severity="ticket",
        summary=f"{SERVICE}: {{{{ $labels.role }}}} workers are ready but have no metrics in Prometheus.",
        expression=f"{READY_WORKERS} > 0 unless "
        f'({SCRAPED_WORKERS} or label_replace({AGGREGATED}, "role", "decode", "", ""))',
        duration="10m",
    ),
    Alert(
        name="BatonAutoscalerMetricsMissing",
        severity="ticket",
        summary=f"{SERVICE}: the autoscaler has had no metrics for {{{{ $value | humanizeDuration }}}}.",
        expression=f"{METRICS_AGE} > 120",
    ),
    Alert(
        name="BatonScalingLimited",
        severity="ticket",
        summary=f"{SERVICE}: the load needs more {{{{ $labels.role }}}} workers than the limits allow, and a "
        "latency objective is missed.",
        expression=f"{RECOMMENDED} > {DESIRED} and on (namespace, service) "
        f"({FIRST_BYTE_LATE.over('5m')} {above_latency_budget(1)} or "
        f"{TOKENS_SLOW.over('5m')} {above_latency_budget(1)})",
        duration="10m",
    ),
    Alert(
        name="BatonScalingLimited",
        severity="info",
        summary=f"{SERVICE}: the GPU budget holds back {{{{ $labels.role }}}} workers.",
        expression=f"{BUDGET_EXHAUSTED} == 1",
        duration="30m",
    ),
    Alert(
        name="BatonScalingFlapping",
        severity="info",
        summary=f"{SERVICE}: the replicas of {{{{ $labels.role }}}} changed {{{{ $value }}}} times in 30 "
        "minutes.",
        expression=f"{HALF_HOUR.over_time('changes', metrics.OPERATOR_DESIRED, *BY_ROLE, of='max')} > 8",
        duration="1m",
    ),
)


BY_POD = ("namespace", "pod")

LEADER = f"{NOW.gauge(metrics.OPERATOR_LEADER, *BY_POD, how='max')} == 1"
WATCH_AGE = NOW.gauge(metrics.OPERATOR_WATCH_AGE, *BY_POD, how="max")
QUEUE_AGE = NOW.gauge(metrics.OPERATOR_QUEUE_OLDEST, *BY_POD, how="max")
RECONCILES = NOW.rate(metrics.OPERATOR_RECONCILE, "kind", suffix="_count")
FAILED_RECONCILES = NOW.rate(metrics.OPERATOR_RECONCILE, "kind", suffix="_count", result="error")
API_REQUESTS = NOW.rate(metrics.OPERATOR_API)
FAILED_API_REQUESTS = NOW.rate(metrics.OPERATOR_API, code="=~0|429|5..")

OPERATOR_ALERTS = (
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
