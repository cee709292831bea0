"""What goes wrong with batches: nobody works on them, they will be late, their store fails."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.alerts.alert import WHICH, Alert
from baton_observing.promql import Scope, ratio

BY = ("namespace", "service")
SHORT, LONG = Scope("5m"), Scope("15m")

ALERTS = (
    Alert(
        name="BatonBatchesStuck",
        severity="ticket",
        summary=f"{WHICH}: {{{{ $value }}}} lines of batches are left, and none gets done.",
        expression=f"{SHORT.now(metrics.BATCH_LINES_LEFT, *BY, how='max')} > 0 unless "
        f"{LONG.per_second(metrics.BATCH_LINES, *BY)} > 0",
        lasting="15m",
    ),
    Alert(
        name="BatonBatchesLate",
        severity="ticket",
        summary=f"{WHICH}: {{{{ $value }}}} batches will hardly be done in time.",
        expression=f"{SHORT.now(metrics.BATCHES_LATE, *BY, how='max')} > 0",
    ),
    Alert(
        name="BatonBatchLinesFailing",
        severity="ticket",
        summary=f"{WHICH}: {{{{ $value | humanizePercentage }}}} of the lines of batches fail.",
        expression=ratio(
            LONG.per_second(metrics.BATCH_LINES, *BY, result="failed"),
            LONG.per_second(metrics.BATCH_LINES, *BY),
        )
        + f" > 0.2 and {LONG.times(metrics.BATCH_LINES, *BY)} > 20",
        lasting="15m",
    ),
    Alert(
        name="BatonBatchStorageFailing",
        severity="ticket",
        summary=f"{WHICH}: the ledger or the store of files is {{{{ $labels.error }}}}.",
        expression=f"{SHORT.times(metrics.BATCH_STORAGE_ERRORS, *BY, 'error')} > 0",
    ),
)
