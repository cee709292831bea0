"""A LoraAdapter has a finalizer only while a pod may have its adapter: anything else can be deleted alone."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from kubernetes.aio.client.exceptions import ApiException

from baton_api import labels
from baton_operator import names
from baton_operator.adapters.worker_api import AdapterApi, PodLoads
from baton_operator.cluster import api_server
from baton_operator.cluster.api_resources import API
from baton_operator.cluster.api_server import ApiServer
from baton_operator.cluster.cache import ObjectCache
from baton_operator.cluster.reflector import Reflectors
from baton_operator.manifests.engines.container import ENABLE_LORA
from baton_operator.reconcilers.lora_adapters import FINALIZER, KIND, LoraAdapterReconciler
from tests.operator.fake_api import FakeApi
from tests.operator.fake_vllm_lora import RANK_ERROR, FakeVllmLora, running

SPEC: dict[str, Any] = {
    "model": {"uri": "pvc://models/tiny"},
    "engine": {"type": "vLLM", "image": "vllm:1", "lora": {}},
    "decode": {},
}
LABELS = {
    labels.SERVICE: "chat",
    labels.ROLE: "both",
    labels.REVISION: "0123abcd",
    labels.MANAGED_BY: labels.OPERATOR,
}


class Service:
    """One service with one worker, and one adapter."""

    def __init__(self, api: FakeApi, reconciler: LoraAdapterReconciler, reflectors: Reflectors) -> None:
        self.api = api
        self.worker = FakeVllmLora({"/models/pirate": ""})
        self._reconciler = reconciler
        self._reflectors = reflectors

    async def prepare(self) -> None:
        await self.api.put(SPEC)
        await self.adapter()
        mounts = {"volumeMounts": [{"name": "files", "mountPath": "/models"}]}
        ports = [{"name": "http", "containerPort": int(self.worker.url.rpartition(":")[2])}]
        container = {"name": names.MAIN, "args": [ENABLE_LORA], "ports": ports, **mounts}
        volumes = [{"name": "files", "persistentVolumeClaim": {"claimName": "models"}}]
        template = {"spec": {"containers": [container], "volumes": volumes}}
        await self._store("apps/v1", "Deployment", "chat-both", {"spec": {"template": template}})

    async def adapter(self, **metadata: Any) -> None:
        """Create or change the LoraAdapter."""
        before = self.api.objects.get((API, "loraadapters", "models", "pirate"), {"metadata": {}})
        created = {"creationTimestamp": "2026-01-01T00:00:00Z", "name": "pirate", "namespace": "models"}
        spec = {"serviceName": "chat", "uri": "pvc://models/pirate"}
        await self.api.store(
            API, KIND, {**before, "metadata": {**before["metadata"], **created, **metadata}, "spec": spec}
        )

    async def pod(self, *, ready: bool = True, restarts: int = 0) -> None:
        state = [{"type": "Ready", "status": str(ready)}]
        container = [{"name": names.MAIN, "ready": ready, "restartCount": restarts}]
        status = {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "conditions": state,
            "containerStatuses": container,
        }
        await self._store("v1", "Pod", "chat-both-0", {"status": status})

    async def reconcile(self, *answers: int) -> None:
        """`answers`: statuses of the reconciler's first requests to the API server."""
        await self._reflectors.relist()
        self.api.answers.extend(answers)
        await self._reconciler.reconcile("models", "chat")

    @property
    def finalizers(self) -> list[str]:
        found: list[str] = self.api.objects[API, "loraadapters", "models", "pirate"]["metadata"].get(
            "finalizers", []
        )
        return found

    @property
    def condition(self) -> dict[str, Any]:
        status = self.api.objects[API, "loraadapters", "models", "pirate"]["status"]
        (found,) = status["conditions"]
        return dict(found)

    async def _store(self, api: str, kind: str, name: str, body: Any) -> None:
        metadata = {
            "namespace": "models",
            "name": name,
            "labels": LABELS,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        }
        await self.api.store(api, kind, {"metadata": metadata, **body})


@pytest_asyncio.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with FakeApi(tmp_path) as fake:
        client = await api_server.connect(str(fake.kubeconfig))
        cache = ObjectCache(["models"], lambda change: None)
        api = ApiServer(client, lambda: None, lambda method, code: None, cache)
        workers = AdapterApi()
        loads = PodLoads(workers, time.monotonic)
        reconciler = LoraAdapterReconciler(api, cache, loads, lambda about, transition: None, time.time)
        service = Service(fake, reconciler, Reflectors(api, cache, time.monotonic, random.Random(0)))
        try:
            async with running(service.worker):
                await service.prepare()
                yield service
        finally:
            await workers.close()
            await client.close()


async def test_adapter_that_no_ready_pod_can_load_has_no_finalizer(service: Service) -> None:
    await service.reconcile()
    assert not service.finalizers
    await service.pod(ready=False)
    await service.reconcile()
    assert not service.finalizers and not service.worker.requests


async def test_loaded_adapter_has_a_finalizer_until_pods_have_lost_it(service: Service) -> None:
    await service.adapter(finalizers=["example.com/other"])
    await service.pod()
    await service.reconcile()
    assert service.worker.loaded == {"pirate": "/models/pirate"}
    assert service.finalizers == ["example.com/other", FINALIZER]
    service.worker.loaded.clear()
    await service.pod(ready=False, restarts=1)
    await service.reconcile()
    assert service.finalizers == ["example.com/other"]


async def test_finalizer_is_written_before_the_load(service: Service) -> None:
    await service.pod()
    with pytest.raises(ApiException):
        await service.reconcile(409)
    assert not service.worker.requests


async def test_adapter_that_a_pod_refused_has_no_finalizer(service: Service) -> None:
    service.worker.files = {"/models/pirate": RANK_ERROR}
    await service.pod()
    await service.reconcile()
    assert service.worker.requests and not service.finalizers


async def test_adapter_of_a_deleted_service_has_no_finalizer(service: Service) -> None:
    await service.pod()
    await service.reconcile()
    assert service.finalizers
    await service.api.remove(API, "InferenceService", "models", "chat")
    await service.reconcile()
    assert not service.finalizers


async def test_deleted_adapter_is_unloaded_and_released(service: Service) -> None:
    await service.pod()
    await service.reconcile()
    await service.adapter(deletionTimestamp="2999-01-01T00:00:00Z")
    await service.reconcile()
    assert not service.worker.loaded and not service.finalizers


async def test_adapter_of_a_service_with_an_invalid_spec_says_what_is_wrong(service: Service) -> None:
    await service.api.put({**SPEC, "decode": {"replicas": "many"}})
    await service.reconcile()
    condition = service.condition
    assert (condition["status"], condition["reason"]) == ("False", "ServiceInvalid")
    assert "The spec of the InferenceService chat is invalid: spec.decode.replicas" in condition["message"]
