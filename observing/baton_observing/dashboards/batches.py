"""The dashboard "Batches": progress, results, runners and storage of batches."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.dashboards.panels import (
    CLUSTER,
    NAMESPACE,
    PERCENT,
    REQUESTS_PER_SECOND,
    ROLLOUTS,
    SELECTED,
    SERVICE,
    Dashboard,
    Panel,
    Query,
    Row,
    count,
    per_second,
)
from baton_observing.promql import IN_BACKGROUND, NOT_BACKGROUND, or_zero, ratio

PROGRESS = Row(
    "Progress",
    (
        Panel(
            title="Unfinished batches",
            description="By status. A batch that stays in validating or finalizing is not being processed.",
            unit=count("batches"),
            queries=(
                Query(
                    SELECTED.gauge(
                        metrics.BATCHES,
                        "status",
                        how="max",
                        status="=~validating|in_progress|finalizing|cancelling",
                    ),
                    "{{status}}",
                ),
            ),
            kind="stacked",
            runbook="BatonBatchesStuck",
        ),
        Panel(
            title="Lines left",
            description="Lines of running batches that have no result yet. It should fall.",
            unit=count("lines"),
            queries=(Query(SELECTED.gauge(metrics.BATCH_LINES_LEFT, how="max"), "lines"),),
            runbook="BatonBatchesStuck",
        ),
        Panel(
            title="Late batches",
            description="Batches that have used 90 % of their completion window and completed less than 90 % "
            "of their lines.",
            unit=count("batches"),
            queries=(Query(SELECTED.gauge(metrics.BATCHES_LATE, how="max"), "late"),),
            threshold=1,
            runbook="BatonBatchesLate",
        ),
    ),
)

RESULTS = Row(
    "Results",
    (
        Panel(
            title="Completed lines",
            description="Results written, by outcome. Failed lines are in the error file of their batch.",
            unit=per_second("lines"),
            queries=(Query(SELECTED.rate(metrics.BATCH_LINES, "result"), "{{result}}"),),
            kind="stacked",
            runbook="BatonBatchLinesFailing",
        ),
        Panel(
            title="Retried lines",
            description="By the outcome of the failed attempt. busy is normal: the service has no free "
            "capacity. Other outcomes point to problems of workers.",
            unit=per_second("lines"),
            queries=(Query(SELECTED.rate(metrics.BATCH_RETRIES, "outcome"), "{{outcome}}"),),
            kind="stacked",
        ),
        Panel(
            title="Failed lines",
            description="Ratio of lines that failed. The usual cause is an invalid request: see the error "
            "file of the batch.",
            unit=PERCENT,
            queries=(
                Query(
                    or_zero(
                        ratio(
                            SELECTED.rate(metrics.BATCH_LINES, result="failed"),
                            SELECTED.rate(metrics.BATCH_LINES),
                        )
                    ),
                    "failed",
                ),
            ),
            runbook="BatonBatchLinesFailing",
        ),
    ),
)

RESOURCES = Row(
    "Runners, storage and capacity",
    (
        Panel(
            title="Runners",
            description="Running batches, and those that have a runner. Fewer runners than batches: a runner "
            "ended or has not started; another one takes over when the lease expires.",
            unit=count("batches"),
            queries=(
                Query(SELECTED.gauge(metrics.BATCH_RUNNERS, how="max"), "with a runner"),
                Query(SELECTED.gauge(metrics.BATCHES, how="max", status="in_progress"), "in progress"),
            ),
            runbook="BatonBatchesStuck",
        ),
        Panel(
            title="Storage errors",
            description="Failed calls to the batch database or the file storage: unavailable or full. No "
            "result is lost, but batches make no progress.",
            unit=per_second("errors"),
            queries=(Query(SELECTED.rate(metrics.BATCH_STORAGE_ERRORS, "error"), "{{error}}"),),
            runbook="BatonBatchStorageFailing",
        ),
        Panel(
            title="Batch and other requests",
            description="Requests that no client waits for, and all others. Batches use the capacity that "
            "other classes leave.",
            unit=REQUESTS_PER_SECOND,
            queries=(
                Query(or_zero(SELECTED.rate(metrics.ROUTER_REQUESTS, class_=IN_BACKGROUND)), "batch"),
                Query(SELECTED.rate(metrics.ROUTER_REQUESTS, class_=NOT_BACKGROUND), "others"),
            ),
            kind="stacked",
        ),
    ),
)

DASHBOARD = Dashboard(
    name="batches",
    title="Baton: Batches",
    description="Progress, results, runners and storage of batches.",
    variables=(CLUSTER, NAMESPACE, SERVICE),
    rows=(PROGRESS, RESULTS, RESOURCES),
    annotations=(ROLLOUTS,),
)
