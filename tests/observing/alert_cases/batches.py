"""Cases of alerts on batches."""

from __future__ import annotations

from baton_api import metrics
from tests.observing.alert_series import SERVICE, Case, constant, counter, stopped_counter

CASES = (
    Case(
        "BatonBatchesStuck",
        "ticket",
        constant(metrics.BATCH_LINES_LEFT, 100, **SERVICE),
        {
            **constant(metrics.BATCH_LINES_LEFT, 100, **SERVICE),
            **counter(metrics.BATCH_LINES, 1, **SERVICE, result="completed"),
        },
        at=45,
    ),
    Case(
        "BatonBatchesLate",
        "ticket",
        constant(metrics.BATCHES_LATE, 1, **SERVICE),
        constant(metrics.BATCHES_LATE, 0, **SERVICE),
    ),
    Case(
        "BatonBatchLinesFailing",
        "info",
        {
            **counter(metrics.BATCH_LINES, 5, **SERVICE, result="completed"),
            **counter(metrics.BATCH_LINES, 5, **SERVICE, result="failed"),
        },
        {
            **counter(metrics.BATCH_LINES, 50, **SERVICE, result="completed"),
            **counter(metrics.BATCH_LINES, 5, **SERVICE, result="failed"),
        },
        at=45,
    ),
    Case(
        "BatonBatchStorageFailing",
        "ticket",
        counter(metrics.BATCH_STORAGE_ERRORS, 1, **SERVICE, error="unavailable"),
        stopped_counter(metrics.BATCH_STORAGE_ERRORS, 1, 10, **SERVICE, error="unavailable"),
    ),
)
