"""All alerts, in two groups: routers and workers, and what the operator reports."""

from __future__ import annotations

from baton_observing.alerts import objectives, router, services, workers

SERVING = (*objectives.ALERTS, *router.ALERTS, *workers.ALERTS, *router.BATCH_ALERTS)
"""About routers and workers, with or without an operator."""

OPERATING = (*services.ALERTS, *services.OPERATOR_ALERTS)
"""About metrics that only an operator exports."""

ALERTS = (*SERVING, *OPERATING)
