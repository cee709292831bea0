"""
Metrics of batches, which routers expose.

Gauges of the ledger are equal on all routers that share it, so panels take their maximum. Counters are of one
router, so panels add them.
"""

from __future__ import annotations

from baton_api.metrics.metric import Label, Metric

BATCHES = Metric(
    "baton_batches",
    "gauge",
    "batches",
    "Batches by status. All routers that share a ledger report the same value.",
    (
        Label(
            "status",
            (
                *("validating", "in_progress", "finalizing", "cancelling"),
                *("completed", "failed", "expired", "cancelled"),
            ),
        ),
    ),
)
BATCHES_LATE = Metric(
    "baton_batches_late",
    "gauge",
    "batches",
    "Batches with less than 90% of their lines done after 90% of their completion window.",
)
BATCH_LINES_LEFT = Metric(
    "baton_batch_lines_left", "gauge", "lines", "Lines without a result in batches in progress."
)
BATCH_RUNNERS = Metric(
    "baton_batch_runners", "gauge", "batches", "Batches in progress whose lease a runner holds."
)
BATCH_LINES = Metric(
    "baton_batch_lines_total",
    "counter",
    "lines",
    "Lines whose result this router recorded, by result.",
    (Label("result", ("completed", "failed")),),
)
BATCH_RETRIES = Metric(
    "baton_batch_retries_total",
    "counter",
    "lines",
    "Retries of lines by runners, by the outcome of the previous attempt.",
    (Label("outcome", ("busy", "fault", "outage", "lost", "slow", "away")),),
)
BATCH_STORAGE_ERRORS = Metric(
    "baton_batch_storage_errors_total",
    "counter",
    "events",
    "Failed calls to the database or the object store, by error.",
    (Label("error", ("unavailable", "full")),),
)
