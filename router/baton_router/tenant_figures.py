"""What is measured of the file of tenants, which is looked at for it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from baton_api import metrics
from baton_router.tenants import Tenants


class TenantFigures(Collector):
    """How many there are, and whether that is what the file says."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    def collect(self) -> Iterator[Family]:
        self._tenants.look()
        for metric, value in (
            (metrics.ROUTER_TENANTS, len(self._tenants)),
            (metrics.ROUTER_TENANTS_STALE, bool(self._tenants.problem)),
        ):
            yield GaugeMetricFamily(metric.name, metric.help, value=float(value))
