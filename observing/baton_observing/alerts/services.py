"""What goes wrong with services in a cluster, as their operator sees them."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.alerts.alert import WHICH, Alert
from baton_observing.promql import Scope

BY = ("namespace", "service")
NOW, LONG = Scope("5m"), Scope("6h")

WANTED = NOW.now(metrics.OPERATOR_DESIRED, *BY, "role", how="max", role="!=router")
READY = NOW.now(metrics.OPERATOR_READY, *BY, "role", how="max", role="!=router")
SEEN = NOW.now(metrics.WORKER_RUNNING, *BY, "role", how="count")
ALONE = NOW.now(metrics.WORKER_RUNNING, *BY, "role", how="count", role="both")
"""What workers call the role that the operator calls decode, in a service without prefill workers."""


def _condition(type_: str, status: str) -> str:
    return f"{NOW.now(metrics.OPERATOR_CONDITION, *BY, how='max', type=type_, status=status)} == 1"


def _last(condition: str) -> str:
    """When that last was so within six hours; nothing if it never was."""
    return f"max_over_time(timestamp({condition})[{LONG.window}:1m])"


def _none_ready(role: str) -> str:
    """
    None is ready that should be, and one was since the role last had zero replicas.

    A first start and a scale from zero may take as long as the model loads.
    """
    wanted = NOW.now(metrics.OPERATOR_DESIRED, *BY, how="max", role=role)
    ready = NOW.now(metrics.OPERATOR_READY, *BY, how="max", role=role)
    was, slept = _last(f"{ready} > 0"), _last(f"{wanted} == 0")
    return f"{ready} == 0 and {wanted} > 0 and {was} > 0 unless {slept} >= {was}"


ALERTS = (
    *(
        Alert(
            name=f"BatonNo{role.capitalize()}",
            severity="page",
            summary=f"{WHICH}: no {role}{'' if role == 'router' else ' worker'} is ready any more.",
            expression=_none_ready(role),
            lasting="3m",
        )
        for role in ("decode", "prefill", "router")
    ),
    Alert(
        name="BatonServiceNotReady",
        severity="ticket",
        summary=f"{WHICH} is not ready.",
        expression=f"{_condition('Ready', '!=True')} and sum by (namespace, service) ({WANTED}) > 0",
        lasting="15m",
    ),
    Alert(
        name="BatonModelMissing",
        severity="ticket",
        summary=f"{WHICH}: the model's files are still not there.",
        expression=_condition("ModelReady", "!=True"),
        lasting="30m",
    ),
    Alert(
        name="BatonSpecUnsupported",
        severity="ticket",
        summary=f"{WHICH} asks for something that this cluster does not have.",
        expression=_condition("SpecSupported", "!=True"),
    ),
    Alert(
        name="BatonRolloutStuck",
        severity="ticket",
        summary=f"{WHICH}: what it should be has not come to be for half an hour.",
        expression=_condition("Progressing", "True"),
        lasting="30m",
    ),
    Alert(
        name="BatonRolledBack",
        severity="ticket",
        summary=f"{WHICH}: the newest generation failed and was taken back.",
        expression=_condition("Degraded", "True"),
        lasting="1m",
    ),
    Alert(
        name="BatonMetricsMissing",
        severity="ticket",
        summary=f"{WHICH}: {{{{ $labels.role }}}} workers are ready, but Prometheus has no metrics of them.",
        expression=f'{READY} > 0 unless ({SEEN} or label_replace({ALONE}, "role", "decode", "", ""))',
        lasting="10m",
    ),
)
