"""A real API server takes what the chart makes, what the examples are, and what becomes of them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from baton_operator.cluster.api_resources import path
from baton_operator.crd import RESOURCES
from baton_operator.manifests.workers import GROUP_API, GROUP_KIND
from tests.charts.helm import NAMESPACE, ROOT, VALUES, Manifest, of_kind, render
from tests.operator.fake_cluster import FakeCluster
from tests.router.real_kubernetes import RealKubernetes, real_kubernetes

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
LOADED = {file.name: list(yaml.safe_load_all(file.read_text())) for file in EXAMPLES}
OBJECTS = {name: objects for name, objects in LOADED.items() if all("kind" in one for one in objects)}
"""Those that are for Kubernetes."""

SET_BY_CLUSTER = ("uid", "creationTimestamp")
"""Metadata that no writer sends: an apply with a uid wants that very object."""

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

GROUPS = Path(os.environ.get("KUBEBUILDER_ASSETS", "")) / "leaderworkersets.yaml"
"""The definition that LeaderWorkerSet installs."""

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealKubernetes]:
    async with real_kubernetes(tmp_path_factory.mktemp("kubernetes")) as running:
        for name in (NAMESPACE, "models", "more-models"):
            metadata = {"name": name, "labels": RESTRICTED}
            await running.post("/api/v1/namespaces", {"metadata": metadata})
        for one in RESOURCES:
            await running.post(CRDS, one.definition)
        for one in RESOURCES:
            await _served(running, f"/apis/baton.dev/v1alpha1/{one.plural}")
        await _define(running, "keda.sh", "v1alpha1", "ScaledObject", "scaledobjects")
        if GROUPS.exists():
            await running.post(CRDS, yaml.load(GROUPS.read_text(), yaml.CSafeLoader))
            await _served(running, f"/apis/{GROUP_API}/leaderworkersets")
        yield running


async def _define(api: RealKubernetes, group: str, version: str, kind: str, plural: str) -> None:
    """A kind of another project, which takes any object: its own schema is not ours to hold."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}}
    named = {"kind": kind, "plural": plural, "singular": kind.lower()}
    spec = {"group": group, "names": named, "scope": "Namespaced", "versions": [served]}
    body = {"metadata": {"name": f"{plural}.{group}"}, "spec": spec}
    await api.post(CRDS, body)
    await _served(api, f"/apis/{group}/{version}/{plural}")


async def _served(api: RealKubernetes, where: str) -> None:
    while (await api.admin.get(where)).status_code != 200:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def taken(api: RealKubernetes, manifest: Manifest, namespace: str) -> None:
    """Check by a server-side apply that changes nothing; a warning about an unknown field fails too."""
    metadata = manifest["metadata"]
    of_cluster = manifest["kind"].startswith(("Cluster", "CustomResource"))
    where = "" if of_cluster else metadata.get("namespace", namespace)
    answer = await api.admin.patch(
        path(manifest["apiVersion"], manifest["kind"], where, metadata["name"]),
        params={"dryRun": "All", "fieldValidation": "Strict", "fieldManager": "test", "force": "true"},
        headers={"content-type": "application/apply-patch+yaml"},
        content=json.dumps(manifest),  # JSON is YAML too
    )
    what = f"{manifest['kind']} {metadata['name']}"
    assert answer.status_code in (200, 201), f"{what}: {answer.text}"
    assert not answer.headers.get("warning"), f"{what}: {answer.headers['warning']}"


@pytest.mark.parametrize("values", list(VALUES.values()), ids=list(VALUES))
async def test_chart_manifests_are_admitted(api: RealKubernetes, values: dict[str, Any]) -> None:
    for manifest in render(values):
        await taken(api, manifest, NAMESPACE)


async def test_chart_operator_pod_is_admitted_as_restricted(api: RealKubernetes) -> None:
    (deployment,) = of_kind(render({}), "Deployment")
    template = deployment["spec"]["template"]
    template["spec"].pop("serviceAccountName")
    pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": "operator"}}
    await taken(api, pod, NAMESPACE)


@pytest.mark.parametrize("name", list(OBJECTS))
async def test_examples_are_admitted(api: RealKubernetes, name: str) -> None:
    assert any(one["apiVersion"] == "baton.dev/v1alpha1" for one in OBJECTS[name])
    for manifest in OBJECTS[name]:
        await taken(api, manifest, "models")


SERVICES = [
    (name, one) for name, objects in OBJECTS.items() for one in objects if one["kind"] == "InferenceService"
]


async def test_group_of_unknown_fields_is_refused(api: RealKubernetes) -> None:
    """Else the test of the example would prove nothing about its LeaderWorkerSet."""
    if not GROUPS.exists():
        pytest.skip(f"{GROUPS.name} is missing: e2e/cluster/cluster crds FOLDER, KUBEBUILDER_ASSETS=FOLDER")
    spec = {"replicas": 1, "leaderWorkerTemplate": {"size": 2, "workerTemplate": {"spec": {"containers": 1}}}}
    manifest = {"apiVersion": GROUP_API, "kind": GROUP_KIND, "metadata": {"name": "wrong"}, "spec": spec}
    with pytest.raises(AssertionError, match="leaderWorkerTemplate"):
        await taken(api, manifest, "models")


@pytest.mark.parametrize("service", [one for _, one in SERVICES], ids=[name for name, _ in SERVICES])
async def test_examples_objects_are_admitted(api: RealKubernetes, service: Manifest) -> None:
    cluster = FakeCluster(service["spec"], name=service["metadata"]["name"])
    cluster.apis = frozenset({GROUP_API})
    cluster.settle()
    if any(kind == GROUP_KIND for _, kind, _ in cluster.objects) and not GROUPS.exists():
        pytest.skip(f"{GROUPS.name} is missing: e2e/cluster/cluster crds FOLDER, KUBEBUILDER_ASSETS=FOLDER")
    assert cluster.condition("Ready")[0] == "True"
    for manifest in cluster.objects.values():
        given = {name: value for name, value in manifest["metadata"].items() if name not in SET_BY_CLUSTER}
        await taken(api, {**manifest, "metadata": given}, "models")
