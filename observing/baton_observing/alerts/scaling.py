"""What goes wrong with scaling: it does not know the load, may not follow it, or follows too eagerly."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.alerts.alert import WHICH, Alert
from baton_observing.alerts.objectives import within_its_own
from baton_observing.promql import Scope
from baton_observing.recording import LATE, SLOW

BY = ("namespace", "service")
NOW, LONG = Scope("5m"), Scope("30m")

AGE = NOW.now(metrics.AUTOSCALER_METRICS_AGE, *BY, how="max")
RECOMMENDED = NOW.now(metrics.AUTOSCALER_RECOMMENDED, *BY, "role", how="max")
DECIDED = NOW.now(metrics.AUTOSCALER_DESIRED, *BY, "role", how="max")

ALERTS = (
    Alert(
        name="BatonMetricsLost",
        severity="ticket",
        summary=f"{WHICH}: the autoscaler has had no metrics for {{{{ $value | humanizeDuration }}}}.",
        expression=f"{AGE} > 120",
    ),
    Alert(
        name="BatonScalingLimited",
        severity="ticket",
        summary=f"{WHICH}: the load asks for more {{{{ $labels.role }}}} workers than there may be, and "
        f"clients wait.",
        expression=f"{RECOMMENDED} > {DECIDED} and on (namespace, service) "
        f"({LATE.over('5m')} {within_its_own(1)} or {SLOW.over('5m')} {within_its_own(1)})",
        lasting="10m",
    ),
    Alert(
        name="BatonGpuBudgetUsedUp",
        severity="ticket",
        summary=f"{WHICH}: {{{{ $labels.role }}}} needs more workers than the budget of accelerators allows.",
        expression=NOW.over("max", metrics.AUTOSCALER_DECIDED_BY, *BY, "role", of="max", reason="GpuBudget")
        + " == 1",
        lasting="30m",
    ),
    Alert(
        name="BatonScalingFlapping",
        severity="ticket",
        summary=f"{WHICH}: the number of {{{{ $labels.role }}}} workers changed {{{{ $value }}}} times in "
        f"30 minutes.",
        expression=f"{LONG.over('changes', metrics.OPERATOR_DESIRED, *BY, 'role', of='max')} > 8",
        lasting="1m",
    ),
)
