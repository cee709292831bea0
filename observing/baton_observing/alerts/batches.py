"""Alerts on batches: no progress, late, failing lines, unavailable storage."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.alerts.alert import SERVICE, Alert
from baton_observing.objectives import BY_SERVICE
from baton_observing.promql import Scope, ratio

SHORT, LONG = Scope("5m"), Scope("15m")

LINES_LEFT = SHORT.gauge(metrics.BATCH_LINES_LEFT, *BY_SERVICE, how="max")
LINES = LONG.rate(metrics.BATCH_LINES, *BY_SERVICE)
FAILED_LINES = LONG.rate(metrics.BATCH_LINES, *BY_SERVICE, result="failed")

ALERTS = (
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
