"""What is chosen at a dashboard's top. All of it is chosen at first, series without the label too."""

from __future__ import annotations

from baton_api import metrics
from baton_api.metrics import Metric
from baton_observing.panels import CLUSTER as CLUSTER_CHOSEN
from baton_observing.panels import HERE, Variable
from baton_observing.promql import Scope

IN_CLUSTER = Scope("", (CLUSTER_CHOSEN,))
IN_NAMESPACE = Scope("", (CLUSTER_CHOSEN, 'namespace=~"$namespace"'))


def _values(label: str, title: str, scope: Scope, metric: Metric) -> Variable:
    return Variable(label, title, f"label_values({scope.series(metric)}, {label})")


CLUSTER = _values("cluster", "Cluster", Scope(""), metrics.BUILD_INFO)
NAMESPACE = _values("namespace", "Namespace", IN_CLUSTER, metrics.ROUTER_IN_FLIGHT)
SERVICE = _values("service", "Service", IN_NAMESPACE, metrics.ROUTER_IN_FLIGHT)
MODEL = _values("model", "Model", HERE, metrics.ROUTER_REQUESTS)
TENANT = _values("tenant", "Tenant", HERE, metrics.ROUTER_TENANT_TOKENS)
ROLE = _values("role", "Role", HERE, metrics.WORKER_RUNNING)
WORKER = _values("worker", "Worker", HERE, metrics.WORKER_RUNNING)
