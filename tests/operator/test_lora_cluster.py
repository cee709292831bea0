"""Adapters of a vLLM service: the operator's process, a real API server, and workers that answer by HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from baton_api import labels
from baton_operator import names
from baton_operator.cluster.api_resources import API, path
from baton_operator.reconcilers.lora_adapters import FINALIZER
from tests.operator.fake_vllm_lora import RANK_ERROR, FakeVllmLora
from tests.operator.real_cluster import RealCluster, real_cluster, running_operator

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

KIND = "LoraAdapter"
FILES = {"/models/pirate": "", "/models/poet": "", "/models/poet-2": "", "/models/wide": RANK_ERROR}
SPEC: dict[str, Any] = {
    "model": {"uri": "pvc://models/tiny"},
    "engine": {"type": "vLLM", "image": "vllm:1", "lora": {"maxAdapters": 2}},
    "prefill": {},
    "decode": {"replicas": 3},
}
NETWORK = "127.77.14"
"""Each pod has an address of its own, and workers listen on port 8000."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    async with real_cluster(tmp_path_factory.mktemp("kubernetes")) as running:
        await running.define_others()
        yield running


class Pods:
    """The pods of the service, each with its worker."""

    def __init__(self, cluster: RealCluster) -> None:
        self.cluster = cluster
        self.workers: dict[str, FakeVllmLora] = {}

    @asynccontextmanager
    async def running(self, *hanging: str) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for number, one in enumerate(await self._deployments()):
                for replica in range(one["spec"]["replicas"]):
                    of_it, address = one["metadata"]["labels"], f"{NETWORK}.{10 * number + replica + 1}"
                    name = f"{of_it[labels.ROLE]}-{replica}"
                    worker = self.workers[name] = FakeVllmLora(FILES)
                    if name in hanging:
                        worker.hangs.clear()
                    await worker.start(address, names.HTTP_PORT)
                    stack.push_async_callback(worker.stop)
                    stack.callback(worker.hangs.set)
                    await self._create(name, of_it, address)
            yield

    async def restart(self, name: str) -> None:
        """As after a crash of the container: nothing is loaded any more."""
        self.workers[name].loaded.clear()
        await self._status(name, {"containerStatuses": [container(1)]})

    def loaded(self) -> dict[str, list[str]]:
        return {name: sorted(one.loaded.values()) for name, one in self.workers.items()}

    async def _deployments(self) -> list[dict[str, Any]]:
        deployments: list[dict[str, Any]] = []

        async def exist() -> bool:
            answer = await self.cluster.admin.get(path("apps/v1", "Deployment", "models"))
            deployments[:] = [
                one for one in answer.json()["items"] if labels.REVISION in one["metadata"]["labels"]
            ]
            return len(deployments) == 2

        await self.cluster.until(exist)
        return deployments

    async def _create(self, name: str, of_it: dict[str, str], address: str) -> None:
        body = {
            "metadata": {"name": name, "labels": of_it},
            "spec": {"containers": [{"name": names.MAIN, "image": "none"}]},
        }
        await self.cluster.api.post(path("v1", "Pod", "models"), body)
        ready = [{"type": "Ready", "status": "True"}]
        addresses = {"podIP": address, "podIPs": [{"ip": address}]}
        await self._status(name, {"conditions": ready, "phase": "Running", **addresses})

    async def _status(self, name: str, status: dict[str, Any]) -> None:
        await self.cluster.api.patch(f"{path('v1', 'Pod', 'models', name)}/status", {"status": status})


def container(restarts: int) -> dict[str, Any]:
    return {
        "name": names.MAIN,
        "image": "none",
        "imageID": "none",
        "ready": True,
        "restartCount": restarts,
    }


async def put(cluster: RealCluster, object: str, files: str, **more: Any) -> None:
    await cluster.put({"serviceName": "chat", "uri": f"pvc://models/{files}", **more}, object, kind=KIND)


async def adapter(cluster: RealCluster, name: str) -> dict[str, Any]:
    answer = await cluster.admin.get(path(API, KIND, "models", name))
    manifest: dict[str, Any] = answer.raise_for_status().json()
    return manifest


async def becomes(cluster: RealCluster, name: str, condition: str) -> dict[str, Any]:
    async def so() -> bool:
        return await cluster.condition("Active", name, KIND) == condition

    await cluster.until(so)
    return await adapter(cluster, name)


def counts(adapter: dict[str, Any]) -> tuple[int, int]:
    """Pods that have the adapter, and ready pods."""
    return adapter["status"].get("loadedPods"), adapter["status"].get("readyPods")


async def has_counts(cluster: RealCluster, name: str, loaded: int, ready: int) -> None:
    """Wait until the pods are counted so: they become known one after the other."""

    async def so() -> bool:
        return counts(await adapter(cluster, name)) == (loaded, ready)

    await cluster.until(so)


async def disappears(cluster: RealCluster, name: str) -> None:
    await cluster.api.delete(path(API, KIND, "models", name))

    async def so() -> bool:
        return (await cluster.admin.get(path(API, KIND, "models", name))).status_code == 404

    await cluster.until(so)


async def test_adapters_are_loaded_kept_changed_and_unloaded(cluster: RealCluster) -> None:
    """Two adapters that fit and one that does not; one pod that hangs; a container that restarts."""
    pods = Pods(cluster)
    async with running_operator(cluster, "adapters"):
        await put(cluster, "pirate", "pirate")
        await becomes(cluster, "pirate", "False ServiceNotFound")
        await cluster.put(SPEC)
        async with pods.running("decode-2"):
            await _loads(cluster, pods)
            await _loads_again_after_a_restart(cluster, pods)
            await _changes(cluster, pods)
            await disappears(cluster, "pirate")
            assert set(map(tuple, pods.loaded().values())) == {("/models/poet-2",)}
            await cluster.api.delete(path(API, "InferenceService", "models", "chat"))
            await becomes(cluster, "verse", "False ServiceNotFound")
            for worker in pods.workers.values():
                worker.hangs.clear()  # the operator does not wait for pods of a deleted service
            await disappears(cluster, "verse")
            await disappears(cluster, "wide")
    assert not [one for one in cluster.requests() if one.code == 403]


async def _loads(cluster: RealCluster, pods: Pods) -> None:
    """On all pods but the one that hangs, and there as soon as it continues."""
    await put(cluster, "verse", "poet")
    await put(cluster, "wide", "wide")
    await becomes(cluster, "pirate", "True PartlyLoaded")
    await has_counts(cluster, "pirate", 3, 4)
    state = await adapter(cluster, "pirate")
    assert state["metadata"]["finalizers"] == [FINALIZER]
    status = state["status"]
    assert (status["name"], status["names"]) == ("pirate", ["pirate"])
    assert status["pods"][0] == {"name": "decode-2", "state": "Loading"}
    wide = await becomes(cluster, "wide", "False LoadFailed")
    assert RANK_ERROR in wide["status"]["conditions"][0]["message"]
    pods.workers["decode-2"].hangs.set()
    for name in ("pirate", "verse"):
        await becomes(cluster, name, "True LoadedOnAllPods")
    assert set(map(tuple, pods.loaded().values())) == {("/models/pirate", "/models/poet")}


async def _loads_again_after_a_restart(cluster: RealCluster, pods: Pods) -> None:
    await pods.restart("prefill-0")
    await cluster.until(lambda: len(pods.workers["prefill-0"].loaded) == 2)


async def _changes(cluster: RealCluster, pods: Pods) -> None:
    """Other files, and another name: pods unload what they have no more."""
    await put(cluster, "verse", "poet-2", name="bard")
    await cluster.until(
        lambda: all(
            one.loaded == {"pirate": "/models/pirate", "bard": "/models/poet-2"}
            for one in pods.workers.values()
        )
    )

    async def is_forgotten() -> bool:
        verse = await adapter(cluster, "verse")
        return bool(verse["status"]["names"] == ["bard"] and counts(verse) == (4, 4))

    await cluster.until(is_forgotten)
