"""Whether the operator does its work: who leads, what waits, what it is told and how it is answered."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.panels import EVERYWHERE, Board, Panel, Query, Row
from baton_observing.promql import or_zero, ratio
from baton_observing.variables import CLUSTER

ALIVE = Row(
    "Is it alive?",
    (
        Panel(
            title="Leaders",
            meaning="Operators that hold the Lease: always one. 0: nobody looks after services; they go on "
            "serving.",
            unit="none",
            queries=(Query(or_zero(EVERYWHERE.now(metrics.OPERATOR_LEADER)), "leaders"),),
            kind="number",
            width=6,
            runbook="BatonNoLeader",
        ),
        Panel(
            title="Age of the quietest watch",
            meaning="Time since it last brought an event, a bookmark or an answer. A silent watch is begun "
            "anew after 70 s; above 120 s the operator fails its liveness probe.",
            unit="s",
            queries=(Query(EVERYWHERE.now(metrics.OPERATOR_WATCH_AGE, how="max"), "age"),),
            kind="number",
            width=6,
            limit=180,
            runbook="BatonWatchStale",
        ),
        Panel(
            title="Objects that wait",
            meaning="That could be looked at now. It comes back to 0 after each change.",
            unit="none",
            queries=(Query(EVERYWHERE.now(metrics.OPERATOR_QUEUE), "waiting"),),
            kind="number",
            width=6,
        ),
        Panel(
            title="Longest wait",
            meaning="Of an object. Minutes: the API server answers slowly, or not.",
            unit="s",
            queries=(Query(EVERYWHERE.now(metrics.OPERATOR_QUEUE_OLDEST, how="max"), "wait"),),
            kind="number",
            width=6,
            limit=300,
            runbook="BatonOperatorQueueStuck",
        ),
    ),
)

LOOKS = Row(
    "Does it get through?",
    (
        Panel(
            title="Looks at objects",
            meaning="A second, by kind and result. A failed look is tried again, later each time.",
            unit="ops",
            queries=(
                Query(
                    EVERYWHERE.per_second(metrics.OPERATOR_RECONCILE, "kind", "result", part="_count"),
                    "{{kind}} {{result}}",
                ),
            ),
            kind="stacked",
            runbook="BatonReconcileFailing",
        ),
        Panel(
            title="Time of a look",
            meaning="All writes included. Seconds: the API server is slow.",
            unit="s",
            queries=tuple(
                Query(EVERYWHERE.quantile(share, metrics.OPERATOR_RECONCILE), f"p{share * 100:g}")
                for share in (0.5, 0.95, 0.99)
            ),
        ),
        Panel(
            title="Looks that failed",
            meaning="As a share of all; each is tried again. Above a tenth for long: the log says which.",
            unit="percentunit",
            queries=(
                Query(
                    or_zero(
                        ratio(
                            EVERYWHERE.per_second(metrics.OPERATOR_RECONCILE, part="_count", result="error"),
                            EVERYWHERE.per_second(metrics.OPERATOR_RECONCILE, part="_count"),
                        )
                    ),
                    "failed",
                ),
            ),
            limit=0.1,
            runbook="BatonReconcileFailing",
        ),
    ),
)

API = Row(
    "What does Kubernetes say?",
    (
        Panel(
            title="Requests to the API server",
            meaning="By method and status; 0: no answer. Once all is as it should be there are next to "
            "none but those of the Lease: reads come from the cache.",
            unit="reqps",
            queries=(
                Query(EVERYWHERE.per_second(metrics.OPERATOR_API, "method", "code"), "{{method}} {{code}}"),
            ),
            kind="stacked",
            runbook="BatonApiErrors",
        ),
        Panel(
            title="Last event, by kind",
            meaning="Time since the watch last brought an object. Long is normal where nothing changes: the "
            "age of the quietest watch shows whether watches live.",
            unit="s",
            queries=(
                Query(EVERYWHERE.now(metrics.OPERATOR_LAST_EVENT, "resource", how="min"), "{{resource}}"),
            ),
            runbook="BatonWatchStale",
        ),
        Panel(
            title="Services by readiness",
            meaning="How many InferenceServices are ready, are not, and of how many that is unknown.",
            unit="none",
            queries=(
                Query(
                    "count by (status) ("
                    + EVERYWHERE.now(
                        metrics.OPERATOR_CONDITION, "namespace", "service", "status", how="max", type="Ready"
                    )
                    + ")",
                    "{{status}}",
                ),
            ),
            kind="stacked",
            runbook="BatonServiceNotReady",
        ),
    ),
)

BOARD = Board(
    "operator",
    "Baton: Operator",
    "Whether the operator leads, sees, gets through its work and is answered.",
    (CLUSTER,),
    (ALIVE, LOOKS, API),
)
