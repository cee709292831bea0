"""Connections of the operator's pods that the chart's network policy allows."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator import names
from baton_operator.settings import OperatorSettings
from tests.charts.helm import NAMESPACE, VALUES, Manifest, of_kind, render
from tests.operator import network_policies
from tests.operator.network_policies import NAME, Peer, allows
from tests.operator.test_network_policies import RESTRICTED, roles, service_objects

MONITORING = "monitoring"
NAMESPACES = {one: {NAME: one} for one in (NAMESPACE, MONITORING, "kube-system", "models", "strangers")}
PROMETHEUS = Peer(MONITORING, {"app.kubernetes.io/name": "prometheus"}, "10.3.0.1")
API_SERVER, DATABASE = Peer(address="198.51.100.1"), Peer(address="198.51.100.2")
DNS = Peer("kube-system", {"k8s-app": "kube-dns"}, "10.6.0.1")
TEST = Peer(NAMESPACE, {}, "10.2.0.9")
STRANGER = Peer("strangers", {}, "10.5.0.1")
METRICS = OperatorSettings.model_fields["port"].default

NO_VALUES: Manifest = {}
EVERYTHING = dict(VALUES["everything"])
BY_PORT = {"autoscaling": {"prometheusUrl": "http://vmselect.monitoring:8481/select/0/prometheus"}}
BY_SCHEME = {"autoscaling": {"prometheusUrl": "http://prometheus.monitoring/api"}}
OVER_TLS = {
    "autoscaling": {"prometheusUrl": "https://[2001:db8::1]/prometheus"},
    "networkPolicy": {"apiServerPorts": [6443], "prometheusPorts": []},
}
RENAMED: dict[str, Any] = {"nameOverride": "relay", "fullnameOverride": "relay-one"}

CONNECTIONS: list[tuple[str, Manifest, str | Peer, str | Peer, int, bool]] = [
    ("the operator asks the API server", NO_VALUES, "operator", API_SERVER, 443, True),
    ("or what is behind its Service", NO_VALUES, "operator", API_SERVER, 6443, True),
    ("the operator asks DNS", NO_VALUES, "operator", DNS, 53, True),
    ("the operator asks a service's own Prometheus", NO_VALUES, "operator", PROMETHEUS, 9090, True),
    ("the operator asks its Prometheus", BY_PORT, "operator", PROMETHEUS, 8481, True),
    ("whose pods listen elsewhere than its Service", BY_SCHEME, "operator", PROMETHEUS, 9090, True),
    ("by the port of its scheme", BY_SCHEME, "operator", PROMETHEUS, 80, True),
    ("which may be TLS", OVER_TLS, "operator", PROMETHEUS, 443, True),
    ("with other values, none by default", OVER_TLS, "operator", PROMETHEUS, 9090, False),
    (
        "the operator reads a router's metrics",
        NO_VALUES,
        "operator",
        "router",
        names.ROUTER_METRICS_PORT,
        True,
    ),
    ("under another name too", RENAMED, "operator", "router", names.ROUTER_METRICS_PORT, True),
    ("Prometheus reads the operator's metrics", NO_VALUES, PROMETHEUS, "operator", METRICS, True),
    ("from the namespace that is named", EVERYTHING, PROMETHEUS, "operator", 9000, True),
    ("and no other", EVERYTHING, STRANGER, "operator", 9000, False),
    ("helm test reads them", EVERYTHING, TEST, "operator", 9000, True),
    ("the operator reaches nothing else", NO_VALUES, "operator", DATABASE, 5432, False),
    ("nobody reaches another port of it", NO_VALUES, PROMETHEUS, "operator", 22, False),
    ("a stranger reaches no restricted router", NO_VALUES, STRANGER, "router", names.ROUTER_PORT, False),
    ("nor the metrics of any", NO_VALUES, STRANGER, "router", names.ROUTER_METRICS_PORT, False),
]


@pytest.mark.parametrize("case", CONNECTIONS, ids=lambda case: case[0])
def test_policies_allow_what_the_operator_does_and_no_more(
    case: tuple[str, Manifest, str | Peer, str | Peer, int, bool],
) -> None:
    """The chart's policy together with those that the operator makes for a service."""
    _, values, source, target, port, expected = case
    chart, service = render(values), service_objects(RESTRICTED)
    (deployment,) = of_kind(chart, "Deployment")
    pods = {"operator": Peer.of(deployment["spec"]["template"], NAMESPACE, "10.2.0.1"), **roles(service)}
    source, target = (pods[one] if isinstance(one, str) else one for one in (source, target))
    policies = network_policies.of([*chart, *service])
    protocol = "UDP" if target is DNS else "TCP"
    assert allows(policies, NAMESPACES, source, target, port, protocol) is expected
