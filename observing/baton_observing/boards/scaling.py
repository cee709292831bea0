"""How many workers there are, how many there should be and who says so, and what a rollout does."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.annotations import ROLLOUTS
from baton_observing.panels import HERE, Board, Panel, Query, Row, State
from baton_observing.promql import or_zero
from baton_observing.variables import CLUSTER, NAMESPACE, SERVICE

REPLICAS = Row(
    "Are there as many as there should be?",
    (
        Panel(
            title="Replicas",
            meaning="Wanted and ready, by role. Apart for minutes: kubectl describe isvc says why.",
            unit="none",
            queries=(
                Query(HERE.now(metrics.OPERATOR_DESIRED, "role", how="max"), "{{role}} wanted"),
                Query(HERE.now(metrics.OPERATOR_READY, "role", how="max"), "{{role}} ready"),
            ),
            runbook="BatonNoDecode",
        ),
        Panel(
            title="What the load asks for",
            meaning="Replicas that the load alone would ask for, and what was decided. Apart: limits, "
            "budget or a "
            "reason to hold (below).",
            unit="none",
            queries=(
                Query(HERE.now(metrics.AUTOSCALER_RECOMMENDED, "role", how="max"), "{{role}} by load"),
                Query(HERE.now(metrics.AUTOSCALER_DESIRED, "role", how="max"), "{{role}} decided"),
            ),
            runbook="BatonScalingFlapping",
        ),
        Panel(
            title="Changes",
            meaning="Times that the number of replicas was changed within the window, by direction.",
            unit="none",
            queries=(
                Query(
                    or_zero(
                        HERE.times(metrics.AUTOSCALER_DECISIONS, "role", "direction"),
                        role="no",
                        direction="change",
                    ),
                    "{{role}} {{direction}}",
                ),
            ),
            runbook="BatonScalingFlapping",
        ),
    ),
)

NOW = (State(0, "no", "transparent"), State(1, "yes", "blue"))

REASONS = Row(
    "Why?",
    (
        Panel(
            title="Reason of the last decision",
            meaning="Why each role has its number of workers, over time. docs/guides/scaling.md explains it.",
            unit="none",
            queries=(
                Query(
                    HERE.now(metrics.AUTOSCALER_DECIDED_BY, "role", "reason", how="max"),
                    "{{role}}: {{reason}}",
                ),
            ),
            kind="states",
            states=NOW,
            width=12,
        ),
        Panel(
            title="Not made smaller because",
            meaning="Why a role keeps workers that its load does not need. It never shrinks on doubt.",
            unit="none",
            queries=(
                Query(
                    or_zero(
                        HERE.now(metrics.AUTOSCALER_HELD, "role", "reason", how="max"),
                        role="all",
                        reason="nothing holds",
                    ),
                    "{{role}}: {{reason}}",
                ),
            ),
            kind="states",
            states=NOW,
            width=12,
        ),
        Panel(
            title="Inputs that the autoscaler lacks",
            meaning="Inputs that could not be read, over time. While one is unknown nothing is made smaller.",
            unit="none",
            queries=(
                Query(HERE.now(metrics.AUTOSCALER_UNKNOWN, "role", "input", how="max"), "{{role}} {{input}}"),
            ),
            kind="states",
            states=(State(0, "known", "green"), State(1, "unknown", "orange")),
            width=12,
            runbook="BatonMetricsLost",
        ),
        Panel(
            title="Age of the metrics",
            meaning="Time since the autoscaler last had metrics of a service. Above two minutes it is blind.",
            unit="s",
            queries=(Query(HERE.now(metrics.AUTOSCALER_METRICS_AGE, "service", how="max"), "{{service}}"),),
            width=12,
            limit=120,
            runbook="BatonMetricsLost",
        ),
    ),
)

ROLLOUT = Row(
    "What does a rollout do?",
    (
        Panel(
            title="Requests by generation",
            meaning="How many of a hundred requests each generation of workers gets.",
            unit="none",
            queries=(Query(HERE.now(metrics.OPERATOR_WEIGHT, "revision", how="max"), "{{revision}}"),),
            kind="stacked",
            width=12,
            runbook="BatonRolloutStuck",
        ),
        Panel(
            title="Rollbacks",
            meaning="Generations that failed and were taken back: kubectl describe isvc says what was wrong.",
            unit="none",
            queries=(
                Query(
                    or_zero(HERE.times(metrics.OPERATOR_ROLLBACKS, "service"), service="none"), "{{service}}"
                ),
            ),
            width=12,
            runbook="BatonRolledBack",
        ),
    ),
)


def _conditions(types: str) -> str:
    """1 where it is True, 0 where it is False, 2 where that is unknown."""

    def of(status: str) -> str:
        return HERE.now(metrics.OPERATOR_CONDITION, "service", "type", how="max", type=types, status=status)

    return f"{of('True')} or 0 * {of('False')} or 2 * {of('Unknown')}"


CONDITIONS = Row(
    "Is everything as it should be?",
    (
        Panel(
            title="Conditions that should hold",
            meaning="Ready and what it consists of, over time. kubectl describe isvc says why one does not.",
            unit="none",
            queries=(Query(_conditions("!~Progressing|Degraded"), "{{service}} {{type}}"),),
            kind="states",
            states=(State(1, "True", "green"), State(0, "False", "red"), State(2, "Unknown", "gray")),
            width=12,
            runbook="BatonServiceNotReady",
        ),
        Panel(
            title="Conditions that should not last",
            meaning="Progressing while something changes, Degraded after a rollback: neither for long.",
            unit="none",
            queries=(Query(_conditions("=~Progressing|Degraded"), "{{service}} {{type}}"),),
            kind="states",
            states=(State(1, "True", "orange"), State(0, "False", "green"), State(2, "Unknown", "gray")),
            width=12,
            runbook="BatonRolloutStuck",
        ),
    ),
)

BOARD = Board(
    "scaling",
    "Baton: Scaling and rollout",
    "How many workers there are, how many there should be and why, and how a new generation takes over.",
    (CLUSTER, NAMESPACE, SERVICE),
    (REPLICAS, REASONS, ROLLOUT, CONDITIONS),
    (ROLLOUTS,),
)
