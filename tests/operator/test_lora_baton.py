"""Adapters of a Baton service: the operator's process, a real API server, and the API of real workers."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from baton_api import labels
from baton_api.errors import SetupError
from baton_engine.adapters import AdapterRegistry
from baton_engine.api.http import HttpServer
from baton_engine.requests import LoadedAdapter
from baton_operator import names
from baton_operator.cluster.api_resources import API, path
from tests.engine.api.api import MODEL, open_api
from tests.operator.real_cluster import RealCluster, real_cluster, running_operator

pytestmark = pytest.mark.slow

KIND = "LoraAdapter"
SPEC: dict[str, Any] = {
    "model": {"uri": "pvc://models/tiny"},
    "engine": {"lora": {"maxAdapters": 2}},
    "prefill": {},
    "decode": {},
}
ADDRESSES = {"prefill": "127.77.16.1", "decode": "127.77.16.2"}
RANK_ERROR = "the rank is 64, but --max-lora-rank is 16."


def read(name: str, path: str) -> LoadedAdapter:
    if path == "/models/wide":
        raise SetupError(RANK_ERROR)
    if path == "/models/missing":
        raise FileNotFoundError(path)
    return LoadedAdapter(name, path, hashlib.sha256(path.encode()).hexdigest()[:32], 8, 65)


@asynccontextmanager
async def worker(address: str) -> AsyncIterator[AdapterRegistry]:
    """The API of one worker, whose registry is real; only the files are not."""
    registry = AdapterRegistry(read, 2, (MODEL,))
    async with (
        open_api(adapters=registry) as api,
        HttpServer(api.app, address, names.HTTP_PORT, api.served.drain),
    ):
        yield registry


async def create_pod(cluster: RealCluster, role: str) -> None:
    """A ready pod of the role's Deployment, as a kubelet would report it."""
    of_it: dict[str, str] = {}

    async def exists() -> bool:
        listed = (await cluster.admin.get(path("apps/v1", "Deployment", "models"))).json()["items"]
        for one in listed:
            existing = one["metadata"]["labels"]
            if existing.get(labels.ROLE) == role and labels.REVISION in existing:
                of_it.update(existing)
        return bool(of_it)

    await cluster.until(exists)
    name, address = f"{role}-0", ADDRESSES[role]
    spec = {"containers": [{"name": names.MAIN, "image": "none"}]}
    body = {"metadata": {"name": name, "labels": of_it}, "spec": spec}
    await cluster.api.post(path("v1", "Pod", "models"), body)
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running"}
    status = {**ready, "podIP": address, "podIPs": [{"ip": address}]}
    await cluster.api.patch(f"{path('v1', 'Pod', 'models', name)}/status", {"status": status})


async def put(cluster: RealCluster, name: str, files: str) -> None:
    await cluster.put({"serviceName": "chat", "uri": f"pvc://models/{files}"}, name, kind=KIND)


async def becomes(cluster: RealCluster, name: str, condition: str) -> dict[str, Any]:
    async def so() -> bool:
        return await cluster.condition("Active", name, KIND) == condition

    await cluster.until(so)
    answer = await cluster.admin.get(path(API, KIND, "models", name))
    manifest: dict[str, Any] = answer.raise_for_status().json()
    return manifest


async def test_baton_adapters_are_active_on_all_workers(tmp_path_factory: pytest.TempPathFactory) -> None:
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(real_cluster(tmp_path_factory.mktemp("kubernetes")))
        await cluster.define_others()
        await stack.enter_async_context(running_operator(cluster, "adapters"))
        prefill = await stack.enter_async_context(worker(ADDRESSES["prefill"]))
        decode = await stack.enter_async_context(worker(ADDRESSES["decode"]))
        await cluster.put(SPEC)
        for role in ADDRESSES:
            await create_pod(cluster, role)
        await put(cluster, "pirate", "pirate")
        await put(cluster, "wide", "wide")
        await put(cluster, "missing", "missing")
        await becomes(cluster, "pirate", "True LoadedOnAllPods")

        async def is_on_both() -> bool:  # "all" are those that the operator has seen
            adapter = (await cluster.admin.get(path(API, KIND, "models", "pirate"))).json()
            return bool(adapter["status"]["loadedPods"] == adapter["status"]["readyPods"] == 2)

        await cluster.until(is_on_both)
        assert [registry.names for registry in (prefill, decode)] == [("pirate",)] * 2
        for name, words in (("wide", RANK_ERROR), ("missing", "No adapter found for /models/missing")):
            failed = await becomes(cluster, name, "False LoadFailed")
            assert words in failed["status"]["conditions"][0]["message"]
        await put(cluster, "pirate", "poet")
        await cluster.until(
            lambda: (
                [one.path for registry in (prefill, decode) for one in registry.all] == ["/models/poet"] * 2
            )
        )
        await cluster.api.delete(path(API, KIND, "models", "pirate"))
        await cluster.until(lambda: not prefill.names and not decode.names)
    assert not [one for one in cluster.requests() if one.code == 403]
