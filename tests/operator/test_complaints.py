"""Complaints about other operators that no other test covers: docs/contributing/operator-defects.md."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from baton_api import labels
from baton_operator.crd import RESOURCES, Resource
from baton_operator.manifests.exposure import GATEWAY_API
from baton_operator.manifests.objects import Manifest
from tests.charts.helm import VALUES, render
from tests.operator.fake_cluster import FakeCluster

PAIR: dict[str, Any] = {"model": {"uri": "builtin://smollm2"}, "prefill": {}, "decode": {}}
ROUTED: dict[str, Any] = {
    **PAIR,
    "exposure": {"type": "HTTPRoute", "hosts": ["a.example"], "gatewayRefs": [{"name": "gateway"}]},
}
SPREAD: dict[str, Any] = {
    **PAIR,
    "decode": {"placement": {"topologySpreadConstraints": [{"topologyKey": "kubernetes.io/hostname"}]}},
}

ANNOTATIONS_LIMIT = 262_144
"""Bytes that all annotations of an object may have: `kubectl apply` writes the whole object into one."""


def settled(spec: dict[str, Any]) -> FakeCluster:
    cluster = FakeCluster(spec)
    cluster.apis = frozenset({GATEWAY_API})
    cluster.settle()
    return cluster


def of(cluster: FakeCluster, kind: str) -> list[Manifest]:
    return [one for key, one in sorted(cluster.objects.items()) if key[1] == kind]


def test_plan_route_comes_after_its_backend_service() -> None:
    """Row 3: a route without backends is never written."""
    cluster = FakeCluster(ROUTED)
    cluster.apis = frozenset({GATEWAY_API})
    order = [(one["kind"], one["metadata"]["name"]) for one in cluster.plan().apply]
    (route,) = (one for one in cluster.plan().apply if one["kind"] == "HTTPRoute")
    for rule in route["spec"]["rules"]:
        assert rule["backendRefs"]
        for backend in rule["backendRefs"]:
            assert order.index(("Service", backend["name"])) < order.index(("HTTPRoute", "chat"))


@pytest.mark.parametrize("values", list(VALUES.values()), ids=list(VALUES))
def test_chart_has_no_admission_webhooks(values: dict[str, Any]) -> None:
    """Row 6: without webhooks no deadline of one stands in the way of `kubectl apply`."""
    assert not [one["kind"] for one in render(values) if "Webhook" in one["kind"]]


@pytest.mark.parametrize("kind", RESOURCES, ids=lambda one: one.kind)
def test_crd_fits_kubectls_annotation_limit(kind: Resource) -> None:
    """Row 7: far from the limit, so that it stays so."""
    assert len(json.dumps(kind.definition)) < ANNOTATIONS_LIMIT / 2


def test_rollout_in_progress_is_ready_and_progressing() -> None:
    """Row 13: requests are answered, and status distinguishes the two revisions."""
    cluster = settled(PAIR)
    assert cluster.condition("Ready") == ("True", "Serving")
    cluster.change({**PAIR, "engine": {"image": "registry.example/worker:2"}})
    cluster.reconcile()
    assert cluster.condition("Ready") == cluster.condition("Available") == ("True", "RollingOut")
    assert cluster.condition("Progressing") == ("True", "RollingOut")
    status = cluster.service["status"]
    assert status["currentRevision"] != status["updateRevision"]
    cluster.settle()
    assert cluster.condition("Ready") == ("True", "Serving")


def test_plan_stripped_annotations_keep_the_revision() -> None:
    """Row 15: its name is in names and labels, so what strips annotations brings forth no other one."""
    cluster = settled(PAIR)
    before = set(cluster.objects)
    for one in cluster.objects.values():
        one["metadata"].pop("annotations", None)
    cluster.settle()
    assert set(cluster.objects) == before
    assert len(cluster.service["status"]["revisions"]) == 1


def test_plan_topology_spread_counts_only_the_pods_revision() -> None:
    """Row 16."""
    (decode,) = (one for one in of(settled(SPREAD), "Deployment") if "decode" in one["metadata"]["name"])
    (spread,) = decode["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert spread["matchLabelKeys"] == [labels.REVISION]


def test_plan_change_of_one_role_makes_a_revision_of_both() -> None:
    """Row 24, as it is meant: only the two that were started together are a pair."""
    cluster = settled(PAIR)
    (before,) = cluster.service["status"]["revisions"]
    cluster.change({**copy.deepcopy(PAIR), "decode": {"image": "registry.example/worker:2"}})
    cluster.settle()
    after = cluster.service["status"]["currentRevision"]
    assert after != before["name"]
    names = {one["metadata"]["name"] for one in of(cluster, "Deployment") if one["spec"]["replicas"]}
    assert names == {"chat-router", f"chat-prefill-{after}", f"chat-decode-{after}"}


def test_plan_prefill_worker_advertises_its_pod_address() -> None:
    """Row 37: at the port that its container declares."""
    (prefill,) = (one for one in of(settled(PAIR), "Deployment") if "prefill" in one["metadata"]["name"])
    (container,) = prefill["spec"]["template"]["spec"]["containers"]
    (control,) = (one["containerPort"] for one in container["ports"] if one["name"] == "control")
    assert {"--control-host=$(POD_IP)", f"--control-port={control}"} <= set(container["args"])
    (address,) = (one for one in container["env"] if one["name"] == "POD_IP")
    assert address["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
