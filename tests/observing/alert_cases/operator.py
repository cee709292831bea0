"""Cases of alerts on the operator."""

from __future__ import annotations

from baton_api import metrics
from tests.observing.alert_series import Case, constant, counter, stopped_counter

CASES = (
    Case(
        "BatonNoLeader",
        "page",
        constant(metrics.OPERATOR_LEADER, 0, namespace="baton-system", pod="a"),
        {
            **constant(metrics.OPERATOR_LEADER, 0, namespace="baton-system", pod="a"),
            **constant(metrics.OPERATOR_LEADER, 1, namespace="baton-system", pod="b"),
        },
    ),
    Case(
        "BatonOperatorStuck",
        "ticket",
        {
            **constant(metrics.OPERATOR_LEADER, 1, namespace="baton-system", pod="a"),
            **constant(metrics.OPERATOR_WATCH_AGE, 200, namespace="baton-system", pod="a"),
        },
        {
            **constant(metrics.OPERATOR_LEADER, 0, namespace="baton-system", pod="a"),
            **constant(metrics.OPERATOR_WATCH_AGE, 200, namespace="baton-system", pod="a"),
        },
    ),
    Case(
        "BatonOperatorStuck",
        "ticket",
        constant(metrics.OPERATOR_QUEUE_OLDEST, 400, namespace="baton-system", pod="a"),
        constant(metrics.OPERATOR_QUEUE_OLDEST, 100, namespace="baton-system", pod="a"),
    ),
    Case(
        "BatonReconcileFailing",
        "ticket",
        {
            **counter(metrics.OPERATOR_RECONCILE, 8, "_count", kind="InferenceService", result="success"),
            **counter(metrics.OPERATOR_RECONCILE, 2, "_count", kind="InferenceService", result="error"),
        },
        {
            **counter(metrics.OPERATOR_RECONCILE, 8, "_count", kind="InferenceService", result="success"),
            **stopped_counter(metrics.OPERATOR_RECONCILE, 2, 10, kind="InferenceService", result="error"),
        },
        at=45,
    ),
    Case(
        "BatonKubernetesApiErrors",
        "info",
        {
            **counter(metrics.OPERATOR_API, 8, method="PATCH", code="200"),
            **counter(metrics.OPERATOR_API, 2, method="PATCH", code="503"),
        },
        {
            **counter(metrics.OPERATOR_API, 8, method="PATCH", code="200"),
            **counter(metrics.OPERATOR_API, 2, method="PATCH", code="409"),
        },
    ),
)
