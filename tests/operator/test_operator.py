"""The operator as a process against a real API server: its rights, its Lease, and outages."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from baton_operator import rbac
from baton_operator.api_server import path
from baton_operator.lease import DURATION_S
from baton_operator.scalers import API
from tests.operator.real_cluster import OPERATOR, RealCluster, counted, real_cluster, running_operator

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

AWAY_S = float(os.environ.get("BATON_TEST_API_AWAY_S", "20"))
"""Seconds for which the API server is away; longer than the Lease lasts."""

MODEL: dict[str, Any] = {"uri": "builtin://smollm2"}
PAIR: dict[str, Any] = {"model": MODEL, "prefill": {}, "decode": {}}
LEASE = path("coordination.k8s.io/v1", "Lease", OPERATOR, "baton-operator")

EXPOSED: dict[str, Any] = {"hosts": ["chat.example.org"], "tls": {"issuerRef": {"name": "issuer"}}}
EVERYTHING: dict[str, Any] = {
    "model": {"uri": "hf://org/model", "cache": {"type": "PVC", "size": "20Gi"}},
    "prefill": {},
    "decode": {"scaling": {"minReplicas": 1, "maxReplicas": 4}},
    "autoscaling": {"mode": "External"},
    "router": {"replicas": 2},
    "exposure": {"type": "HTTPRoute", "gatewayRefs": [{"name": "gateway"}], **EXPOSED},
}
"""A service that has one of everything but an Ingress."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    async with real_cluster(tmp_path_factory.mktemp("kubernetes")) as made:
        await made.define_others()
        yield made


async def reaches(cluster: RealCluster, type: str, wanted: str, name: str = "chat") -> None:
    async def so() -> bool:
        return await cluster.condition(type, name) == wanted

    await cluster.until(so)


async def test_all_its_rights_are_used_and_none_is_missing(cluster: RealCluster) -> None:
    """From an empty namespace to a service that serves, through changes, until it has been deleted."""
    async with running_operator(cluster, "rights") as operator:
        await cluster.put(EVERYTHING)
        await cluster.put({"serviceName": "chat", "uri": "hf://a/b"}, "tune", kind="LoraAdapter")
        await reaches(cluster, "ModelReady", "False Fetching")
        await cluster.ready_pods()  # the model's Job is done, and routers are ready
        await reaches(cluster, "ModelReady", "True Present")
        await cluster.until(lambda: _serves(cluster))
        assert await cluster.condition("Active", "tune", "LoraAdapter") == "False NotImplemented"
        # A service without any of it, and then with an Ingress: what was made is pruned.
        await cluster.put({**PAIR, "security": {"networkPolicy": False}} | {"router": {"replicas": 1}})
        await cluster.until(
            lambda: _gone(cluster, "RoleScaler", "PodDisruptionBudget chat-router", "NetworkPolicy")
        )
        for kind, spec in STRAYS:
            await _stray(cluster, kind, spec)
        await cluster.put({**PAIR, "exposure": {"type": "Ingress", **EXPOSED}})
        await cluster.until(lambda: _gone(cluster, "stray"))
        await cluster.put({**PAIR, "exposure": {"type": "Ingress", **EXPOSED, "annotations": {"a": "b"}}})
        await cluster.put(PAIR)
        await cluster.until(lambda: _gone(cluster, "Ingress"))
        # The same thing happens again: its Event counts on.
        for replicas in (0, 1, 0, 1):
            await cluster.put({**PAIR, "suspend": not replicas})
            await reaches(cluster, "Ready", "False Suspended" if not replicas else "True Serving")
        assert await operator.status("/healthz") == await operator.status("/readyz") == 200
    asked = cluster.asked()
    refused = [one for one in asked if one.code == 403]
    assert not refused
    assert not [one for one in asked if one.resource == "secrets"]
    used = {(one.group, one.resource, one.verb) for one in asked}
    unused = {
        (rule.group, resource, verb)
        for rule in [*rbac.SERVICES, *rbac.own("baton-operator")]
        for resource in rule.resources
        for verb in rule.verbs
    } - used
    assert unused - IMPLIED == set()
    assert IMPLIED & used == set(), "else they need no reason of their own"


def _implied() -> set[tuple[str, str, str]]:
    """Rights that the API server asks for within a request for something else, so that no log has them."""
    applied = {
        (rule.group, resource, "create")
        for rule in rbac.SERVICES
        for resource in rule.resources
        if {"patch", "delete"} <= set(rule.verbs)  # server-side apply makes what is not there
    }
    given_on = {("discovery.k8s.io", "endpointslices", verb) for verb in ("list", "watch")}
    return applied | given_on | {("baton.dev", "inferenceservices/finalizers", "update")}


IMPLIED = _implied()

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
"""What an older operator may have made, of kinds of which today's names nothing else."""


async def _stray(cluster: RealCluster, kind: tuple[str, str], body: dict[str, Any]) -> None:
    labels = {"baton.dev/service": "chat", "app.kubernetes.io/managed-by": "baton"}
    await cluster.api.post(path(*kind, "models"), {"metadata": {"name": "stray", "labels": labels}, **body})


async def _serves(cluster: RealCluster) -> bool:
    await cluster.ready_pods()
    return await cluster.condition("Ready") == "True Serving"


async def _gone(cluster: RealCluster, *parts: str) -> bool:
    """And in the meantime the cluster does its part."""
    await cluster.ready_pods()
    return not [name for name in await cluster.objects() if any(part in name for part in parts)]


async def test_of_two_operators_one_writes_and_the_other_goes_on_when_it_is_killed(
    cluster: RealCluster,
) -> None:
    since = len(cluster.asked())
    async with running_operator(cluster, "first") as first:
        await cluster.until(lambda: _leads(first))
        async with running_operator(cluster, "second") as second:
            await cluster.until(lambda: _is(second, "/readyz"))
            await cluster.put(PAIR, "one")
            await reaches(cluster, "SpecSupported", "True Supported", "one")
            first.process.kill()
            await first.process.wait()
            died = len(cluster.asked())
            await cluster.put(PAIR, "two")
            await asyncio.wait_for(cluster.until(lambda: _leads(second)), DURATION_S + 10)
            await reaches(cluster, "SpecSupported", "True Supported", "two")
            holder = (await cluster.admin.get(LEASE)).json()["spec"]["holderIdentity"]
            assert holder == "second"
            before = [one for one in cluster.asked(since)[: died - since] if one.is_work]
            assert {one.name.partition("-")[0] for one in before if one.verb == "patch"} == {"one"}
            await _never_at_once(cluster, since)


async def _never_at_once(cluster: RealCluster, since: int) -> None:
    """Each write was made by whom the Lease named: nobody wrote from the one's death to the other's Lease."""
    asked = cluster.asked(since)
    holders = [
        number for number, one in enumerate(asked) if one.resource == "leases" and one.verb == "update"
    ]
    work = [number for number, one in enumerate(asked) if one.is_work]
    assert work and holders[0] < work[0]


async def _leads(operator: Any) -> bool:
    return bool(await operator.figure("baton_operator_leader") == 1)


async def _is(operator: Any, path: str) -> bool:
    return bool(await operator.status(path) == 200)


async def test_one_that_stops_leaves_the_lease_to_the_next_at_once(cluster: RealCluster) -> None:
    async with running_operator(cluster, "third") as third:
        await cluster.until(lambda: _leads(third))
        third.process.terminate()
        assert await asyncio.wait_for(third.process.wait(), 20) == 0, third.log.read_text()
    assert (await cluster.admin.get(LEASE)).json()["spec"]["holderIdentity"] == ""


async def test_one_that_loses_the_lease_writes_no_more_and_ends(cluster: RealCluster) -> None:
    async with running_operator(cluster, "robbed") as operator:
        await cluster.until(lambda: _is(operator, "/readyz"))
        await cluster.until(lambda: _leads(operator))
        await cluster.api.patch(LEASE, {"spec": {"holderIdentity": "somebody"}})
        assert await asyncio.wait_for(operator.process.wait(), 20) == 1
        assert "is lost" in operator.log.read_text()
    await cluster.api.patch(LEASE, {"spec": {"holderIdentity": ""}})


async def test_what_is_asked_for_while_the_api_server_is_away_is_done_when_it_is_back(
    cluster: RealCluster,
) -> None:
    """The operator ends when it cannot renew its Lease; whatever runs it starts it again."""
    async with running_operator(cluster, "before") as operator:
        await cluster.until(lambda: _leads(operator))
        await cluster.put(PAIR, "kept")
        await reaches(cluster, "SpecSupported", "True Supported", "kept")
        objects = await cluster.objects()
        await cluster.api.server.stop()
        assert await asyncio.wait_for(operator.process.wait(), 30) == 1
    async with running_operator(cluster, "before") as operator:
        assert await operator.status("/healthz") == 200, "waiting is no reason to be killed"
        await asyncio.sleep(AWAY_S)  # the outage itself
        assert operator.process.returncode is None
        assert await operator.status("/readyz") == 503
        await cluster.api.server.restart(cluster.admin)
        await cluster.put(PAIR, "later")
        await cluster.until(lambda: _leads(operator), 60)
        await reaches(cluster, "SpecSupported", "True Supported", "later")
        there = await cluster.objects()
        assert {name: there[name] for name in objects} == objects, "nothing that was there has changed"


async def test_a_restart_of_the_api_server_is_survived(cluster: RealCluster) -> None:
    """Shorter than the Lease lasts: watches break, and are taken up again by the same process."""
    async with running_operator(cluster, "survivor") as operator:
        await cluster.until(lambda: _leads(operator))
        await cluster.until(lambda: _is(operator, "/readyz"))
        await cluster.api.server.stop()
        await cluster.api.server.restart(cluster.admin)
        await cluster.put(PAIR, "restarted")
        await reaches(cluster, "SpecSupported", "True Supported", "restarted")
        where = path(API, "InferenceService", "models", "restarted")
        deployment = path("apps/v1", "Deployment", "models", "restarted-router")
        await cluster.api.patch(deployment, {"spec": {"replicas": 7}})

        async def put_back() -> bool:
            return bool((await cluster.admin.get(deployment)).json()["spec"]["replicas"] == 1)

        await cluster.until(put_back)
        assert (await cluster.admin.get(where)).json()["status"]["observedGeneration"] == 1


async def test_each_transition_has_one_event_and_what_comes_back_counts(cluster: RealCluster) -> None:
    events = (await cluster.admin.get(path("v1", "Event", "models"))).json()["items"]
    of_chat = [one for one in events if one["involvedObject"]["name"] == "chat"]
    suspended = [one for one in of_chat if one["reason"] == "Suspended"]
    assert [(one["count"], one["type"]) for one in suspended] == [(2, "Warning")], suspended
    assert counted(cluster.asked())["create events"] == len(events)
