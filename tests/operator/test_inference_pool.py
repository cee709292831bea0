"""The InferencePool of a service, through which Envoy gateways ask routers for workers."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton_api import labels
from baton_operator.manifests.exposure import GATEWAY_API
from baton_operator.manifests.inference_pool import POOL_API, POOL_KIND
from baton_operator.manifests.objects import Manifest
from baton_operator.names import HTTP_PORT, PICKER_PORT
from tests.operator.fake_cluster import FakeCluster
from tests.router.real_kubernetes import real_kubernetes

PAIR: Manifest = {
    "model": {"uri": "builtin://smollm2"},
    "prefill": {},
    "decode": {},
    "security": {"ingressNamespaceLabels": {"gateways": "yes"}},
}
POOL: Manifest = {"inferencePool": {}}
ROUTE: Manifest = {"type": "HTTPRoute", "hosts": ["chat.example.org"], "gatewayRefs": [{"name": "front"}]}
ASSETS = os.environ.get("KUBEBUILDER_ASSETS", "")
DEFINITION = Path(ASSETS) / "inferencepools.yaml"


def settled(exposure: Manifest, spec: Manifest = PAIR, *apis: str) -> FakeCluster:
    cluster = FakeCluster({**spec, "exposure": exposure})
    cluster.apis = frozenset(apis)
    cluster.settle()
    return cluster


def pool_of(cluster: FakeCluster) -> Any:
    return cluster.objects[POOL_API, POOL_KIND, "chat"]["spec"]


def test_pool_selects_decode_workers_and_names_the_routers() -> None:
    cluster = settled(POOL, PAIR, POOL_API)
    assert pool_of(cluster) == {
        "selector": {"matchLabels": {labels.SERVICE: "chat", labels.ROLE: "decode"}},
        "targetPorts": [{"number": HTTP_PORT}],
        "endpointPickerRef": {"name": "chat", "port": {"number": PICKER_PORT}, "failureMode": "FailClose"},
    }
    assert cluster.condition("SpecSupported") == ("True", "Supported")
    router = cluster.objects["apps/v1", "Deployment", "chat-router"]["spec"]["template"]["spec"]
    assert f"--gateway-port={PICKER_PORT}" in router["containers"][0]["args"]
    ports = cluster.objects["v1", "Service", "chat"]["spec"]["ports"]
    names = {port["name"] for port in router["containers"][0]["ports"]}
    assert ports[1] == {
        "name": "grpc-ext-proc", "port": PICKER_PORT, "targetPort": "grpc-ext-proc", "appProtocol": "http2",
    }  # fmt: skip
    assert names == {"http", "metrics", "grpc-ext-proc"}


def test_route_refers_to_the_pool() -> None:
    cluster = settled({**ROUTE, **POOL}, PAIR, GATEWAY_API, POOL_API)
    (rule,) = cluster.objects[GATEWAY_API, "HTTPRoute", "chat"]["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "chat"}
    ]


def test_missing_api_is_a_condition_and_the_service_serves() -> None:
    """Without the definition the route refers to the Service, and requests are answered."""
    cluster = settled({**ROUTE, **POOL}, PAIR, GATEWAY_API)
    assert cluster.condition("SpecSupported") == ("False", "ApiMissing")
    (fact,) = (one for one in cluster.service["status"]["conditions"] if one["type"] == "SpecSupported")
    assert POOL_API in fact["message"]
    (rule,) = cluster.objects[GATEWAY_API, "HTTPRoute", "chat"]["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "chat", "port": 80}]
    assert cluster.condition("Ready") == ("True", "Serving")
    cluster.apis |= {POOL_API}
    cluster.settle()
    assert pool_of(cluster) and cluster.condition("SpecSupported") == ("True", "Supported")


def test_pool_goes_with_its_field() -> None:
    cluster = settled(POOL, PAIR, POOL_API)
    cluster.change(PAIR)
    cluster.settle()
    assert cluster.names(POOL_KIND) == []
    assert len(cluster.objects["v1", "Service", "chat"]["spec"]["ports"]) == 1
    assert "chat-gateways" not in cluster.names("NetworkPolicy")


def test_workers_of_both_roles_are_selected() -> None:
    spec = {name: value for name, value in PAIR.items() if name != "prefill"}
    assert pool_of(settled(POOL, spec, POOL_API))["selector"]["matchLabels"][labels.ROLE] == "both"


def test_host_network_lists_ports_of_existing_revisions() -> None:
    hosted = {**PAIR, "decode": {"podTemplate": {"spec": {"hostNetwork": True}}}}
    cluster = settled(POOL, hosted, POOL_API)
    (first,) = pool_of(cluster)["targetPorts"]
    cluster.change({**hosted, "exposure": POOL, "engine": {"maxModelLen": 1024}})
    cluster.reconcile()
    new, old = pool_of(cluster)["targetPorts"]
    assert old == first != new
    cluster.settle()
    assert pool_of(cluster)["targetPorts"] == [new]


@pytest.mark.parametrize(
    ("security", "reason"),
    [
        ({}, r"inferencePool needs security.ingressNamespaceLabels"),
        (
            {"ingressNamespaceLabels": {"a": "b"}, "mutualTls": {"secretName": "own"}},
            r"inferencePool excludes security.mutualTls",
        ),
    ],
    ids=["workers open to all", "mutual TLS"],
)
def test_unreachable_or_open_workers_are_refused(security: Manifest, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        settled(POOL, {**PAIR, "security": security}, POOL_API)


def test_pool_without_policies_needs_no_labels() -> None:
    cluster = settled(POOL, {**PAIR, "security": {"networkPolicy": False}}, POOL_API)
    assert pool_of(cluster)


@pytest.mark.slow
@pytest.mark.skipif(
    not ASSETS or not DEFINITION.exists(),
    reason="needs inferencepools.yaml: run `e2e/cluster/cluster crds $KUBEBUILDER_ASSETS`",
)
async def test_api_server_accepts_pool_and_route(tmp_path: Path) -> None:
    """The pool fits the definition of the inference extension."""
    wanted = {**ROUTE, "inferencePool": {"failureMode": "FailOpen"}}
    cluster = settled(wanted, PAIR, GATEWAY_API, POOL_API)
    spec = pool_of(cluster)
    definition = yaml.safe_load(DEFINITION.read_text())
    where = f"/apis/{POOL_API}/namespaces/default/inferencepools"
    async with real_kubernetes(tmp_path) as api:
        await api.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
        while (await api.admin.get(where)).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        body = {"apiVersion": POOL_API, "kind": POOL_KIND, "metadata": {"name": "chat"}, "spec": spec}
        reply = await api.admin.post(f"{where}?fieldValidation=Strict", json=body)
        assert reply.status_code == 201, reply.text
        assert not reply.headers.get("warning")
        assert reply.json()["spec"]["endpointPickerRef"]["failureMode"] == "FailOpen"
