"""Whether batches get done in time, and what they wait for."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.annotations import ROLLOUTS
from baton_observing.panels import HERE, Board, Panel, Query, Row
from baton_observing.promql import or_zero, ratio
from baton_observing.variables import CLUSTER, NAMESPACE, SERVICE

PROGRESS = Row(
    "Will they be done in time?",
    (
        Panel(
            title="Batches that are not done",
            meaning="By status, as the ledger has them. What is validating or finalizing for long has no "
            "keeper.",
            unit="none",
            queries=(
                Query(
                    HERE.now(
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
            meaning="Lines of batches in progress that have no result yet. It should fall.",
            unit="short",
            queries=(Query(HERE.now(metrics.BATCH_LINES_LEFT, how="max"), "lines"),),
            runbook="BatonBatchesStuck",
        ),
        Panel(
            title="Late batches",
            meaning="Nine tenths of their time have passed, and less than nine tenths of their lines are "
            "done.",
            unit="none",
            queries=(Query(HERE.now(metrics.BATCHES_LATE, how="max"), "late"),),
            limit=1,
            runbook="BatonBatchesLate",
        ),
    ),
)

WORK = Row(
    "What becomes of their lines?",
    (
        Panel(
            title="Lines done",
            meaning="Results that came into the ledger, a second. Failed ones are in the error file of "
            "their batch.",
            unit="cps",
            queries=(Query(HERE.per_second(metrics.BATCH_LINES, "result"), "{{result}}"),),
            kind="stacked",
            runbook="BatonBatchLinesFailing",
        ),
        Panel(
            title="Lines tried again",
            meaning="By how the try before ended. Busy: the service has no room now, which is well; all "
            "others are "
            "trouble of workers.",
            unit="cps",
            queries=(Query(HERE.per_second(metrics.BATCH_RETRIES, "outcome"), "{{outcome}}"),),
            kind="stacked",
        ),
        Panel(
            title="Share of failed lines",
            meaning="Mostly what was asked: see the error file.",
            unit="percentunit",
            queries=(
                Query(
                    or_zero(
                        ratio(
                            HERE.per_second(metrics.BATCH_LINES, result="failed"),
                            HERE.per_second(metrics.BATCH_LINES),
                        )
                    ),
                    "failed",
                ),
            ),
            runbook="BatonBatchLinesFailing",
        ),
    ),
)

MEANS = Row(
    "Is there what they need?",
    (
        Panel(
            title="Runners",
            meaning="Batches in progress that somebody works on. Fewer than batches in progress: a runner "
            "died, or "
            "has not been started; its lease ends and another one takes over.",
            unit="none",
            queries=(
                Query(HERE.now(metrics.BATCH_RUNNERS, how="max"), "with a runner"),
                Query(HERE.now(metrics.BATCHES, how="max", status="in_progress"), "in progress"),
            ),
            runbook="BatonBatchesStuck",
        ),
        Panel(
            title="Errors of ledger and files",
            meaning="Calls that failed, a second: unavailable, or full. Nothing is lost meanwhile, but "
            "nothing gets "
            "done.",
            unit="ops",
            queries=(Query(HERE.per_second(metrics.BATCH_STORAGE_ERRORS, "error"), "{{error}}"),),
            runbook="BatonBatchStorageFailing",
        ),
        Panel(
            title="Requests of batches",
            meaning="Of all requests, those of class batch: they take what the others leave.",
            unit="reqps",
            queries=(
                Query(or_zero(HERE.per_second(metrics.ROUTER_REQUESTS, class_="batch")), "batch"),
                Query(HERE.per_second(metrics.ROUTER_REQUESTS, class_="!=batch"), "all others"),
            ),
            kind="stacked",
        ),
    ),
)

BOARD = Board(
    "batches",
    "Baton: Batches",
    "Whether batches get done in time, and what keeps them from it.",
    (CLUSTER, NAMESPACE, SERVICE),
    (PROGRESS, WORK, MEANS),
    (ROLLOUTS,),
)
