"""What goes wrong with the operator: nobody leads, it sees nothing, it does not get through its work."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.alerts.alert import Alert
from baton_observing.promql import Scope, ratio

NOW = Scope("5m")
PODS = ("namespace", "pod")

LEADS = f"{NOW.now(metrics.OPERATOR_LEADER, *PODS, how='max')} == 1"
LOOKS = NOW.per_second(metrics.OPERATOR_RECONCILE, "kind", part="_count")
FAILED_LOOKS = NOW.per_second(metrics.OPERATOR_RECONCILE, "kind", part="_count", result="error")
CALLS = NOW.per_second(metrics.OPERATOR_API)

ALERTS = (
    Alert(
        name="BatonNoLeader",
        severity="page",
        summary="No operator holds the Lease: nobody looks after services.",
        expression=f"absent({NOW.series(metrics.OPERATOR_LEADER)} == 1)",
    ),
    Alert(
        name="BatonWatchStale",
        severity="ticket",
        summary="A watch of the operator has brought nothing for {{ $value | humanizeDuration }}.",
        expression=f"{NOW.now(metrics.OPERATOR_WATCH_AGE, *PODS, how='max')} > 180 and {LEADS}",
        lasting="2m",
    ),
    Alert(
        name="BatonOperatorQueueStuck",
        severity="ticket",
        summary="An object has waited for the operator for {{ $value | humanizeDuration }}.",
        expression=f"{NOW.now(metrics.OPERATOR_QUEUE_OLDEST, *PODS, how='max')} > 300",
    ),
    Alert(
        name="BatonReconcileFailing",
        severity="ticket",
        summary="{{ $value | humanizePercentage }} of looks at {{ $labels.kind }} fail.",
        expression=f"{ratio(FAILED_LOOKS, LOOKS)} > 0.1",
        lasting="15m",
    ),
    Alert(
        name="BatonApiErrors",
        severity="ticket",
        summary="{{ $value | humanizePercentage }} of requests to the API server fail.",
        expression=f"{ratio(NOW.per_second(metrics.OPERATOR_API, code='=~0|429|5..'), CALLS)} > 0.1",
        lasting="10m",
    ),
)
