"""Batches that Jobs of Kubernetes run: each gets its BatchJob, hears of it, and lets in its pods alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from baton_api import batch_jobs
from baton_api.errors import SetupError, Unauthorized
from baton_batches import wire
from baton_batches.database import Database
from baton_batches.files import NewFile, add
from baton_batches.kubernetes import BatchJobApi, BatchJobReporter
from baton_batches.ledger import BatchJobAssignments, Ledger
from baton_batches.values import BatchRecord
from baton_batches.wire import LeaseRequest
from baton_router.app import create_app
from baton_router.settings import RouterSettings
from baton_router.workers.discovery.sources import kubernetes_access
from tests.batches.batch_cluster import NAMESPACE, SERVICE, BatchCluster
from tests.batches.serving import (
    answered,
    bearer,
    create,
    created,
    line,
    reaching,
    run_lines,
    serving,
    uploaded,
)
from tests.router.running import RunningRouter

THREE = b"".join(line(f"c{number}") for number in (1, 2, 3))


@pytest.fixture
def cluster() -> Iterator[BatchCluster]:
    with BatchCluster() as posted:
        yield posted


def in_a_pod(cluster: BatchCluster, **more: Any) -> AbstractAsyncContextManager[RunningRouter]:
    return serving(
        batch_execution="external",
        batch_jobs=SERVICE,
        batch_jobs_uid="uid-of-the-service",
        kubernetes_namespace=NAMESPACE,
        **{"kubernetes_api": cluster.url, **more},
    )


def announcer(router: RunningRouter) -> BatchJobReporter:
    """One whose rounds the test calls for, as if time flew between them."""
    times = iter(range(0, 10**9, 3600))
    access = BatchJobApi(kubernetes_access(router.router.settings))
    return BatchJobReporter(
        router.router.storage, access, SERVICE, "uid-of-the-service", lambda: float(next(times))
    )


async def lease(router: RunningRouter, batch: str, token: str) -> httpx.Response:
    return await router.client.post(
        f"{wire.PATH}{batch}/lease",
        headers=bearer(token),
        content=wire.encode(LeaseRequest(f"runner {time.time_ns()}")),
    )


def progress(batch_job: dict[str, Any]) -> str:
    """Finished and total requests."""
    status = batch_job["status"]
    return f"{status['completed'] + status['failed']}/{status['total']}"


async def test_batch_gets_a_batch_job_with_its_final_status(cluster: BatchCluster) -> None:
    async with in_a_pod(cluster) as router:
        reporter = announcer(router)
        id = await created(router, THREE)
        await reaching(router, id, "in_progress")
        name = batch_jobs.name_of(id)
        await reporter.round()
        posted = cluster.jobs[name]
        assert posted["spec"] == {"serviceName": SERVICE, "batchId": id}
        assert posted["metadata"]["ownerReferences"][0]["uid"] == "uid-of-the-service"
        assert (posted["status"]["phase"], progress(posted)) == ("in_progress", "0/3")
        ledger = router.router.storage.ledger
        run_lines(ledger, id, [answered(1), answered(2)], time.time())
        await reporter.round()
        assert progress(posted) == "2/3"
        run_lines(ledger, id, [answered(3)], time.time())
        shown = await reaching(router, id, "completed")
        await reporter.round()
        assert (posted["status"]["phase"], posted["status"]["completed"]) == ("completed", 3)
        assert posted["status"]["outputFileId"] == shown["output_file_id"]
        await reporter.round()
        before = len(cluster.requests)
        await reporter.round()
        assert len(cluster.requests) == before, "an end is told once more, and then never again"
        assert not router.router.storage.jobs.assigned()


async def test_deleted_batch_job_is_recreated_while_lines_are_left(
    cluster: BatchCluster,
) -> None:
    async with in_a_pod(cluster) as router:
        reporter = announcer(router)
        id = await created(router, THREE)
        await reaching(router, id, "in_progress")
        await reporter.round()
        cluster.jobs.clear()
        run_lines(router.router.storage.ledger, id, [answered(1)], time.time())
        await reporter.round()
        assert not cluster.jobs
        await reporter.round()
        assert progress(cluster.jobs[batch_jobs.name_of(id)]) == "1/3"


async def test_two_routers_create_one_batch_job(cluster: BatchCluster) -> None:
    async with in_a_pod(cluster) as router:
        one, other = announcer(router), announcer(router)
        id = await created(router, THREE)
        await reaching(router, id, "in_progress")
        await one.round()
        await other.round()
        assert len(cluster.jobs) == 1 and router.router.storage.ledger.find(id).job


class Late(BatchJobApi):
    """A reporter whose updates arrive when the test releases them."""

    def __init__(self, router: RunningRouter) -> None:
        super().__init__(kubernetes_access(router.router.settings))
        self.reported, self.comes = asyncio.Event(), asyncio.Event()

    async def patch_status(self, name: str, status: object) -> int:
        self.reported.set()
        await self.comes.wait()
        return await super().patch_status(name, status)


async def test_late_report_of_another_router_is_corrected(
    cluster: BatchCluster,
) -> None:
    async with in_a_pod(cluster) as router:
        late, storage = Late(router), router.router.storage
        other = announcer(router)
        one = BatchJobReporter(storage, late, SERVICE, "uid-of-the-service", lambda: 0.0)
        id = await created(router, THREE)
        await reaching(router, id, "in_progress")
        await other.round()
        reported = cluster.jobs[batch_jobs.name_of(id)]["status"]
        reporter = asyncio.create_task(one.round())
        await late.reported.wait()
        run_lines(storage.ledger, id, [answered(number) for number in (1, 2, 3)], time.time())
        await reaching(router, id, "completed")
        await other.round()
        assert reported["phase"] == "completed"
        late.comes.set()
        await reporter
        assert reported["phase"] == "in_progress", "as it was when that was said"
        await one.round()
        assert reported["phase"] == "completed"
        await other.round()
        assert not storage.jobs.assigned()


async def test_announcer_refused_batch_job_is_tried_again(
    cluster: BatchCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with in_a_pod(cluster) as router:
        reporter = announcer(router)
        id = await created(router, THREE)
        await reaching(router, id, "in_progress")
        for status in (403, 500, 404):
            cluster.status = status
            await reporter.round()
            assert f"{batch_jobs.name_of(id)}: status {status}" in caplog.text
        cluster.status = 0
        await reporter.round()
        assert batch_jobs.name_of(id) in cluster.jobs


async def test_announcer_refused_batch_job_delays_no_other(cluster: BatchCluster) -> None:
    """Neither its creation nor its status; while it is refused it is not sent every round."""
    async with in_a_pod(cluster) as router:
        access = BatchJobApi(kubernetes_access(router.router.settings))
        now = [0.0]
        reporter = BatchJobReporter(
            router.router.storage, access, SERVICE, "uid-of-the-service", lambda: now[0]
        )
        first, second = [await created(router, THREE) for _ in range(2)]
        for id in (first, second):
            await reaching(router, id, "in_progress")
        cluster.refused = batch_jobs.name_of(first)
        await reporter.round()
        assert list(cluster.jobs) == [batch_jobs.name_of(second)]
        run_lines(router.router.storage.ledger, second, [answered(1)], time.time())
        attempts = len(cluster.requests)
        now[0] += 0.9
        await reporter.round()
        assert len(cluster.requests) == attempts
        now[0] += 10.0
        await reporter.round()
        assert progress(cluster.jobs[batch_jobs.name_of(second)]) == "1/3"
        cluster.refused = ""
        now[0] += 10.0
        await reporter.round()
        cluster.refused = batch_jobs.name_of(first)
        for id in (first, second):
            run_lines(router.router.storage.ledger, id, [answered(2)], time.time())
        now[0] += 10.0
        await reporter.round()
        shown = [progress(cluster.jobs[batch_jobs.name_of(id)]) for id in (first, second)]
        assert shown == ["0/3", "2/3"]


async def test_announcer_without_an_api_server_raises(cluster: BatchCluster) -> None:
    """Then there is no use in the other batches of the round."""
    async with in_a_pod(cluster, kubernetes_api="http://127.0.0.1:9") as router:
        reporter = announcer(router)
        await reaching(router, await created(router, THREE), "in_progress")
        with pytest.raises(OSError, match="API server failed"):
            await reporter.round()


async def test_batch_of_a_batch_job_waits_for_its_pod(cluster: BatchCluster) -> None:
    async with in_a_pod(cluster) as router:
        file = await uploaded(router, THREE)
        answer = await create(router, file, metadata={batch_jobs.METADATA: "mine/uid-1"})
        id = answer.json()["id"]
        await reaching(router, id, "in_progress")
        await announcer(router).round()
        assert not cluster.jobs
        assert (await lease(router, id, cluster.token("other-0-abcde"))).status_code == 401
        assert (await lease(router, id, cluster.token("mine-0-abcde"))).status_code == 200
        cluster.put({"metadata": {"name": "mine"}})
        await announcer(router).round()
        assert cluster.jobs["mine"]["status"]["batchId"] == id


async def test_pod_gets_only_the_lease_of_its_batch(cluster: BatchCluster) -> None:
    async with in_a_pod(cluster) as router:
        reporter = announcer(router)
        ids = [await created(router, THREE) for _ in range(2)]
        for id in ids:
            await reaching(router, id, "in_progress")
        await reporter.round()
        mine, other = ids
        token = cluster.token(f"{batch_jobs.name_of(mine)}-0-abcde")
        assert (await lease(router, other, token)).status_code == 401
        held = wire.decode_lease((await lease(router, mine, token)).content)
        # The pod's own token opens nothing but leases: all else is for the one of this epoch.
        path = f"{wire.PATH}{mine}/renew"
        assert (await router.client.post(path, headers=bearer(token))).status_code == 401
        assert (await router.client.post(path, headers=bearer(held.token))).status_code == 200
        path = f"{wire.PATH}{other}/renew"
        assert (await router.client.post(path, headers=bearer(held.token))).status_code == 401
        assert (await lease(router, mine, token)).status_code == 200, "runners share a batch"


def _wrong(cluster: BatchCluster, pod: str) -> dict[str, str]:
    no_pod: dict[str, Any] = {"kubernetes.io": {"namespace": NAMESPACE}}
    good = cluster.token(pod)
    return {
        "nothing": "",
        "no token": "abc",
        "cut off": good[:-10],
        "of another service": cluster.token(pod, "other"),
        "for the API server": cluster.token(pod, aud=["https://kubernetes.default.svc"]),
        "of another account": cluster.token(pod, sub=f"system:serviceaccount:{NAMESPACE}:default"),
        "of another namespace": cluster.token(pod, sub="system:serviceaccount:other:chat-batches"),
        "over": cluster.token(pod, exp=time.time() - 60),
        "without an end": cluster.token(pod, exp=None),
        "of no pod": cluster.token(pod, **no_pod),
        "of a pod of no Job": cluster.token("chat-router-7d9f8-x2k4p2"),
        "signed by somebody": _forged(cluster, pod),
    }


def _forged(cluster: BatchCluster, pod: str) -> str:
    """With a key that has the name of the API server's."""
    kept = dict(cluster.issuer.keys)
    cluster.issuer.add("rsa", "ES256")
    token = cluster.token(pod)
    cluster.issuer.keys = kept
    return token


async def test_other_tokens_open_nothing(cluster: BatchCluster) -> None:
    async with in_a_pod(cluster) as router:
        id = await created(router, THREE)
        await reaching(router, id, "in_progress")
        await announcer(router).round()
        pod = f"{batch_jobs.name_of(id)}-0-abcde"
        for what, token in _wrong(cluster, pod).items():
            assert (await lease(router, id, token)).status_code == 401, what
        assert (await lease(router, id, cluster.token(pod))).status_code == 200


async def test_router_without_kubernetes_trusts_no_pod(cluster: BatchCluster) -> None:
    async with serving(batch_execution="external") as router:
        id = await created(router, THREE)
        await reaching(router, id, "in_progress")
        assert (
            await lease(router, id, cluster.token(f"{batch_jobs.name_of(id)}-0-abcde"))
        ).status_code == 401
    assert not cluster.requests


def test_batch_jobs_require_external_execution() -> None:
    with pytest.raises(SetupError, match="external"):
        create_app(RouterSettings(decode=("http://127.0.0.1:1",), batch_jobs="chat"))


def _batch(database: Database, **more: Any) -> BatchRecord:
    new = NewFile(owner="a", purpose="batch", filename="in", bytes=1, sha256="", object="o", expires_at=None)
    with database.writing() as connection:
        file = add(connection, new, 1)
    return Ledger(database).create("a", "/v1/chat/completions", file, 1, **more)


def _begun(database: Database, **more: Any) -> BatchRecord:
    ledger, batch = Ledger(database), _batch(database, **more)
    epoch = ledger.lease(batch.id, "validator", 1.0, 10)
    assert epoch is not None
    return ledger.validated(batch.id, epoch, 2, total=3, model="m")


def test_first_claim_of_a_batch_wins(database: Database) -> None:
    jobs, batch = BatchJobAssignments(database), _begun(database)
    assert [one.id for one in jobs.missing()] == [batch.id]
    assert jobs.claim(batch.id, "one").job == "one" == jobs.claim(batch.id, "one").job
    with pytest.raises(Unauthorized, match="BatchJob one"):
        jobs.claim(batch.id, "two")
    assert not jobs.missing() and [one.job for one in jobs.assigned()] == ["one"]
    jobs.disown(batch.id, "two")
    assert jobs.assigned()
    jobs.disown(batch.id, "one")
    assert not jobs.assigned() and jobs.claim(batch.id, "two").job == "two"


def test_batch_job_may_be_assigned_by_metadata(database: Database) -> None:
    jobs, batch = BatchJobAssignments(database), _begun(database, metadata={batch_jobs.METADATA: "one/uid"})
    assert not jobs.missing()
    with pytest.raises(Unauthorized):
        jobs.claim(batch.id, "two")
    assert jobs.claim(batch.id, "one").job == "one"
