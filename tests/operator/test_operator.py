"""The operator as a process against a real API server: its rights, its Lease, and outages."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from baton_api import labels as label_names
from baton_api import metrics
from baton_http.kubernetes import KubernetesAccess
from baton_operator import chart
from baton_operator.cluster.api_resources import API, path
from baton_operator.manifests.inference_pool import POOL_API, POOL_KIND
from baton_operator.reconcilers.lora_adapters import FINALIZER
from baton_router.workers.discovery.kubernetes import KubernetesWorkers
from baton_router.workers.discovery.listed import ListedWorker
from tests.operator.api_address import api_address
from tests.operator.fake_prometheus import NOTHING, fake_prometheus
from tests.operator.real_cluster import (
    LIMIT_S,
    OPERATOR,
    RealCluster,
    real_cluster,
    running_operator,
    started,
)
from tests.ports import steady_port

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

AWAY_S = float(os.environ.get("BATON_TEST_API_AWAY_S", "20"))
"""Seconds for which the API server is away; longer than the Lease lasts."""

MODEL: dict[str, Any] = {"uri": "builtin://smollm2"}
PAIR: dict[str, Any] = {"model": MODEL, "prefill": {}, "decode": {}}
LEASE = path("coordination.k8s.io/v1", "Lease", OPERATOR, "baton-operator")

EXPOSED: dict[str, Any] = {"hosts": ["chat.example.org"], "tls": {"issuerRef": {"name": "issuer"}}}
EVERYTHING: dict[str, Any] = {
    "model": {
        "uri": "hf://org/model",
        "cache": {"type": "PVC", "size": "20Gi", "storageClassName": "growing"},
    },
    "prefill": {},
    "decode": {"scaling": {"minReplicas": 1, "maxReplicas": 4}},
    "autoscaling": {"mode": "External"},
    "router": {
        "replicas": 2,
        "batches": {
            "execution": "Jobs",
            "databaseSecretRef": {"name": "ledger"},
            "files": {"claimName": "files"},
        },
    },
    "exposure": {"type": "HTTPRoute", "gatewayRefs": [{"name": "gateway"}], "hosts": EXPOSED["hosts"]},
}
"""A service that has one of everything but an Ingress."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    async with real_cluster(tmp_path_factory.mktemp("kubernetes")) as running:
        await running.define_others()
        yield running


async def reaches(
    cluster: RealCluster, type: str, wanted: str, name: str = "chat", kind: str = "InferenceService"
) -> None:
    async def so() -> bool:
        return await cluster.condition(type, name, kind) == wanted

    await cluster.until(so)


async def has_url(cluster: RealCluster, name: str, url: str) -> None:
    async def so() -> bool:
        return bool((await cluster.service(name))["status"]["url"] == url)

    await cluster.until(so)


async def test_operator_rights_are_all_used_and_sufficient(cluster: RealCluster) -> None:
    """From an empty namespace to a service that serves, through changes, until it has been deleted."""
    async with running_operator(cluster, "rights") as operator:
        await cluster.put(EVERYTHING)
        await cluster.put({"serviceName": "chat", "uri": "hf://a/b"}, "tune", kind="LoraAdapter")
        await reaches(cluster, "ModelReady", "False Fetching")

        async def is_fetched() -> bool:
            await cluster.ready_pods()  # once the model's Job exists it completes, and routers are ready
            return await cluster.condition("ModelReady") == "True Present"

        await cluster.until(is_fetched)
        await cluster.until(lambda: _serves(cluster))
        await reaches(cluster, "Active", "False AdaptersNotEnabled", "tune", "LoraAdapter")
        await _loads_an_adapter(cluster)
        await _claim_grows(cluster)
        await _batch_from_beginning_to_end(cluster)
        await _grows_and_shrinks(cluster)
        # A service without any of it, and then with an Ingress: what was made is pruned.
        await cluster.put({**PAIR, "security": {"networkPolicy": False}} | {"router": {"replicas": 1}})
        await cluster.until(
            lambda: _gone(cluster, "RoleScaler", "PodDisruptionBudget chat-router", "NetworkPolicy")
        )
        for kind, spec in STRAYS:
            await _stray(cluster, kind, spec)
        await cluster.put({**PAIR, "exposure": {"type": "Ingress", **EXPOSED}})
        await cluster.until(lambda: _gone(cluster, "stray"))
        await cluster.until(lambda: _has_ingress(cluster, None))
        await cluster.put({**PAIR, "exposure": {"type": "Ingress", **EXPOSED, "annotations": {"a": "b"}}})
        await cluster.until(lambda: _has_ingress(cluster, "b"))
        await cluster.put(PAIR)
        await cluster.until(lambda: _gone(cluster, "Ingress"))
        # The same thing happens again: its Event counts on.
        for suspend in (True, False, True, False):
            await cluster.put({**PAIR, "suspend": suspend})
            await cluster.until(partial(_stands, cluster, "chat", suspend))
        await _has_an_inference_pool(cluster)
        await _works_on_several_nodes(cluster)
        await _rolls_out_and_back(cluster)
        await cluster.put({**PAIR, "decode": {"replicas": 3}})
        await cluster.until(lambda: _serves(cluster, "3/3"))
        await cluster.api.delete(path(API, "InferenceService", "models", "chat"))
        assert await operator.status("/healthz") == await operator.status("/readyz") == 200
    requests = cluster.requests()
    refused = [one for one in requests if one.code == 403]
    assert not refused
    assert {one.verb for one in requests if one.resource == "secrets"} == {"create"}
    used = {(one.group, one.resource, one.verb) for one in requests}
    unused = {
        (rule.group, resource, verb)
        for rule in [*chart.SERVICES, *chart.CLUSTER, *chart.own("baton-operator")]
        for resource in rule.resources
        for verb in rule.verbs
    } - used
    assert unused - IMPLIED == set()
    assert IMPLIED & used == set(), "else they need no reason of their own"


async def test_service_is_gone_at_once_without_an_operator(cluster: RealCluster) -> None:
    """Kopf leaves no finalizer and no annotation at custom resources."""
    async with running_operator(cluster, "leaving"):
        await cluster.put(PAIR, "left")
        await reaches(cluster, "SpecSupported", "True Supported", "left")
        await cluster.put({"serviceName": "left", "uri": "hf://a/b"}, "poet", kind="LoraAdapter")
        await reaches(cluster, "Active", "False AdaptersNotEnabled", "poet", "LoraAdapter")
    for kind, name in (("LoraAdapter", "poet"), ("InferenceService", "left")):
        where = path(API, kind, "models", name)
        metadata = (await cluster.admin.get(where)).json()["metadata"]
        assert "finalizers" not in metadata and "annotations" not in metadata
        await cluster.api.delete(where)
        assert (await cluster.admin.get(where)).status_code == 404


async def test_exposure_follows_the_gateways_status(cluster: RealCluster) -> None:
    """
    The URL has the listener's scheme and port, the condition what the controller wrote.

    The Gateway is created after the service: its watch alone must update the URL.
    """
    api = "gateway.networking.k8s.io/v1"
    listener = {"name": "web", "protocol": "HTTP", "port": 8080}
    gateway = {
        "apiVersion": api,
        "kind": "Gateway",
        "metadata": {"name": "front"},
        "spec": {"listeners": [listener]},
    }
    exposure = {"type": "HTTPRoute", "gatewayRefs": [{"name": "front"}], "hosts": ["routed.example.org"]}
    async with running_operator(cluster, "routes"):
        await cluster.put({**PAIR, "exposure": exposure}, "routed")
        await reaches(cluster, "ExposureReady", "Unknown Pending", "routed")
        assert (await cluster.service("routed"))["status"]["url"] == "https://routed.example.org"
        await cluster.api.post(path(api, "Gateway", "models"), gateway)
        await has_url(cluster, "routed", "http://routed.example.org:8080")
        changed = {"spec": {"listeners": [{**listener, "port": 9090}]}}
        await cluster.api.patch(path(api, "Gateway", "models", "front"), changed)
        await has_url(cluster, "routed", "http://routed.example.org:9090")
        where = path(api, "HTTPRoute", "models", "routed")
        for accepted, wanted in (("False", "False NotAllowedByListeners"), ("True", "True Accepted")):
            condition = {"type": "Accepted", "status": accepted, "reason": "NotAllowedByListeners"}
            parent = {"parentRef": {"name": "front"}, "conditions": [{**condition, "observedGeneration": 9}]}
            await cluster.api.patch(where, {"status": {"parents": [parent]}})
            await reaches(cluster, "ExposureReady", wanted, "routed")
        await cluster.api.delete(path(API, "InferenceService", "models", "routed"))


async def _loads_an_adapter(cluster: RealCluster) -> None:
    """As far as its rights are concerned: the pods have no address."""
    engine = {"type": "vLLM", "image": "vllm:1", "lora": {}}
    spec = {"model": {"uri": "pvc://models/tiny"}, "engine": engine, "decode": {}}
    # There is no garbage collection here, and the test checks later that no policy is left.
    await cluster.put({**spec, "security": {"networkPolicy": False}}, "tuned")
    adapter = {"serviceName": "tuned", "uri": "file:///pirate"}
    where = path(API, "LoraAdapter", "models", "pirate")
    await cluster.put(adapter, "pirate", kind="LoraAdapter")
    # As an operator left it that has loaded it; nothing has it any more.
    await cluster.api.patch(where, {"metadata": {"finalizers": [FINALIZER]}})

    async def is_loading() -> bool:
        await cluster.ready_pods("tuned")
        free = "finalizers" not in (await cluster.admin.get(where)).json()["metadata"]
        return free and await cluster.condition("Active", "pirate", "LoraAdapter") == "False Loading"

    await cluster.until(is_loading)
    await cluster.api.delete(path(API, "InferenceService", "models", "tuned"))
    await cluster.api.delete(path(API, "LoraAdapter", "models", "pirate"))

    async def is_gone() -> bool:
        answer = await cluster.admin.get(path(API, "LoraAdapter", "models", "pirate"))
        return answer.status_code == 404

    await cluster.until(is_gone)


async def _claim_grows(cluster: RealCluster) -> None:
    """Once it is bound, because its class allows it."""
    where = path("v1", "PersistentVolumeClaim", "models", "chat-model")
    growing = {"metadata": {"name": "growing"}, "provisioner": "none", "allowVolumeExpansion": True}
    await cluster.api.post("/apis/storage.k8s.io/v1/storageclasses", growing)
    await cluster.api.patch(where, {"spec": {"volumeName": "volume"}})
    bound = {"phase": "Bound", "capacity": {"storage": "20Gi"}}
    await cluster.api.patch(f"{where}/status", {"status": bound})
    cache = {**EVERYTHING["model"]["cache"], "size": "40Gi"}
    await cluster.put({**EVERYTHING, "model": {**EVERYTHING["model"], "cache": cache}})

    async def has_grown() -> bool:
        claim = (await cluster.admin.get(where)).json()
        return bool(claim["spec"]["resources"]["requests"]["storage"] == "40Gi")

    await cluster.until(has_grown)


async def _grows_and_shrinks(cluster: RealCluster) -> None:
    """By its own decisions, which have a Prometheus to ask."""

    async def desired(replicas: int) -> bool:
        await cluster.ready_pods()
        return bool((await cluster.service())["status"]["decode"].get("desiredReplicas") == replicas)

    async with fake_prometheus() as prometheus:
        windows = {
            "scaleUp": {"stabilizationWindow": "0s"},
            "scaleDown": {"stabilizationWindow": "0s"},
        }
        autoscaling = {"mode": "Internal", "interval": "5s", "prometheus": {"url": prometheus.url}}
        decode = {"scaling": {"minReplicas": 1, "maxReplicas": 2, **windows}}
        # The worker that is fullest has hardly any KV blocks left.
        full = {"demand_answer": 1000.0, "decode_generated": 900.0, "decode_fullest": 0.95, "in_flight": 9.0}
        prometheus.values_by_name |= full
        await cluster.put({**EVERYTHING, "decode": decode, "autoscaling": autoscaling})
        await cluster.until(lambda: desired(2))
        await reaches(cluster, "ScalingActive", "True Measured")
        await cluster.ready_pods()  # the second worker may have been desired only
        pods = (await cluster.admin.get(path("v1", "Pod", "models"))).json()["items"]
        prometheus.running = {one["metadata"]["name"]: 1.0 for one in pods}
        prometheus.values_by_name = dict(NOTHING)
        await cluster.until(lambda: desired(1))


def _implied() -> set[tuple[str, str, str]]:
    """Rights that the API server asks for within a request for something else, so that no log has them."""
    applied = {
        (rule.group, resource, "create")
        for rule in chart.SERVICES
        for resource in rule.resources
        if {"create", "patch", "delete"} <= set(rule.verbs)  # server-side apply makes what is not there
    }
    # These are made once, by requests of their own.
    applied -= {("baton.dev", "rolescalers", "create"), ("batch", "jobs", "create")}
    given_on = {("discovery.k8s.io", "endpointslices", verb) for verb in ("list", "watch")}
    given_on.add(("baton.dev", "batchjobs", "create"))
    return applied | given_on | {("baton.dev", "inferenceservices/finalizers", "update")}


IMPLIED = _implied()


async def _batch_from_beginning_to_end(cluster: RealCluster) -> None:
    """One that a router has made: its Job is made, rests, and is deleted; at last it is deleted itself."""
    where = path(API, "BatchJob", "models")
    spec = {"serviceName": "chat", "batchId": "batch_1", "ttlAfterFinished": "1m"}
    by_router = {label_names.MANAGED_BY: "baton-router"}
    await cluster.api.post(
        where,
        {
            "apiVersion": API,
            "kind": "BatchJob",
            "metadata": {"name": "night", "labels": by_router},
            "spec": spec,
        },
    )

    async def stands(wanted: str) -> None:
        async def so() -> bool:
            return await cluster.condition("Complete", "night", "BatchJob") == wanted

        await cluster.until(so)

    await stands("False Waiting")
    await cluster.api.patch(f"{where}/night", {"spec": {"suspend": True}})
    await stands("False Suspended")
    failed = {"type": "Failed", "status": "True", "reason": "Cancelled", "message": "It was."}
    long_ago = {"observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    ended = {"phase": "cancelled", "conditions": [{**failed, **long_ago}]}
    await cluster.api.patch(f"{where}/night/status", {"status": ended})

    async def gone() -> bool:
        return (await cluster.admin.get(f"{where}/night")).status_code == 404

    await cluster.until(gone)


async def test_router_account_uses_exactly_its_rights(cluster: RealCluster, tmp_path: Path) -> None:
    async with running_operator(cluster, "accounts"):
        await cluster.put(PAIR, "routed")
        await reaches(cluster, "SpecSupported", "True Supported", "routed")
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text(await cluster.token("models", "routed-router"))
    (account / "namespace").write_text("models")
    (account / "ca.crt").write_bytes((cluster.api.account / "ca.crt").read_bytes())
    name = "system:serviceaccount:models:routed-router"
    await cluster.granted(name, "watch", "discovery.k8s.io/v1/endpointslices", "models")
    access = KubernetesAccess(cluster.api.url, account)
    listed: list[frozenset[ListedWorker]] = []
    workers = KubernetesWorkers(access, "baton.dev/service=routed", "http", random.Random(0), retry_s=0.1)
    watching = asyncio.create_task(workers.watch(listed.append))
    try:
        await cluster.until(lambda: listed)
        await cluster.api.post(path("discovery.k8s.io/v1", "EndpointSlice", "models"), SLICE)
        await cluster.until(lambda: any(listed[-1]))
    finally:
        watching.cancel()
    requests = cluster.requests_of(name)
    assert {one.code for one in requests} == {200}
    role = path("rbac.authorization.k8s.io/v1", "Role", "models", "routed-router")
    assert {(one.group, one.resource, one.verb) for one in requests} == {
        (group, resource, verb)
        for rule in (await cluster.admin.get(role)).json()["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    await _may_do_nothing(cluster, await cluster.token("models", "routed-workers"))


async def _may_do_nothing(cluster: RealCluster, token: str) -> None:
    """Check that it has only every account's rights: to read its rights and the API server's version."""
    review = {"apiVersion": "authorization.k8s.io/v1", "spec": {"namespace": "models"}}
    answer = await cluster.admin.post(
        "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews",
        json={**review, "kind": "SelfSubjectRulesReview"},
        headers={"authorization": f"Bearer {token}"},
    )
    rules = answer.raise_for_status().json()["status"]["resourceRules"]
    groups = {group for rule in rules for group in rule["apiGroups"]}
    assert groups <= {"authorization.k8s.io", "authentication.k8s.io"}, rules


SLICE: dict[str, Any] = {
    "metadata": {
        "name": "routed-decode",
        "labels": {label_names.SERVICE: "routed", label_names.ROLE: "both"},
    },
    "addressType": "IPv4",
    "endpoints": [{"addresses": ["10.0.0.1"]}],
    "ports": [{"name": "http", "port": 8000}],
}

STRAYS: tuple[tuple[tuple[str, str], dict[str, Any]], ...] = (
    (("v1", "ServiceAccount"), {}),
    (("v1", "ConfigMap"), {}),
    (("v1", "Service"), {"spec": {"ports": [{"port": 1}]}}),
    (("rbac.authorization.k8s.io/v1", "Role"), {"rules": []}),
    (
        ("rbac.authorization.k8s.io/v1", "RoleBinding"),
        {"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "none"}},
    ),
    (
        ("apps/v1", "Deployment"),
        {
            "spec": {
                "selector": {"matchLabels": {"a": "b"}},
                "template": {
                    "metadata": {"labels": {"a": "b"}},
                    "spec": {"containers": [{"name": "main", "image": "none"}]},
                },
            }
        },
    ),
)
"""Objects that an older operator may have made, of kinds that today's operator otherwise never makes."""


async def _stray(cluster: RealCluster, kind: tuple[str, str], body: dict[str, Any]) -> None:
    labels = {label_names.SERVICE: "chat", label_names.MANAGED_BY: "baton"}
    await cluster.api.post(path(*kind, "models"), {"metadata": {"name": "stray", "labels": labels}, **body})


async def _serves(cluster: RealCluster, decode: str = "") -> bool:
    await cluster.ready_pods()
    workers = (await cluster.service())["status"].get("decode", {})
    counts = f"{workers.get('readyReplicas')}/{workers.get('desiredReplicas')}"
    return await cluster.condition("Ready") == "True Serving" and counts.endswith(decode)


async def _stands(cluster: RealCluster, name: str, suspended: bool) -> bool:
    await cluster.ready_pods(name)
    return await cluster.condition("Ready", name) == ("False Suspended" if suspended else "True Serving")


async def _has_ingress(cluster: RealCluster, annotation: str | None) -> bool:
    ingress = (await cluster.objects()).get("Ingress chat", {"metadata": {"annotations": {"a": ""}}})
    return bool(ingress["metadata"].get("annotations", {}).get("a") == annotation)


async def _has_an_inference_pool(cluster: RealCluster) -> None:
    """Its InferencePool is created, changed, and deleted."""

    async def are(modes: list[str]) -> bool:
        pools = (await cluster.admin.get(path(POOL_API, POOL_KIND, "models"))).json()["items"]
        return [one["spec"]["endpointPickerRef"]["failureMode"] for one in pools] == modes

    for mode in ("FailClose", "FailOpen"):
        exposure = {"inferencePool": {"failureMode": mode}}
        await cluster.put({**PAIR, "security": {"networkPolicy": False}, "exposure": exposure})
        await cluster.until(lambda mode=mode: are([mode]))  # type: ignore[misc]
    await cluster.put(PAIR)
    await cluster.until(lambda: are([]))


async def _works_on_several_nodes(cluster: RealCluster) -> None:
    """Its LeaderWorkerSet is created, changed, and deleted with the service's next revision."""
    api, kind = "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"
    spec = {"model": {"uri": "pvc://models/a"}, "engine": {"type": "vLLM", "image": "vllm:1"}}
    nodes = {"parallelism": {"tensor": 2, "nodes": 2}}

    async def are(replicas: list[int]) -> bool:
        groups = (await cluster.admin.get(path(api, kind, "models"))).json()["items"]
        return [one["spec"]["replicas"] for one in groups] == replicas

    for replicas in (1, 2):
        await cluster.put({**spec, "decode": {**nodes, "replicas": replicas}}, "wide")
        await cluster.until(lambda replicas=replicas: are([replicas]))  # type: ignore[misc]
    await cluster.put({**spec, "decode": {}, "rollout": {"strategy": "Recreate"}}, "wide")
    await cluster.until(lambda: are([]))
    await cluster.api.delete(path(API, "InferenceService", "models", "wide"))


async def _rolls_out_and_back(cluster: RealCluster) -> None:
    """By a canary to other workers, and by name to those from before."""
    first: str = (await cluster.service())["status"]["currentRevision"]
    changed = {**PAIR, "engine": {"image": "registry.example/worker:2"}}
    canary = {"canary": {"steps": [{"weight": 10, "pause": "1s"}]}}

    async def is_first(wanted: bool) -> bool:
        await cluster.ready_pods()
        current: str = (await cluster.service())["status"]["currentRevision"]
        return (current == first) == wanted

    await cluster.put({**changed, "rollout": canary})
    await cluster.until(lambda: is_first(False))
    await cluster.put({**changed, "rollout": {"rollbackTo": first}})
    await cluster.until(lambda: is_first(True))


async def _gone(cluster: RealCluster, *parts: str) -> bool:
    """And in the meantime the cluster does its part."""
    await cluster.ready_pods()
    return not [name for name in await cluster.objects() if any(part in name for part in parts)]


async def test_operators_two_running_survivor_takes_over_after_kill(
    cluster: RealCluster,
) -> None:
    since = len(cluster.requests())
    async with running_operator(cluster, "first") as first:
        await cluster.until(lambda: _leads(first))
        async with running_operator(cluster, "second") as second:
            await cluster.until(lambda: _is(second, "/readyz"))
            await cluster.put(PAIR, "one")
            await reaches(cluster, "SpecSupported", "True Supported", "one")
            first.process.kill()
            await first.process.wait()
            await cluster.put(PAIR, "two")
            await cluster.until(lambda: _leads(second))
            await reaches(cluster, "SpecSupported", "True Supported", "two")
            holder = (await cluster.admin.get(LEASE)).json()["spec"]["holderIdentity"]
            assert holder == "second"
    assert writers(cluster, since) == ["first", "second"]


def writers(cluster: RealCluster, since: int) -> list[str]:
    """
    Return the operators that wrote, in order; fail if one wrote while the Lease did not name it.

    The API server's log is in the order of its answers, and a Lease is written before anything else is.
    One Event, on its way when an operator was stopped, reports an earlier transition and may be late.
    """
    held, late = "", 0
    order: list[str] = []
    for one in cluster.requests(since):
        if one.resource == "leases" and one.verb in ("create", "update") and one.code < 300:
            held = one.who
        elif one.resource == "events" and one.code < 300 and one.who != held:
            late += 1
        elif one.is_work and one.code < 300:
            assert one.who == held, f"{one} while the Lease was {held}'s"
            order += [one.who] if order[-1:] != [one.who] else []
    assert late <= 1
    return order


async def test_operator_resumed_after_losing_lease_writes_nothing(
    cluster: RealCluster,
) -> None:
    since = len(cluster.requests())
    async with AsyncExitStack() as stack:
        frozen = await stack.enter_async_context(running_operator(cluster, "frozen"))
        await cluster.until(lambda: _leads(frozen))
        other = await stack.enter_async_context(running_operator(cluster, "next"))
        await cluster.until(lambda: _is(other, "/readyz"))
        await cluster.put(PAIR, "before")
        await reaches(cluster, "SpecSupported", "True Supported", "before")
        frozen.process.send_signal(signal.SIGSTOP)
        await cluster.put(PAIR, "meanwhile")  # it sees that change when it continues
        await cluster.until(lambda: _leads(other))
        await reaches(cluster, "SpecSupported", "True Supported", "meanwhile")
        frozen.process.send_signal(signal.SIGCONT)
        assert await asyncio.wait_for(frozen.process.wait(), LIMIT_S) == 1
        log_text = frozen.log.read_text()
        assert "Lost the Lease" in log_text or "does not hold" in log_text, log_text
        await cluster.put(PAIR, "after")
        await reaches(cluster, "SpecSupported", "True Supported", "after")
    assert writers(cluster, since) == ["frozen", "next"]


async def _leads(operator: Any) -> bool:
    return bool(await operator.figure(metrics.OPERATOR_LEADER.name) == 1)


async def _is(operator: Any, path: str) -> bool:
    return bool(await operator.status(path) == 200)


async def test_operator_stopped_releases_the_lease(cluster: RealCluster) -> None:
    async with running_operator(cluster, "third") as third:
        await cluster.until(lambda: _leads(third))
        third.process.terminate()
        assert await asyncio.wait_for(third.process.wait(), LIMIT_S) == 0, third.log.read_text()
    assert (await cluster.admin.get(LEASE)).json()["spec"]["holderIdentity"] == ""


async def test_operator_lost_lease_stops_writing_and_exits(cluster: RealCluster) -> None:
    async with running_operator(cluster, "robbed") as operator:
        await cluster.until(lambda: _is(operator, "/readyz"))
        await cluster.until(lambda: _leads(operator))
        await cluster.api.patch(LEASE, {"spec": {"holderIdentity": "somebody"}})
        assert await asyncio.wait_for(operator.process.wait(), LIMIT_S) == 1
        assert "Lost the Lease" in operator.log.read_text()
    await cluster.api.patch(LEASE, {"spec": {"holderIdentity": ""}})


async def test_operator_api_server_outage_is_caught_up_after_return(
    cluster: RealCluster,
) -> None:
    """The operator ends when it cannot renew its Lease; its supervisor starts it again."""
    async with running_operator(cluster, "before") as operator:
        await cluster.until(lambda: _leads(operator))
        await cluster.put(PAIR, "kept")

        async def has_looked_twice() -> bool:
            """The second look finds what the first one has made, and notes that workers are awaited."""
            services = (await cluster.admin.get(path(API, "InferenceService", "models"))).json()["items"]
            noted = [one.get("status", {}).get("revisions", [{}])[0] for one in services]
            return all(one.get("settled") is False for one in noted)

        await cluster.until(has_looked_twice)
        objects = await cluster.objects()
        await cluster.api.server.stop()
        assert await asyncio.wait_for(operator.process.wait(), LIMIT_S) == 1
    async with running_operator(cluster, "before") as operator:
        assert await operator.status("/healthz") == 200, "waiting is no reason to be killed"
        await asyncio.sleep(AWAY_S)  # the outage itself
        assert operator.process.returncode is None
        assert await operator.status("/readyz") == 503
        await cluster.api.server.restart(cluster.admin)
        await cluster.put(PAIR, "later")
        await cluster.until(lambda: _leads(operator))
        await reaches(cluster, "SpecSupported", "True Supported", "later")
        after = await cluster.objects()
        assert {name: after[name] for name in objects} == objects, "nothing that was there has changed"


async def test_operator_end_of_one_api_server_is_survived(cluster: RealCluster) -> None:
    """Watches break, and the same process takes them up again at another API server of the cluster."""
    own = int(cluster.api.url.rpartition(":")[2])
    port = steady_port()
    first, url = cluster.api.server.another(port), f"https://127.0.0.1:{port}"
    async with AsyncExitStack() as stack:
        stack.push_async_callback(first.stop)
        async with httpx.AsyncClient(base_url=url, verify=cluster.api.tls, trust_env=False) as client:
            await first.restart(client)
        address = await stack.enter_async_context(api_address(port))
        kubeconfig = cluster.folder / "address.kubeconfig"
        text = cluster.kubeconfig.read_text()
        kubeconfig.write_text(text.replace(cluster.api.url, f"https://127.0.0.1:{address.port}"))
        operator = await stack.enter_async_context(started(cluster.folder, kubeconfig, "survivor"))
        await cluster.until(lambda: _leads(operator))
        await cluster.until(lambda: _is(operator, "/readyz"))
        address.target = own
        await first.stop()
        await cluster.put(PAIR, "restarted")
        await reaches(cluster, "SpecSupported", "True Supported", "restarted")
        where = path(API, "InferenceService", "models", "restarted")
        deployment = path("apps/v1", "Deployment", "models", "restarted-router")
        await cluster.api.patch(deployment, {"spec": {"replicas": 7}})

        async def put_back() -> bool:
            return bool((await cluster.admin.get(deployment)).json()["spec"]["replicas"] == 1)

        await cluster.until(put_back)
        assert (await cluster.admin.get(where)).json()["status"]["observedGeneration"] == 1
        assert operator.process.returncode is None


async def test_events_repeated_transition_increments_one_event(cluster: RealCluster) -> None:
    where, since = path("v1", "Event", "models"), len(cluster.requests())

    async def events() -> list[dict[str, Any]]:
        items = (await cluster.admin.get(where)).json()["items"]
        return [one for one in items if one["involvedObject"]["name"] == "told"]

    async def has_come_back() -> bool:
        suspended = [one for one in await events() if one["reason"] == "Suspended"]
        return [(one["count"], one["type"]) for one in suspended] == [(2, "Warning")]

    async with running_operator(cluster, "telling"):
        for suspend in (False, True, False, True):
            await cluster.put({**PAIR, "suspend": suspend}, "told")
            await cluster.until(partial(_stands, cluster, "told", suspend))
        await cluster.until(has_come_back)

    reported = await events()
    sorts = {(one["reason"], one["message"].partition(".")[0]) for one in reported}
    assert len(sorts) == len(reported), "what is the same is one Event"
    done = [one for one in cluster.requests(since) if one.resource == "events" and one.code < 300]
    of_it = [one for one in done if one.name.startswith("told.")]
    created = [one.name for one in of_it if one.verb == "create"]
    assert sorted(created) == sorted(one["metadata"]["name"] for one in reported)
    assert len(of_it) == sum(one["count"] for one in reported)
