"""The namespace whose pods may read metrics past the network policies."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator import names
from baton_operator.reconcilers.plan import OperatorDefaults, plan_service
from tests.operator.test_mutual_tls import PAIR, SECRET, settled


def rules(spec: dict[str, Any], monitoring: str, policy: str) -> list[dict[str, Any]]:
    """Return the ingress rules of one policy, of an operator with this metrics namespace."""
    cluster = settled(spec)
    images = OperatorDefaults(
        "registry.example/worker:1", "registry.example/router:1", metrics_namespace=monitoring
    )
    plan = plan_service(cluster.observe(), images, cluster.now)
    objects = [*cluster.objects.values(), *plan.apply]  # applied objects replace existing ones
    policies = [
        one for one in objects if one["kind"] == "NetworkPolicy" and policy in one["metadata"]["name"]
    ]
    ingress: list[dict[str, Any]] = policies[-1]["spec"]["ingress"]
    return ingress


def secured(**security: Any) -> dict[str, Any]:
    return {**PAIR, "security": security}


def namespace(name: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "as the operator was told": (PAIR, "monitoring", "monitoring"),
    "as the service says": (secured(metricsNamespace="observers"), "monitoring", "observers"),
    "nobody, as the service says": (secured(metricsNamespace=""), "monitoring", ""),
    "nobody, as the operator was told": (PAIR, "", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_network_policy_worker_metrics_open_to_one_namespace(case: str) -> None:
    spec, monitoring, expected = CASES[case]
    ports = [{"protocol": "TCP", "port": 8000}]
    from_namespaces = [
        one
        for one in rules(spec, monitoring, "workers")
        if any("namespaceSelector" in peer for peer in one.get("from", []))
    ]
    assert from_namespaces == ([{"from": [namespace(expected)], "ports": ports}] if expected else [])


def test_network_policy_mutual_tls_needs_no_rule_for_metrics() -> None:
    assert rules(SECRET, "monitoring", "workers") == rules(SECRET, "", "workers")


def test_network_policy_router_metrics_open_to_prometheus_and_operator() -> None:
    for spec in (PAIR, secured(ingressNamespaceLabels={"team": "a"})):
        api, metrics = rules(spec, "monitoring", "router")
        assert namespace("monitoring") in metrics["from"]
        assert namespace("monitoring") not in api.get("from", [])
        api, metrics = rules(spec, "", "router")
        assert namespace("monitoring") not in metrics["from"]
        assert [port["port"] for port in metrics["ports"]] == [names.ROUTER_METRICS_PORT]
    api, _ = rules(PAIR, "monitoring", "router")
    assert "from" not in api, "all may"
