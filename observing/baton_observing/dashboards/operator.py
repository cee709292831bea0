"""The dashboard "Operator": leader election, watches, reconciles and Kubernetes API requests."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.dashboards.panels import (
    CLUSTER,
    PERCENT,
    REQUESTS_PER_SECOND,
    SECONDS,
    SELECTED_CLUSTER,
    Dashboard,
    Panel,
    Query,
    Row,
    count,
    per_second,
    quantiles,
)
from baton_observing.promql import or_zero, ratio

STATUS = Row(
    "Current status",
    (
        Panel(
            title="Leaders",
            description="Operators that hold the Lease; always 1. At 0 services keep serving, but nothing is "
            "reconciled or scaled.",
            unit=count("operators"),
            queries=(Query(or_zero(SELECTED_CLUSTER.gauge(metrics.OPERATOR_LEADER)), "leaders"),),
            kind="stat",
            width=6,
            runbook="BatonNoLeader",
        ),
        Panel(
            title="Watch age",
            description="Time since the quietest watch last received anything. A watch restarts after 70 s "
            "of silence; above 120 s the operator fails its liveness probe.",
            unit=SECONDS,
            queries=(Query(SELECTED_CLUSTER.gauge(metrics.OPERATOR_WATCH_AGE, how="max"), "age"),),
            kind="stat",
            width=6,
            threshold=180,
            runbook="BatonOperatorStuck",
        ),
        Panel(
            title="Work queue depth",
            description="Objects queued for reconciliation. It returns to 0 after each change.",
            unit=count("objects"),
            queries=(Query(SELECTED_CLUSTER.gauge(metrics.OPERATOR_QUEUE), "queued"),),
            kind="stat",
            width=6,
        ),
        Panel(
            title="Work queue wait",
            description="Age of the oldest queued object. If it reaches minutes, the API server is slow or "
            "unreachable.",
            unit=SECONDS,
            queries=(Query(SELECTED_CLUSTER.gauge(metrics.OPERATOR_QUEUE_OLDEST, how="max"), "wait"),),
            kind="stat",
            width=6,
            threshold=300,
            runbook="BatonOperatorStuck",
        ),
    ),
)

RECONCILES = Row(
    "Reconciles",
    (
        Panel(
            title="Reconciles",
            description="By kind and result. A failed reconcile is retried with a growing delay.",
            unit=per_second("reconciles"),
            queries=(
                Query(
                    SELECTED_CLUSTER.rate(metrics.OPERATOR_RECONCILE, "kind", "result", suffix="_count"),
                    "{{kind}} {{result}}",
                ),
            ),
            kind="stacked",
            runbook="BatonReconcileFailing",
        ),
        Panel(
            title="Reconcile duration",
            description="Includes all API requests. If it reaches seconds, the API server is slow.",
            unit=SECONDS,
            queries=quantiles(SELECTED_CLUSTER, metrics.OPERATOR_RECONCILE),
        ),
        Panel(
            title="Failed reconciles",
            description="Ratio of reconciles that failed. If it stays above 10 %, the operator's log shows "
            "which objects are affected.",
            unit=PERCENT,
            queries=(
                Query(
                    or_zero(
                        ratio(
                            SELECTED_CLUSTER.rate(
                                metrics.OPERATOR_RECONCILE, suffix="_count", result="error"
                            ),
                            SELECTED_CLUSTER.rate(metrics.OPERATOR_RECONCILE, suffix="_count"),
                        )
                    ),
                    "failed",
                ),
            ),
            threshold=0.1,
            runbook="BatonReconcileFailing",
        ),
    ),
)

API = Row(
    "Kubernetes API",
    (
        Panel(
            title="Kubernetes API requests",
            description="By method and status; 0 means no response. At rest only the Lease causes requests, "
            "because reads come from a cache.",
            unit=REQUESTS_PER_SECOND,
            queries=(
                Query(SELECTED_CLUSTER.rate(metrics.OPERATOR_API, "method", "code"), "{{method}} {{code}}"),
            ),
            kind="stacked",
            runbook="BatonKubernetesApiErrors",
        ),
        Panel(
            title="Time since the last event",
            description="By kind. It is long where nothing changes; Watch age shows whether watches work.",
            unit=SECONDS,
            queries=(
                Query(
                    SELECTED_CLUSTER.gauge(metrics.OPERATOR_LAST_EVENT, "resource", how="min"),
                    "{{resource}}",
                ),
            ),
            runbook="BatonOperatorStuck",
        ),
        Panel(
            title="Services by readiness",
            description="InferenceServices by the status of their condition Ready.",
            unit=count("services"),
            queries=(
                Query(
                    "count by (status) ("
                    + SELECTED_CLUSTER.gauge(
                        metrics.OPERATOR_CONDITION, "namespace", "service", "status", how="max", type="Ready"
                    )
                    + ")",
                    "{{status}}",
                ),
            ),
            kind="stacked",
            runbook="BatonServiceNotReady",
        ),
    ),
)

DASHBOARD = Dashboard(
    name="operator",
    title="Baton: Operator",
    description="Leader election, watches, reconciles and Kubernetes API requests of the operator.",
    variables=(CLUSTER,),
    rows=(STATUS, RECONCILES, API),
)
