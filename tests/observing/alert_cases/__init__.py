"""Cases of every alert, in modules named like those of `baton_observing.alerts`."""

from __future__ import annotations

from tests.observing.alert_cases import batches, objectives, operator, router, services, workers

CASES = (
    *objectives.CASES,
    *router.CASES,
    *workers.CASES,
    *batches.CASES,
    *services.CASES,
    *operator.CASES,
)
