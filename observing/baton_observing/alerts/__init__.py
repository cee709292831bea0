"""The alerts: what somebody should do something about, and what has to be so before they are told."""

from __future__ import annotations

from baton_observing.alerts import (
    batches,
    certificates,
    objectives,
    operator,
    router,
    scaling,
    services,
    workers,
)

SERVING = (*objectives.ALERTS, *router.ALERTS, *workers.ALERTS, *certificates.ALERTS, *batches.ALERTS)
"""Of routers and workers, wherever they run."""

OPERATING = (*services.ALERTS, *scaling.ALERTS, *operator.ALERTS)
"""Of what an operator tells: where there is none, these have no place."""

ALERTS = (*SERVING, *OPERATING)
