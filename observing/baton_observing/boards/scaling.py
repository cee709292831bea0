"""How many workers there are, how many there should be and who says so, and what a rollout does."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.panels import HERE, Board, Panel, Query, Row
from baton_observing.promql import or_zero
from baton_observing.variables import NAMESPACE, SERVICE

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
                Query(
                    or_zero(HERE.now(metrics.AUTOSCALER_RECOMMENDED, "role", how="max")), "{{role}} by load"
                ),
                Query(or_zero(HERE.now(metrics.AUTOSCALER_DESIRED, "role", how="max")), "{{role}} decided"),
            ),
            runbook="BatonScalingFlapping",
        ),
        Panel(
            title="Changes",
            meaning="Times that the number of replicas was changed within the window, by direction.",
            unit="none",
            queries=(
                Query(
                    or_zero(HERE.times(metrics.AUTOSCALER_DECISIONS, "role", "direction")),
                    "{{role}} {{direction}}",
                ),
            ),
            runbook="BatonScalingFlapping",
        ),
    ),
)

REASONS = Row(
    "Why?",
    (
        Panel(
            title="Reason of the last decision",
            meaning="1 for the one that holds. docs/kubernetes.md explains each.",
            unit="none",
            queries=(
                Query(
                    or_zero(HERE.now(metrics.AUTOSCALER_DECIDED_BY, "role", "reason", how="max") + " > 0"),
                    "{{role}}: {{reason}}",
                ),
            ),
            kind="stacked",
        ),
        Panel(
            title="Not made smaller because",
            meaning="Why a role keeps workers that its load does not need. It never shrinks on doubt.",
            unit="none",
            queries=(
                Query(
                    or_zero(HERE.now(metrics.AUTOSCALER_HELD, "role", "reason", how="max") + " > 0"),
                    "{{role}}: {{reason}}",
                ),
            ),
            kind="stacked",
        ),
        Panel(
            title="Metrics that the autoscaler lacks",
            meaning="Inputs that could not be had, and for how long there have been none at all. While "
            "they are "
            "missing nothing is made smaller.",
            unit="none",
            queries=(
                Query(
                    or_zero(HERE.now(metrics.AUTOSCALER_UNKNOWN, "input", how="max") + " > 0"), "no {{input}}"
                ),
                Query(or_zero(HERE.now(metrics.AUTOSCALER_METRICS_AGE, how="max")), "age in s"),
            ),
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
            runbook="BatonRolloutStuck",
        ),
        Panel(
            title="Rollbacks",
            meaning="Generations that failed and were taken back: kubectl describe isvc says what was wrong.",
            unit="none",
            queries=(Query(or_zero(HERE.times(metrics.OPERATOR_ROLLBACKS, "service")), "{{service}}"),),
            runbook="BatonRolledBack",
        ),
        Panel(
            title="Conditions that hold",
            meaning="Ready, ModelReady, PrefillReady, DecodeReady, RouterReady and SpecSupported should be "
            "there; "
            "Progressing and Degraded should not for long.",
            unit="none",
            queries=(
                Query(
                    "sum by (type) ("
                    + HERE.now(
                        metrics.OPERATOR_CONDITION, "namespace", "service", "type", how="max", status="True"
                    )
                    + ")",
                    "{{type}}",
                ),
            ),
            kind="stacked",
            runbook="BatonServiceNotReady",
        ),
    ),
)

BOARD = Board(
    "scaling",
    "Baton: Scaling and rollout",
    "How many workers there are, how many there should be and why, and how a new generation takes over.",
    (NAMESPACE, SERVICE),
    (REPLICAS, REASONS, ROLLOUT),
)
