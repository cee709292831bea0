"""
Metrics of batches, as routers show them.

What stands in the ledger is the same at every router that shares it, so panels take the largest of them;
what was counted is each router's own, so panels add it up.
"""

from __future__ import annotations

from baton_api.metrics.metric import Label, Metric

BATCHES = Metric(
    "baton_batches",
    "gauge",
    "batches",
    "Batches in the ledger by status; the same at every router that shares it.",
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
    "Batches of which nine tenths of the time have passed and less than nine tenths of the lines are done.",
)
BATCH_LINES_LEFT = Metric(
    "baton_batch_lines_left", "gauge", "lines", "Lines of batches in progress that have no result yet."
)
BATCH_RUNNERS = Metric(
    "baton_batch_runners", "gauge", "batches", "Batches in progress that a runner holds a lease of."
)
BATCH_LINES = Metric(
    "baton_batch_lines_total",
    "counter",
    "lines",
    "Lines whose result this router wrote into the ledger.",
    (Label("result", ("completed", "failed")),),
)
BATCH_RETRIES = Metric(
    "baton_batch_retries_total",
    "counter",
    "lines",
    "Times that a runner tried a line again, by how the try before ended, as runners told this router.",
    (Label("outcome", ("busy", "fault", "outage", "lost", "slow", "away")),),
)
BATCH_STORAGE_ERRORS = Metric(
    "baton_batch_storage_errors_total",
    "counter",
    "events",
    "Calls to the ledger or the store of files that failed: it was unavailable, or full.",
    (Label("error", ("unavailable", "full")),),
)
