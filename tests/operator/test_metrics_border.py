"""Who is let in to read metrics, past the policies that keep strangers away."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.reconcilers.plan import OperatorDefaults, plan_service
from tests.operator.test_mutual_tls import PAIR, SECRET, settled


def rules(spec: dict[str, Any], told: str, policy: str) -> list[dict[str, Any]]:
    """Of one policy of a service, by an operator that was told of this namespace."""
    cluster = settled(spec)
    images = OperatorDefaults(
        "registry.example/worker:1", "registry.example/router:1", metrics_namespace=told
    )
    made = plan_service(cluster.observe(), images, cluster.now)
    objects = [*cluster.objects.values(), *made.apply]  # what is applied comes over what is there
    found = [one for one in objects if one["kind"] == "NetworkPolicy" and policy in one["metadata"]["name"]]
    ingress: list[dict[str, Any]] = found[-1]["spec"]["ingress"]
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
def test_metrics_of_workers_are_read_from_one_namespace_at_one_port(case: str) -> None:
    spec, told, expected = CASES[case]
    ports = [{"protocol": "TCP", "port": 8000}]
    from_namespaces = [
        one
        for one in rules(spec, told, "workers")
        if any("namespaceSelector" in peer for peer in one.get("from", []))
    ]
    assert from_namespaces == ([{"from": [namespace(expected)], "ports": ports}] if expected else [])


def test_where_workers_want_certificates_metrics_have_a_port_that_is_open() -> None:
    assert rules(SECRET, "monitoring", "workers") == rules(SECRET, "", "workers")


def test_routers_that_are_not_open_to_all_are_open_to_who_reads_metrics() -> None:
    some = secured(ingressNamespaceLabels={"team": "a"})
    (rule,) = rules(some, "monitoring", "router")
    assert namespace("monitoring") in rule["from"]
    (rule,) = rules(some, "", "router")
    assert namespace("monitoring") not in rule["from"]
    (rule,) = rules(PAIR, "monitoring", "router")
    assert "from" not in rule, "all may"
