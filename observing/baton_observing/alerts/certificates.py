"""Certificates that nobody renews: by how much of their time is left, be that a day or a year."""

from __future__ import annotations

from baton_api import metrics
from baton_api.metrics import Metric
from baton_observing.alerts.alert import WHICH, Alert, Severity
from baton_observing.promql import Scope

NOW = Scope("5m")


def _left(end: Metric, life: Metric) -> str:
    return f"({NOW.series(end)} - time()) / {NOW.series(life)}"


LEFT = (
    "min by (namespace, service) ("
    f"{_left(metrics.ROUTER_CERTIFICATE_END, metrics.ROUTER_CERTIFICATE_LIFE)} or "
    f"{_left(metrics.WORKER_CERTIFICATE_END, metrics.WORKER_CERTIFICATE_LIFE)})"
)


def _ending(severity: Severity, left: float) -> Alert:
    return Alert(
        name="BatonCertificateEnding",
        severity=severity,
        summary=f"{WHICH}: the certificate between routers and workers has "
        "{{ $value | humanizePercentage }} of its time left.",
        expression=f"{LEFT} < {left}",
        lasting="10m",
    )


ALERTS = (_ending("ticket", 0.2), _ending("page", 0.05))
"""cert-manager renews at a third."""
