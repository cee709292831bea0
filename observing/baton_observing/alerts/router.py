"""Alerts on routers (no worker, overload, a stale view of workers, invalid configuration) and on batches."""

from __future__ import annotations

from baton_api import metrics
from baton_api.metrics import Metric
from baton_observing.alerts.alert import SERVICE, Alert, Severity
from baton_observing.alerts.objectives import enough_requests
from baton_observing.objectives import BY_SERVICE, REQUESTS
from baton_observing.promql import NOT_BACKGROUND, Scope, ratio

NOW = Scope("5m")

UNAVAILABLE = NOW.gauge(
    metrics.ROUTER_WORKER_STATE, *BY_SERVICE, "role", "worker", how="max", state="=~down|ejected"
)
AVAILABLE = NOW.gauge(metrics.ROUTER_WORKER_STATE, *BY_SERVICE, state="=~ready|full|half_open")

QUEUE_AGE = NOW.gauge(metrics.ROUTER_QUEUE_AGE, *BY_SERVICE, "class", how="max", class_=NOT_BACKGROUND)
QUEUE_DEPTH = NOW.gauge(metrics.ROUTER_QUEUE_DEPTH, *BY_SERVICE, class_=NOT_BACKGROUND)
QUEUE_GROWTH = NOW.over_time("deriv", metrics.ROUTER_QUEUE_DEPTH, *BY_SERVICE, class_=NOT_BACKGROUND)
REJECTED = NOW.rate(metrics.ROUTER_REJECTS, *BY_SERVICE, reason="=~full|late|waited|unready")

CACHE_IGNORED = NOW.gauge(metrics.ROUTER_CACHE_IGNORED, *BY_SERVICE, "worker", how="max")
NO_KV_EVENTS = NOW.gauge(metrics.ROUTER_KV_DEGRADED, *BY_SERVICE, "worker", how="max")


def _ratio_of_requests(part: str) -> str:
    return ratio(part, REQUESTS.over("5m"))


def _remaining(end: Metric, lifetime: Metric) -> str:
    return f"({NOW.series(end)} - time()) / {NOW.series(lifetime)}"


CERTIFICATE_REMAINING = (
    "min by (namespace, service) ("
    f"{_remaining(metrics.ROUTER_CERTIFICATE_END, metrics.ROUTER_CERTIFICATE_LIFE)} or "
    f"{_remaining(metrics.WORKER_CERTIFICATE_END, metrics.WORKER_CERTIFICATE_LIFE)})"
)


def _certificate(severity: Severity, remaining: float) -> Alert:
    """Return an alert. cert-manager renews a certificate when a third of its lifetime remains."""
    return Alert(
        name="BatonCertificateExpiring",
        severity=severity,
        summary=f"{SERVICE}: the mutual TLS certificate has {{{{ $value | humanizePercentage }}}} of its "
        "lifetime left.",
        expression=f"{CERTIFICATE_REMAINING} < {remaining}",
        duration="10m",
    )


ALERTS = (
    Alert(
        name="BatonNoWorker",
        severity="page",
        summary=f"{SERVICE}: requests arrive and the router has no available worker.",
        expression=f"{AVAILABLE} == 0 and {REQUESTS.over('5m')} > 0",
        duration="3m",
    ),
    Alert(
        name="BatonOverloaded",
        severity="page",
        summary=f"{SERVICE}: a request of class {{{{ $labels.class }}}} has been queued for "
        "{{ $value | humanizeDuration }}.",
        expression=f"{QUEUE_AGE} > 30",
    ),
    Alert(
        name="BatonOverloaded",
        severity="ticket",
        summary=f"{SERVICE}: {{{{ $value | humanizePercentage }}}} of requests are rejected for lack of "
        "capacity.",
        expression=f"{_ratio_of_requests(REJECTED)} > 0.01 and {enough_requests('5m')}",
    ),
    Alert(
        name="BatonOverloaded",
        severity="info",
        summary=f"{SERVICE}: {{{{ $value }}}} requests are queued and the queue grows.",
        expression=f"{QUEUE_DEPTH} > 10 and {QUEUE_GROWTH} > 0",
    ),
    Alert(
        name="BatonWorkersDown",
        severity="ticket",
        summary=f"{SERVICE}: {{{{ $value }}}} {{{{ $labels.role }}}} workers are down or ejected.",
        expression=f"count by (namespace, service, role) ({UNAVAILABLE} > 0)",
        duration="10m",
    ),
    Alert(
        name="BatonSchedulerUnreachable",
        severity="ticket",
        summary=f"{SERVICE}: {{{{ $value | humanizePercentage }}}} of requests are rejected because the "
        "scheduler process does not answer.",
        expression=_ratio_of_requests(NOW.rate(metrics.ROUTER_SCHEDULER_UNAVAILABLE, *BY_SERVICE))
        + " > 0.01",
    ),
    Alert(
        name="BatonRouterSlow",
        severity="ticket",
        summary=f"{SERVICE}: the router's event loop lags by {{{{ $value | humanizeDuration }}}}.",
        expression=f"{NOW.quantile(0.99, metrics.ROUTER_LOOP_LAG, *BY_SERVICE)} > 0.25",
        duration="10m",
    ),
    Alert(
        name="BatonRouterBackgroundErrors",
        severity="ticket",
        summary=f"{SERVICE}: the router's {{{{ $labels.task }}}} loop keeps failing.",
        expression=f"{NOW.increase(metrics.ROUTER_BACKGROUND_ERRORS, *BY_SERVICE, 'task')} > 0",
        duration="10m",
    ),
    Alert(
        name="BatonTenantsFileInvalid",
        severity="ticket",
        summary=f"{SERVICE}: the tenants file is invalid; the previous version stays in effect.",
        expression=f"{NOW.gauge(metrics.ROUTER_TENANTS_STALE, *BY_SERVICE, how='max')} > 0",
    ),
    Alert(
        name="BatonRetrying",
        severity="info",
        summary=f"{SERVICE}: {{{{ $value | humanizePercentage }}}} of requests are retried elsewhere.",
        expression=f"{_ratio_of_requests(NOW.rate(metrics.ROUTER_RETRIES, *BY_SERVICE))} > 0.05 and "
        f"{enough_requests('5m')}",
        duration="10m",
    ),
    Alert(
        name="BatonCacheStateStale",
        severity="info",
        summary=f"{SERVICE}: the router's view of the prefix cache of {{{{ $labels.worker }}}} is wrong or "
        "out of date.",
        expression=f"({CACHE_IGNORED} > 0) or ({NO_KV_EVENTS} > 0)",
        duration="15m",
    ),
    _certificate("ticket", 0.2),
    _certificate("page", 0.05),
)


SHORT, LONG = Scope("5m"), Scope("15m")

LINES_LEFT = SHORT.gauge(metrics.BATCH_LINES_LEFT, *BY_SERVICE, how="max")
LINES = LONG.rate(metrics.BATCH_LINES, *BY_SERVICE)
FAILED_LINES = LONG.rate(metrics.BATCH_LINES, *BY_SERVICE, result="failed")

BATCH_ALERTS = (
    Alert(
        name="BatonBatchesStuck",
        severity="ticket",
        summary=f"{SERVICE}: {{{{ $value }}}} batch lines are left and none completes.",
        expression=f"{LINES_LEFT} > 0 unless {LINES} > 0",
        duration="15m",
    ),
    Alert(
        name="BatonBatchesLate",
        severity="ticket",
        summary=f"{SERVICE}: {{{{ $value }}}} batches are likely to miss their completion window.",
        expression=f"{SHORT.gauge(metrics.BATCHES_LATE, *BY_SERVICE, how='max')} > 0",
    ),
    Alert(
        name="BatonBatchStorageFailing",
        severity="ticket",
        summary=f"{SERVICE}: the batch database or file storage is {{{{ $labels.error }}}}.",
        expression=f"{SHORT.increase(metrics.BATCH_STORAGE_ERRORS, *BY_SERVICE, 'error')} > 0",
    ),
    Alert(
        name="BatonBatchLinesFailing",
        severity="info",
        summary=f"{SERVICE}: {{{{ $value | humanizePercentage }}}} of batch lines fail.",
        expression=f"{ratio(FAILED_LINES, LINES)} > 0.2 and "
        f"{LONG.increase(metrics.BATCH_LINES, *BY_SERVICE)} > 20",
        duration="15m",
    ),
)
