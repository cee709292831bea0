"""A real API server takes what the chart makes, what the examples are, and what becomes of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import yaml

from baton_operator.cluster.api_resources import path
from baton_operator.crd import RESOURCES
from tests.charts.helm import NAMESPACE, ROOT, VALUES, Manifest, of_kind, render
from tests.operator.fake_cluster import FakeCluster
from tests.router.real_kubernetes import RealKubernetes, real_kubernetes

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
LOADED = {file.name: list(yaml.safe_load_all(file.read_text())) for file in EXAMPLES}
OBJECTS = {name: objects for name, objects in LOADED.items() if all("kind" in one for one in objects)}
"""Those that are for Kubernetes."""

SET_BY_CLUSTER = ("uid", "creationTimestamp")
"""Metadata that no writer sends: an apply with a uid wants that very object."""

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealKubernetes]:
    async with real_kubernetes(tmp_path_factory.mktemp("kubernetes")) as made:
        for name in (NAMESPACE, "models", "more-models"):
            metadata = {"name": name, "labels": RESTRICTED}
            await made.post("/api/v1/namespaces", {"metadata": metadata})
        for one in RESOURCES:
            await made.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", one.definition)
        for one in RESOURCES:
            while (await made.admin.get(f"/apis/baton.dev/v1alpha1/{one.plural}")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await _define(made, "keda.sh", "v1alpha1", "ScaledObject", "scaledobjects")
        yield made


async def _define(api: RealKubernetes, group: str, version: str, kind: str, plural: str) -> None:
    """A kind of another project, which takes any object: its own schema is not ours to hold."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}}
    named = {"kind": kind, "plural": plural, "singular": kind.lower()}
    spec = {"group": group, "names": named, "scope": "Namespaced", "versions": [served]}
    body = {"metadata": {"name": f"{plural}.{group}"}, "spec": spec}
    await api.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body)
    while (await api.admin.get(f"/apis/{group}/{version}/{plural}")).status_code != 200:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def taken(api: RealKubernetes, manifest: Manifest, namespace: str) -> None:
    """By a server-side apply that changes nothing; what it says of a field it does not know fails too."""
    metadata = manifest["metadata"]
    of_cluster = manifest["kind"].startswith(("Cluster", "CustomResource"))
    where = "" if of_cluster else metadata.get("namespace", namespace)
    answer = await api.admin.patch(
        path(manifest["apiVersion"], manifest["kind"], where, metadata["name"]),
        params={"dryRun": "All", "fieldValidation": "Strict", "fieldManager": "test", "force": "true"},
        headers={"content-type": "application/apply-patch+yaml"},
        content=json.dumps(manifest),  # which is YAML too
    )
    what = f"{manifest['kind']} {metadata['name']}"
    assert answer.status_code in (200, 201), f"{what}: {answer.text}"
    assert not answer.headers.get("warning"), f"{what}: {answer.headers['warning']}"


@pytest.mark.parametrize("values", list(VALUES.values()), ids=list(VALUES))
async def test_what_the_chart_makes_is_taken(api: RealKubernetes, values: dict[str, Any]) -> None:
    for manifest in render(values):
        await taken(api, manifest, NAMESPACE)


async def test_the_operators_pod_is_admitted_where_pods_are_restricted(api: RealKubernetes) -> None:
    (deployment,) = of_kind(render({}), "Deployment")
    template = deployment["spec"]["template"]
    template["spec"].pop("serviceAccountName")
    pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": "operator"}}
    await taken(api, pod, NAMESPACE)


@pytest.mark.parametrize("name", list(OBJECTS))
async def test_an_example_is_taken(api: RealKubernetes, name: str) -> None:
    assert any(one["apiVersion"] == "baton.dev/v1alpha1" for one in OBJECTS[name])
    for manifest in OBJECTS[name]:
        await taken(api, manifest, "models")


SERVICES = [
    (name, one) for name, objects in OBJECTS.items() for one in objects if one["kind"] == "InferenceService"
]


@pytest.mark.parametrize("service", [one for _, one in SERVICES], ids=[name for name, _ in SERVICES])
async def test_what_becomes_of_an_example_is_taken(api: RealKubernetes, service: Manifest) -> None:
    cluster = FakeCluster(service["spec"], name=service["metadata"]["name"])
    cluster.settle()
    assert cluster.condition("Ready")[0] == "True"
    for manifest in cluster.objects.values():
        given = {name: value for name, value in manifest["metadata"].items() if name not in SET_BY_CLUSTER}
        await taken(api, {**manifest, "metadata": given}, "models")
