"""Workers by Kubernetes, against a real API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton_api import labels
from baton_api.workers import Role
from baton_router.workers.discovery.listed import ListedStatus, ListedWorker
from tests.router.fake_kubernetes import PATH, a_slice
from tests.router.real_kubernetes import RealKubernetes, real_kubernetes
from tests.router.running import until
from tests.router.test_discovery_kubernetes import A, B, followed

pytestmark = pytest.mark.slow

RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces/models"
RULE = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}


def manifest(item: dict[str, Any]) -> dict[str, Any]:
    item["metadata"]["labels"][labels.SERVICE] = "chat"
    return {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", **item}


async def allow(api: RealKubernetes) -> None:
    """All that a router's account needs."""
    name = {"metadata": {"name": "router"}}
    await api.post(f"{RBAC}/roles", {**name, "rules": [RULE]})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "router"}
    user = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "router"}
    await api.post(f"{RBAC}/rolebindings", {**name, "roleRef": role, "subjects": [user]})


async def test_real_api_server_needs_only_list_and_watch_rights(
    tmp_path: Path,
) -> None:
    async with real_kubernetes(tmp_path) as api:
        await api.post("/api/v1/namespaces", {"metadata": {"name": "models"}})
        await api.post(PATH, manifest(a_slice("one", A)))
        other = manifest(a_slice("other", "10.9.9.9"))
        other["metadata"]["labels"][labels.SERVICE] = "another"
        await api.post(PATH, other)
        async with followed(api) as follower:
            await until(lambda: "may not list and watch endpointslices" in follower.source.trouble)
            await allow(api)
            await follower.sees(A)
            await api.post(PATH, manifest(a_slice("two", B, role="prefill", revision="r2")))
            await follower.sees(A, B)
            assert ListedWorker(B, 8000, Role.PREFILL, "r2") in follower.workers
            ending = a_slice("one", A, ready=False, serving=True, terminating=True)
            await api.patch(f"{PATH}/one", {"endpoints": ending["endpoints"]})
            await until(
                lambda: ListedWorker(A, 8000, Role.DECODE, "r1", ListedStatus.TERMINATING) in follower.workers
            )
            await api.delete(f"{PATH}/one")
            await follower.sees(B)
        async with followed(api, list_every_s=0.3) as follower:
            await follower.sees(B)
            notified = follower.notified
            await until(lambda: follower.notified > notified + 1)  # further full lists
            assert follower.addresses == {B}
            await api.delete(f"{PATH}/two")
            await follower.sees()
