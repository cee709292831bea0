"""`baton status` and `baton doctor` with a real API server, without and with Baton's resources."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from baton_api.errors import SetupError
from baton_cli import status
from baton_cli.doctor import cluster as clusters
from baton_operator.crd import GROUP, RESOURCES, VERSION
from tests.router.real_kubernetes import RealKubernetes, real_kubernetes

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
SERVICES = f"/apis/{GROUP}/{VERSION}/namespaces/default/inferenceservices"
TIMEOUT_S = 120.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealKubernetes]:
    async with real_kubernetes(tmp_path_factory.mktemp("kubernetes")) as api:
        yield api


def kubeconfig(api: RealKubernetes, folder: Path, token: str) -> str:
    path = folder / f"{token}.yaml"
    cluster = {"server": api.url, "certificate-authority": str(api.account / "ca.crt")}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "clusters": [{"name": "it", "cluster": cluster}],
        "users": [{"name": "it", "user": {"token": token}}],
    }
    path.write_text(yaml.safe_dump(config))
    return str(path)


async def answers(api: RealKubernetes, path: str) -> None:
    """A custom resource is served a moment after it was defined."""
    async with asyncio.timeout(TIMEOUT_S):
        while (await api.admin.get(path)).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_rights_resources_and_services_are_found(api: RealKubernetes, tmp_path: Path) -> None:
    admin = kubeconfig(api, tmp_path, "token-of-the-admin")
    unprivileged = kubeconfig(api, tmp_path, "token-of-the-router")

    before = await asyncio.to_thread(clusters.inspect, admin, "default")
    assert not before.trouble and not before.denied
    assert (
        before.crds is not None
        and len(before.crds) == len(RESOURCES)
        and not any(crd.versions for crd in before.crds)
    )

    for resource in RESOURCES:
        definition: dict[str, Any] = resource.definition
        if resource.kind == "InferenceService":  # as an older version would have it
            schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
            del schema["properties"]["spec"]["properties"]["suspend"]
        await api.post(CRDS, definition)
    await answers(api, SERVICES)

    after = await asyncio.to_thread(clusters.inspect, admin, "default")
    assert after.crds is not None
    missing = {crd.name: crd.missing for crd in after.crds if crd.missing}
    assert missing == {f"inferenceservices.{GROUP}": ("spec.suspend",)}
    refused = await asyncio.to_thread(clusters.inspect, unprivileged, "default")
    assert "create inferenceservices in default" in refused.denied and refused.crds is None

    spec = {"model": {"uri": "builtin://smollm2"}, "decode": {"replicas": 1}}
    body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "InferenceService", "spec": spec}
    await api.post(SERVICES, {**body, "metadata": {"name": "chat"}})
    (service,) = await status.services("chat", admin, "default")
    assert not service.serving and "has reconciled generation 0 of 1" in service.problems[0].message
    with pytest.raises(SetupError, match="The InferenceService other does not exist in default"):
        await status.services("other", admin, "default")
    with pytest.raises(SetupError, match="The cluster rejected the request"):
        await status.services("", unprivileged, "default")


def test_cluster_unreachable_is_reported(tmp_path: Path) -> None:
    text = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "clusters": [{"name": "it", "cluster": {"server": "https://127.0.0.1:9"}}],
        "users": [{"name": "it", "user": {"token": "x"}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(text))
    assert clusters.inspect(str(tmp_path / "config"), "default").trouble
    with pytest.raises(SetupError, match=r"The kubeconfig file .* does not exist"):
        clusters.account(str(tmp_path / "none"), {})
    assert clusters.account("", {"HOME": str(tmp_path / "nowhere")}) == ""
