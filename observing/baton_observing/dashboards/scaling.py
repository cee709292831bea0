"""The dashboard "Scaling and rollout": replicas, autoscaler decisions, revisions and conditions."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.dashboards.panels import (
    CLUSTER,
    NAMESPACE,
    ROLLOUTS,
    SECONDS,
    SELECTED,
    SERVICE,
    Dashboard,
    Panel,
    Query,
    Row,
    State,
    count,
)
from baton_observing.promql import or_zero

STATE = count("state")
YES_NO = (State(0, "no", "transparent"), State(1, "yes", "blue"))

REPLICAS = Row(
    "Replicas",
    (
        Panel(
            title="Replicas",
            description="Desired and ready replicas by role. If they differ for minutes, run "
            "`kubectl describe bsvc NAME`.",
            unit=count("replicas"),
            queries=(
                Query(SELECTED.gauge(metrics.OPERATOR_DESIRED, "role", how="max"), "{{role}} desired"),
                Query(SELECTED.gauge(metrics.OPERATOR_READY, "role", how="max"), "{{role}} ready"),
            ),
            runbook="BatonNoReadyReplicas",
        ),
        Panel(
            title="Recommended and desired replicas",
            description="Replicas that the load alone requires, and the autoscaler's decision. They differ "
            "because of limits, the GPU budget or a reason to hold (below).",
            unit=count("replicas"),
            queries=(
                Query(
                    SELECTED.gauge(metrics.AUTOSCALER_RECOMMENDED, "role", how="max"),
                    "{{role}} recommended",
                ),
                Query(SELECTED.gauge(metrics.AUTOSCALER_DESIRED, "role", how="max"), "{{role}} desired"),
            ),
            runbook="BatonScalingLimited",
        ),
        Panel(
            title="Scaling events",
            description="Changes of the number of replicas within the window, by direction.",
            unit=count("changes"),
            queries=(
                Query(
                    or_zero(
                        SELECTED.increase(metrics.AUTOSCALER_DECISIONS, "role", "direction"),
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

DECISIONS = Row(
    "Autoscaler",
    (
        Panel(
            title="Reason of the last decision",
            description="Why each role has its number of replicas, over time. docs/guides/scaling.md "
            "explains each reason.",
            unit=STATE,
            queries=(
                Query(
                    SELECTED.gauge(metrics.AUTOSCALER_DECIDED_BY, "role", "reason", how="max"),
                    "{{role}}: {{reason}}",
                ),
            ),
            kind="timeline",
            states=YES_NO,
            width=12,
        ),
        Panel(
            title="Scale-down held by",
            description="Why a role keeps replicas that its load does not need. Without data the autoscaler "
            "never scales down.",
            unit=STATE,
            queries=(
                Query(
                    or_zero(
                        SELECTED.gauge(metrics.AUTOSCALER_HELD, "role", "reason", how="max"),
                        role="all",
                        reason="nothing",
                    ),
                    "{{role}}: {{reason}}",
                ),
            ),
            kind="timeline",
            states=YES_NO,
            width=12,
        ),
        Panel(
            title="Missing inputs",
            description="Inputs that the autoscaler could not read, over time. While one is missing it does "
            "not scale down.",
            unit=STATE,
            queries=(
                Query(
                    SELECTED.gauge(metrics.AUTOSCALER_UNKNOWN, "role", "input", how="max"),
                    "{{role}} {{input}}",
                ),
            ),
            kind="timeline",
            states=(State(0, "known", "green"), State(1, "unknown", "orange")),
            width=12,
            runbook="BatonAutoscalerMetricsMissing",
        ),
        Panel(
            title="Age of the metrics",
            description="Time since the autoscaler last read the metrics of a service. Above 120 s it cannot "
            "follow the load.",
            unit=SECONDS,
            queries=(
                Query(SELECTED.gauge(metrics.AUTOSCALER_METRICS_AGE, "service", how="max"), "{{service}}"),
            ),
            width=12,
            threshold=120,
            runbook="BatonAutoscalerMetricsMissing",
        ),
    ),
)

REVISIONS = Row(
    "Rollout",
    (
        Panel(
            title="Traffic by revision",
            description="Percentage of requests that each revision of workers receives.",
            unit=count("percent of requests"),
            queries=(Query(SELECTED.gauge(metrics.OPERATOR_WEIGHT, "revision", how="max"), "{{revision}}"),),
            kind="stacked",
            width=12,
            runbook="BatonRolloutStuck",
        ),
        Panel(
            title="Rollbacks",
            description="Revisions that failed and were rolled back within the window. "
            "`kubectl describe bsvc NAME` shows the cause.",
            unit=count("rollbacks"),
            queries=(
                Query(
                    or_zero(SELECTED.increase(metrics.OPERATOR_ROLLBACKS, "service"), service="none"),
                    "{{service}}",
                ),
            ),
            width=12,
            runbook="BatonRolledBack",
        ),
    ),
)


def _conditions(types: str) -> str:
    """Return 1 for True, 0 for False, 2 for Unknown."""

    def with_status(status: str) -> str:
        return SELECTED.gauge(
            metrics.OPERATOR_CONDITION, "service", "type", how="max", type=types, status=status
        )

    return f"{with_status('True')} or 0 * {with_status('False')} or 2 * {with_status('Unknown')}"


CONDITIONS = Row(
    "Conditions",
    (
        Panel(
            title="Conditions that should be True",
            description="Ready and its parts, over time. `kubectl describe bsvc NAME` shows why "
            "one is False.",
            unit=STATE,
            queries=(Query(_conditions("!~Progressing|Degraded"), "{{service}} {{type}}"),),
            kind="timeline",
            states=(State(1, "True", "green"), State(0, "False", "red"), State(2, "Unknown", "gray")),
            width=12,
            runbook="BatonServiceNotReady",
        ),
        Panel(
            title="Conditions that should be False",
            description="Progressing during a change, Degraded after a rollback. Neither should last.",
            unit=STATE,
            queries=(Query(_conditions("=~Progressing|Degraded"), "{{service}} {{type}}"),),
            kind="timeline",
            states=(State(1, "True", "orange"), State(0, "False", "green"), State(2, "Unknown", "gray")),
            width=12,
            runbook="BatonRolloutStuck",
        ),
    ),
)

DASHBOARD = Dashboard(
    name="scaling",
    title="Baton: Scaling and rollout",
    description="Replicas, the autoscaler's decisions, rollouts and conditions of services.",
    variables=(CLUSTER, NAMESPACE, SERVICE),
    rows=(REPLICAS, DECISIONS, REVISIONS, CONDITIONS),
    annotations=(ROLLOUTS,),
)
