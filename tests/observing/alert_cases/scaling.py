"""Scaling that cannot see, may not grow, or does not come to rest."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.promql import Scope
from tests.observing.told_series import ENOUGH, OF, TOKEN, Case, level, streams

CASES = (
    Case(
        "BatonMetricsLost",
        "ticket",
        level(metrics.AUTOSCALER_METRICS_AGE, 200, **OF),
        level(metrics.AUTOSCALER_METRICS_AGE, 20, **OF),
    ),
    Case(
        "BatonScalingLimited",
        "ticket",
        {
            **level(metrics.AUTOSCALER_RECOMMENDED, 5, **OF, role="decode"),
            **level(metrics.AUTOSCALER_DESIRED, 2, **OF, role="decode"),
            **ENOUGH,
            **streams(*TOKEN, 5, 10),
        },
        {
            **level(metrics.AUTOSCALER_RECOMMENDED, 5, **OF, role="decode"),
            **level(metrics.AUTOSCALER_DESIRED, 2, **OF, role="decode"),
            **ENOUGH,
            **streams(*TOKEN, 10, 10),
        },
    ),
    Case(
        "BatonGpuBudgetUsedUp",
        "ticket",
        level(metrics.AUTOSCALER_DECIDED_BY, 1, **OF, role="decode", reason="GpuBudget"),
        {
            # It was so for twenty minutes; since then the demand has what it needs.
            Scope("").series(
                metrics.AUTOSCALER_DECIDED_BY, **OF, role="decode", reason="GpuBudget"
            ): "1x20 _x400",
            **level(metrics.AUTOSCALER_DECIDED_BY, 1, **OF, role="decode", reason="Steady"),
        },
        at=40,
    ),
    Case(
        "BatonScalingFlapping",
        "ticket",
        {Scope("").series(metrics.OPERATOR_DESIRED, **OF, role="decode"): "1 2 " * 250},
        {Scope("").series(metrics.OPERATOR_DESIRED, **OF, role="decode"): "1+0x10 2+0x10 3+0x10 4+0x400"},
        at=35,
    ),
)
