"""The dashboards, from what clients notice to its causes."""

from __future__ import annotations

from baton_observing.dashboards import batches, operator, router, scaling, service, workers

DASHBOARDS = (
    service.DASHBOARD,
    workers.DASHBOARD,
    router.DASHBOARD,
    scaling.DASHBOARD,
    batches.DASHBOARD,
    operator.DASHBOARD,
)
