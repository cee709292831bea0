"""The operator itself."""

from __future__ import annotations

from baton_api import metrics
from tests.observing.told_series import Case, level, once, rise

CASES = (
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
        "ticket",
        {
            **level(metrics.OPERATOR_LEADER, 1, namespace="baton-system", pod="a"),
            **level(metrics.OPERATOR_WATCH_AGE, 200, namespace="baton-system", pod="a"),
        },
        {
            **level(metrics.OPERATOR_LEADER, 0, namespace="baton-system", pod="a"),
            **level(metrics.OPERATOR_WATCH_AGE, 200, namespace="baton-system", pod="a"),
        },
    ),
    Case(
        "BatonOperatorQueueStuck",
        "ticket",
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
