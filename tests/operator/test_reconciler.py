"""The reconciler against a real API server: what it writes, and what it makes after it was interrupted."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException

from baton_api import labels
from baton_operator.cluster.api_resources import API, path
from baton_operator.manifests.objects import Manifest
from tests.operator.real_cluster import Inside, RealCluster, client, counted, real_cluster

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PAIR: dict[str, Any] = {"model": {"uri": "builtin://smollm2"}, "prefill": {}, "decode": {"replicas": 2}}
SCALED: dict[str, Any] = {
    "model": {"uri": "builtin://smollm2"},
    "decode": {"scaling": {"minReplicas": 1, "maxReplicas": 4}},
    "autoscaling": {"mode": "External"},
}
CONTAINER = {"image": "", "imageID": "", "ready": False, "restartCount": 0}
HUB: dict[str, Any] = {
    "model": {"uri": "hf://org/model", "cache": {"type": "PVC", "size": "20Gi"}},
    "prefill": {},
    "decode": {},
    "router": {"replicas": 2},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    async with real_cluster(tmp_path_factory.mktemp("kubernetes")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(cluster: RealCluster) -> AsyncIterator[ApiClient]:
    async with client(cluster) as connected:
        yield connected


async def namespace(cluster: RealCluster, name: str) -> str:
    await cluster.api.post("/api/v1/namespaces", {"metadata": {"name": name}})
    return name


async def settled(cluster: RealCluster, inside: Inside, where: str) -> None:
    """Until nothing more is written; the cluster does its part meanwhile."""
    for _ in range(20):
        before = inside.writes
        await inside.reconcile(namespace=where)
        await cluster.ready_pods(namespace=where)
        await inside.reconcile(namespace=where)
        if inside.writes == before:
            return
    raise AssertionError("it writes and writes")


@pytest.mark.parametrize("spec", [PAIR, SCALED, HUB], ids=["pair", "scaled", "hub"])
async def test_reconcile_unchanged_object_is_written_once(
    cluster: RealCluster, api: ApiClient, spec: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    where = await namespace(cluster, f"twice-{request.node.callspec.id}")
    await cluster.put(spec, namespace=where)
    inside = Inside(api)
    await settled(cluster, inside, where)
    since = len(cluster.requests())
    await cluster.put(spec, namespace=where)
    await inside.reconcile(namespace=where)
    await Inside(api, now=inside.now + 1000).reconcile(namespace=where)
    requests = cluster.requests(since)
    assert requests, "it has looked"
    assert counted([one for one in requests if one.is_work]) == {}
    status = (await cluster.service(namespace=where))["status"]
    ready = next(one for one in status["conditions"] if one["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("True", "Serving"), status


async def test_ticket_secret_is_kept_and_replaced_after_deletion(
    cluster: RealCluster, api: ApiClient
) -> None:
    """A later reconciliation keeps its value; pods that lack a deleted one get another."""
    where = await namespace(cluster, "tickets")
    await cluster.put(PAIR, namespace=where)
    inside = Inside(api)
    await settled(cluster, inside, where)
    secret = path("v1", "Secret", where, "chat-tickets")
    first = (await cluster.admin.get(secret)).json()
    assert len(base64.b64decode(first["data"]["secret"])) == 64
    assert first["metadata"]["ownerReferences"][0]["name"] == "chat"
    await cluster.put({**PAIR, "engine": {"dtype": "float32"}}, namespace=where)
    await settled(cluster, inside, where)
    assert (await cluster.admin.get(secret)).json()["data"] == first["data"]
    await cluster.admin.delete(secret)
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "chat-tickets" not found'}
    listed = (await cluster.admin.get(path("v1", "Pod", where))).json()["items"]
    status = {"containerStatuses": [{"name": "main", "state": {"waiting": waiting}, **CONTAINER}]}
    pod = path("v1", "Pod", where, listed[0]["metadata"]["name"])
    await cluster.api.patch(f"{pod}/status", {"status": status})
    await inside.reconcile(namespace=where)
    second = (await cluster.admin.get(secret)).json()
    assert second["data"] != first["data"]


async def test_reconcile_foreign_change_is_reverted_and_addition_kept(
    cluster: RealCluster, api: ApiClient
) -> None:
    where = await namespace(cluster, "drift")
    await cluster.put(PAIR, namespace=where)
    inside = Inside(api)
    await settled(cluster, inside, where)
    service = path("v1", "Service", where, "chat")
    await cluster.api.patch(
        service, {"spec": {"selector": {labels.ROLE: "nobody"}}, "metadata": {"annotations": {"a": "b"}}}
    )
    await inside.reconcile(namespace=where)
    stored = (await cluster.admin.get(service)).json()
    assert stored["spec"]["selector"][labels.ROLE] == "router"
    assert stored["metadata"]["annotations"]["a"] == "b"


async def test_reconcile_foreign_object_of_same_name_is_reported(
    cluster: RealCluster, api: ApiClient
) -> None:
    where = await namespace(cluster, "taken")
    theirs = {"metadata": {"name": "chat"}, "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 1}]}}
    await cluster.api.post(path("v1", "Service", where), theirs)
    await cluster.put(PAIR, namespace=where)
    with pytest.raises(ApiException):
        await Inside(api).reconcile(namespace=where)
    stored = (await cluster.admin.get(path("v1", "Service", where, "chat"))).json()
    assert stored["spec"]["selector"] == {"app": "theirs"}
    status = (await cluster.service(namespace=where))["status"]
    condition = next(one for one in status["conditions"] if one["type"] == "SpecSupported")
    assert condition["status"] == "False"
    assert condition["message"].startswith("Service chat: ")


@pytest.mark.parametrize(
    ("name", "container", "named"),
    [
        ("refused", {"imagePullPolicy": "Sometimes"}, "imagePullPolicy"),
        ("twice", {"volumeMounts": [{"name": "a", "mountPath": "/a"}] * 2}, "duplicate entries for key"),
    ],
)
async def test_reconcile_rejected_write_is_reported_in_status(
    cluster: RealCluster, api: ApiClient, name: str, container: dict[str, Any], named: str
) -> None:
    where = await namespace(cluster, name)
    template = {
        "spec": {"containers": [{"name": "main", **container}], "volumes": [{"name": "a", "emptyDir": {}}]}
    }
    await cluster.put({**PAIR, "decode": {"podTemplate": template}}, namespace=where)
    with pytest.raises(ApiException):
        await Inside(api).reconcile(namespace=where)
    status = (await cluster.service(namespace=where))["status"]
    condition = next(one for one in status["conditions"] if one["type"] == "Ready")
    assert (condition["status"], condition["reason"]) == ("False", "Invalid")
    assert named in condition["message"]


async def test_claim_that_may_not_grow_is_named_and_service_serves_on(
    cluster: RealCluster, api: ApiClient
) -> None:
    """Its storage class allows no other size."""
    where = await namespace(cluster, "small")
    await cluster.put(HUB, namespace=where)
    inside = Inside(api)
    await settled(cluster, inside, where)
    claim = path("v1", "PersistentVolumeClaim", where, "chat-model")
    await cluster.api.patch(claim, {"spec": {"volumeName": "volume"}})
    await cluster.api.patch(
        f"{claim}/status", {"status": {"phase": "Bound", "capacity": {"storage": "20Gi"}}}
    )
    cache = {**HUB["model"]["cache"], "size": "40Gi"}
    await cluster.put({**HUB, "model": {**HUB["model"], "cache": cache}}, namespace=where)
    await inside.reconcile(namespace=where)
    status = (await cluster.service(namespace=where))["status"]
    conditions = {one["type"]: one for one in status["conditions"]}
    assert conditions["SpecSupported"]["reason"] == "ClaimRefused"
    assert conditions["SpecSupported"]["message"].startswith("PersistentVolumeClaim chat-model: ")
    assert conditions["Ready"]["status"] == "True"


async def test_reconcile_deleted_service_is_left_to_garbage_collector(
    cluster: RealCluster, api: ApiClient
) -> None:
    where = await namespace(cluster, "deleted")
    await cluster.put(PAIR, namespace=where)
    inside = Inside(api)
    await inside.reconcile(namespace=where)
    await cluster.api.delete(path(API, "InferenceService", where, "chat"))
    since = len(cluster.requests())
    assert await inside.reconcile(namespace=where) is None
    assert not [one for one in cluster.requests(since) if one.is_work]
    owners = [one["metadata"]["ownerReferences"] for one in (await cluster.objects(where)).values()]
    assert owners and all(one[0]["controller"] for one in owners)


async def test_reconcile_scaler_status_has_selector_and_binding(cluster: RealCluster, api: ApiClient) -> None:
    where = await namespace(cluster, "scalers")
    inside = Inside(api)
    await cluster.put(SCALED, namespace=where)
    other = {"serviceName": "chat", "role": "decode", "replicas": 3}
    await cluster.put(other, name="mine", namespace=where, kind="RoleScaler")
    unbound = {"serviceName": "none", "role": "prefill", "replicas": 3}
    await cluster.put(unbound, name="alone", namespace=where, kind="RoleScaler")
    await settled(cluster, inside, where)
    await inside.reconcile("none", where)
    scale = f"{path(API, 'RoleScaler', where, 'chat-decode')}/scale"
    assert (await cluster.admin.get(scale)).json()["status"] == {
        "replicas": 1,
        "selector": "baton.dev/role=both,baton.dev/service=chat",
    }
    await cluster.api.patch(scale, {"spec": {"replicas": 3}})
    await settled(cluster, inside, where)
    assert (await cluster.admin.get(scale)).json()["status"]["replicas"] == 3
    reasons = {}
    for one in (await cluster.admin.get(path(API, "RoleScaler", where))).json()["items"]:
        (condition,) = one["status"]["conditions"]
        reasons[one["metadata"]["name"]] = (condition["type"], condition["status"], condition["reason"])
    assert reasons == {
        "chat-decode": ("Bound", "True", "Bound"),
        "mine": ("Bound", "False", "OtherName"),
        "alone": ("Bound", "False", "NoService"),
    }


class Killed(BaseException):
    """The operator is gone, here and now."""


class Killing:
    """Ends it before its nth write, or after."""

    def __init__(self, number: int, after: bool) -> None:
        self.number = number
        self.after = after
        self.writes = 0

    def guard(self) -> None:
        self.writes += 1
        if self.writes == self.number and not self.after:
            raise Killed

    def answered(self, method: str, code: int) -> None:
        if method != "GET" and self.writes == self.number and self.after:
            raise Killed


async def stages(cluster: RealCluster, inside: Inside, where: str) -> None:
    """A service is made, gets its pods, and is changed: from a scaled one to a pair of another image."""
    await cluster.put(SCALED, namespace=where)
    await settled(cluster, inside, where)
    await cluster.put(PAIR | {"engine": {"image": "registry.example/worker:2"}}, namespace=where)
    await settled(cluster, inside, where)


async def test_reconcile_killed_at_any_write_converges(cluster: RealCluster, api: ApiClient) -> None:
    """Killed after a write is as killed before the next one: the operator remembers nothing."""
    count = Killing(0, False)
    whole = await namespace(cluster, "killed-nowhere")
    await stages(cluster, Inside(api, count.guard), whole)
    wanted = await cluster.objects(whole)
    assert len(wanted) > 15
    killed = 0
    for number in range(1, count.writes + 1):
        where = await namespace(cluster, f"killed-{number}")
        killing = Killing(number, True)
        try:
            await stages(cluster, Inside(api, killing.guard, killing.answered), where)
        except Killed:
            killed += 1
        await stages_from_there(cluster, Inside(api), where)
        assert await cluster.objects(where) == wanted, number
    assert killed == count.writes


async def stages_from_there(cluster: RealCluster, inside: Inside, where: str) -> None:
    """Another operator continues: first with the spec as it is, then with the last one."""
    await settled(cluster, inside, where)
    await cluster.put(PAIR | {"engine": {"image": "registry.example/worker:2"}}, namespace=where)
    await settled(cluster, inside, where)


async def whole_life(
    cluster: RealCluster, where: str, settle: Callable[[], Awaitable[None]]
) -> list[dict[str, Manifest]]:
    """Return the objects after each change, from a fetched model to a suspended service."""
    states = []
    changed = HUB | {"decode": {"replicas": 2}, "engine": {"image": "registry.example/worker:2"}}
    canary = {"rollout": {"canary": {"steps": [{"weight": 50, "pause": "0s"}]}}}
    exposed = {"exposure": {"type": "Ingress", "hosts": ["chat.example.org"]}}

    async def change(spec: dict[str, Any]) -> None:
        await cluster.put(spec, namespace=where)
        await settle()
        states.append(await cluster.objects(where))

    await change(HUB)
    first = (await cluster.service(namespace=where))["status"]["currentRevision"]
    await change({**changed, **exposed, **canary})
    await change({**changed, "rollout": {"rollbackTo": first}})
    await change({**HUB, "suspend": True})
    return states


async def test_reconcile_killed_at_each_first_write_converges(cluster: RealCluster, api: ApiClient) -> None:
    """Each operator is killed before or after its first write; the next one continues from any such state."""
    whole = await namespace(cluster, "life-of-one")
    one = Inside(api)
    wanted = await whole_life(cluster, whole, lambda: settled(cluster, one, whole))
    where = await namespace(cluster, "life-of-many")
    killed = 0

    async def by_mortals() -> None:
        nonlocal killed
        quiet = 0
        while quiet < 2:
            before = killed
            for after in (False, True):
                killing = Killing(1, after)
                try:
                    await Inside(api, killing.guard, killing.answered).reconcile(namespace=where)
                except Killed:
                    killed += 1
            if killed == before:  # no write is left, unless the cluster does something
                await cluster.ready_pods(namespace=where)
                quiet += 1
            else:
                quiet = 0

    states = await whole_life(cluster, where, by_mortals)
    for number, (objects, expected) in enumerate(zip(states, wanted, strict=True)):
        assert set(objects) == set(expected), f"after change {number}"
        for name, manifest in objects.items():
            assert manifest == expected[name], f"{name} after change {number}"
    assert killed > 2 * 40
    print(f"{killed} operators were killed, half of them before their first write and half after it")
