"""The operator's process before an API server that misbehaves: it recovers, or ends and is started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton_api import metrics
from baton_operator.cluster.api_resources import API
from tests.operator.fake_api import FakeApi
from tests.operator.real_cluster import LIMIT_S, OPERATOR, Process, started, until

pytestmark = pytest.mark.slow

PAIR: dict[str, Any] = {"model": {"uri": "builtin://smollm2"}, "prefill": {}, "decode": {}}


@asynccontextmanager
async def operated(folder: Path, *options: str) -> AsyncIterator[tuple[FakeApi, Process]]:
    """A service has been looked at, and watches live."""
    async with FakeApi(folder) as api, started(folder, api.kubeconfig, "operator", *options) as operator:
        await api.put(PAIR)
        await until(lambda: api.status().get("observedGeneration") == 1)

        async def ready() -> bool:
            return await operator.status("/readyz") == 200

        await until(ready)
        yield api, operator


async def follows(api: FakeApi, spec: dict[str, Any] = PAIR) -> None:
    """A change is still heard of."""
    before = api.status()["observedGeneration"]
    await api.put({**spec, "suspend": bool(before % 2)})
    await until(lambda: api.status()["observedGeneration"] == before + 1)


@pytest.mark.parametrize("status", [403, 409, 429, 500, 503])
async def test_requests_that_fail_for_a_while_are_made_again(tmp_path: Path, status: int) -> None:
    async with operated(tmp_path) as (api, operator):
        api.answers = [status] * 5
        await follows(api)
        assert not api.answers
        assert operator.process.returncode is None


@pytest.mark.parametrize("options", [(), ("--namespaces=models,others",)], ids=["cluster", "namespaces"])
async def test_watch_that_expires_is_restarted(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Changes missed meanwhile are seen."""
    async with operated(tmp_path, *options) as (api, operator):
        await api.put({**PAIR, "suspend": True}, lose=True)
        await api.expire()
        await until(lambda: api.status()["observedGeneration"] == 2)
        await follows(api)
        assert operator.process.returncode is None


async def test_watch_of_children_that_fails_is_restarted(tmp_path: Path) -> None:
    """An error that is not about its version: everything is listed again, by the same process."""
    async with operated(tmp_path) as (api, operator):
        await api.at_rest()
        await api.remove("apps/v1", "Deployment", "models", "chat-router", lose=True)
        await api.fail_watches(500, "deployments")
        await until(lambda: ("apps/v1", "deployments", "models", "chat-router") in api.objects)
        await follows(api)
        assert operator.process.returncode is None


async def test_watch_of_custom_resources_that_fails_ends_the_operator(tmp_path: Path) -> None:
    """Kopf gives up, cleans up, and leaves the Lease to the next process, which sees what was missed."""
    async with operated(tmp_path) as (api, operator):
        await api.put({**PAIR, "suspend": True}, lose=True)
        await api.fail_watches(500, "inferenceservices")
        assert await asyncio.wait_for(operator.process.wait(), LIMIT_S) != 0
        lease = api.objects["coordination.k8s.io/v1", "leases", OPERATOR, "baton-operator"]
        assert lease["spec"]["holderIdentity"] == ""
        async with started(tmp_path, api.kubeconfig, "again"):
            await until(lambda: api.status()["observedGeneration"] == 2)
            await follows(api)


@pytest.mark.parametrize("others", [(), ("other",)], ids=["alone", "beside another"])
async def test_deletion_while_no_watch_is_open_is_noticed(tmp_path: Path, others: tuple[str, ...]) -> None:
    """
    The service is gone, and then its version: kopf lists again without a word about it.

    Kubernetes deletes what belonged to the service. Nothing of it may come back.
    """
    async with operated(tmp_path) as (api, operator):
        for name in others:
            await api.put(PAIR, name)
            await until(lambda name=name: api.status(name).get("observedGeneration") == 1)  # type: ignore[misc]
        await api.at_rest()
        await api.remove(API, "InferenceService", "models", "chat", lose=True)
        await api.expire()
        of_it = [where for where in api.objects if where[3].startswith("chat") and where[1] != "events"]
        assert of_it
        for where in of_it:
            await api.remove(where[0], api.kind(where), *where[2:])
        await api.at_rest()
        left = [where for where in api.objects if where[3].startswith("chat") and where[1] != "events"]
        assert left == []
        await api.put({**PAIR, "suspend": True})
        await until(lambda: api.status().get("observedGeneration") == 1)
        assert operator.process.returncode is None


@pytest.mark.parametrize("kind", ["pods", "leaderworkersets"])
async def test_forbidden_kind_of_its_own_keeps_the_operator_from_working(tmp_path: Path, kind: str) -> None:
    """
    Without the right to list a kind, all its objects would look deleted.

    That holds for an optional kind too: the operator may have made objects of it before.
    """
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(FakeApi(tmp_path))
        api.refused = kind
        operator = await stack.enter_async_context(started(tmp_path, api.kubeconfig, "operator"))
        await api.put(PAIR)

        async def says() -> bool:
            return f"not listed yet: {kind}" in (await operator.get("/readyz")).text

        await until(says)
        assert await operator.figure(metrics.OPERATOR_UNSYNCED.name) == 1
        assert api.status() == {}
        api.refused = ""
        await until(lambda: api.status().get("observedGeneration") == 1)
        assert await operator.status("/readyz") == 200


async def test_forbidden_kind_of_others_is_done_without(tmp_path: Path) -> None:
    """A Gateway only tells the port of a URL, so the operator need not be allowed to read it."""
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(FakeApi(tmp_path))
        api.refused = "gateways"
        operator = await stack.enter_async_context(started(tmp_path, api.kubeconfig, "operator"))
        await api.put(PAIR)
        await until(lambda: api.status().get("observedGeneration") == 1)
        assert await operator.status("/readyz") == 200
        await follows(api)


async def test_kubeconfig_with_tls_server_name_is_rejected(tmp_path: Path) -> None:
    """Kopf could not verify the API server, and would try without end."""
    async with FakeApi(tmp_path) as api:
        config = yaml.safe_load(api.kubeconfig.read_text())
        config["clusters"][0]["cluster"]["tls-server-name"] = "kubernetes.example.org"
        api.kubeconfig.write_text(yaml.safe_dump(config))
        log = tmp_path / "operator.log"
        with pytest.raises(AssertionError):
            async with started(tmp_path, api.kubeconfig, "operator"):
                pass
        assert "sets tls-server-name kubernetes.example.org" in log.read_text()


async def test_lease_lost_within_a_write_ends_the_operator_and_the_next_one_converges(tmp_path: Path) -> None:
    """Its last write arrives after the next operator has begun, and is corrected."""
    async with FakeApi(tmp_path) as api:
        api.held = "deployments"
        async with started(tmp_path, api.kubeconfig, "first") as first:
            await api.put(PAIR)
            await asyncio.wait_for(api.holds.wait(), LIMIT_S)
            lease = api.objects["coordination.k8s.io/v1", "leases", OPERATOR, "baton-operator"]
            await api.store(lease["apiVersion"], "Lease", {**lease, "spec": {"holderIdentity": "second"}})
            assert await asyncio.wait_for(first.process.wait(), LIMIT_S) == 1
            assert "Lost the Lease" in first.log.read_text()
        async with started(tmp_path, api.kubeconfig, "second") as second:
            changed = {**PAIR, "router": {"replicas": 3}}
            await api.put(changed)
            await until(lambda: api.status().get("observedGeneration") == 2)
            await api.at_rest()
            api.let_go.set()
            await api.at_rest()
            router = api.objects["apps/v1", "deployments", "models", "chat-router"]
            assert router["spec"]["replicas"] == 3
            assert len([where for where in api.objects if where[1] == "deployments"]) == 3
            assert second.process.returncode is None


async def test_watch_that_stalls_is_restarted(tmp_path: Path) -> None:
    async with operated(tmp_path, "--watch-silence-s=2") as (api, operator):
        await api.at_rest()  # its own writes cause one more reconcile, which would find the change
        api.silent = True
        await api.put({**PAIR, "suspend": True})
        before = api.watches["inferenceservices"]
        await until(lambda: api.watches["inferenceservices"] > before)
        assert api.status()["observedGeneration"] == 1
        api.silent = False
        await until(lambda: api.status()["observedGeneration"] == 2)
        assert operator.process.returncode is None


async def test_second_operator_of_the_cluster_refuses_to_start(tmp_path: Path) -> None:
    """With a Lease of its own it would conflict with no other, and each would revert the other's writes."""
    async with operated(tmp_path) as (api, first):
        second = tmp_path / "second"
        second.mkdir()
        async with started(second, api.kubeconfig, "second", "--lease-name=other") as other:
            assert await asyncio.wait_for(other.process.wait(), LIMIT_S) != 0
            log_text = other.log.read_text()
        assert "Another operator manages the same services: operator holds the Lease" in log_text
        assert "baton/baton-operator and watches all namespaces" in log_text
        lease = api.objects["coordination.k8s.io/v1", "leases", "baton", "other"]
        assert lease["spec"]["holderIdentity"] == "", "the Lease is left to the next one"
        assert "baton-operator/second" not in api.watchers, "it has not begun to work"
        await follows(api)
        first.process.kill()
        await first.process.wait()
        # One that crashed leaves its Lease held, and is not waited for longer than that lasts.
        async with started(second, api.kubeconfig, "second", "--lease-name=other"):
            await follows(api)
