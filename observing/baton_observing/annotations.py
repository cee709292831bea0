"""What dashboards mark in all their panels: the beginning of a rollout is seen beside what it changes."""

from __future__ import annotations

from baton_api import metrics
from baton_observing.panels import HERE, Annotation

BY = ("namespace", "service", "revision")
BEFORE = "5m"

_SERVED = f"{HERE.now(metrics.OPERATOR_WEIGHT, *BY, how='max')} > 0"
_SERVED_BEFORE = f"max by ({', '.join(BY)}) ({HERE.series(metrics.OPERATOR_WEIGHT)} offset {BEFORE}) > 0"

ROLLOUTS = Annotation(
    "Rollout",
    "{{service}}: revision {{revision}}",
    f"({_SERVED} unless {_SERVED_BEFORE}) and on (namespace, service) {_SERVED_BEFORE}",
)
"""The first minutes in which a revision gets requests, of services that had another one before."""
