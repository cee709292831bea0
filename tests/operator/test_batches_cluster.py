"""BatchJobs on a real API server: what it admits, what becomes of them, and whose tokens it signs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from kubernetes.aio.client import ApiClient

from baton_api import batch_jobs
from baton_api.errors import Unauthorized
from baton_batches.kubernetes import BatchJobApi, batch_job_manifest
from baton_batches.runner_credentials import pod_tokens
from baton_http.kubernetes import KubernetesAccess
from baton_operator.cluster.api_resources import API, path
from baton_operator.manifests.objects import Manifest, Transition
from baton_operator.reconcilers.batch_job import BatchJobReconciler
from tests.operator.fake_batches import IMAGE, SERVICE
from tests.operator.real_cluster import (
    Inside,
    Listed,
    RealCluster,
    client,
    counted,
    real_cluster,
    running_operator,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

WHERE = path(API, "BatchJob", "models")
JOBS = path("batch/v1", "Job", "models")
BATCH: dict[str, Any] = {"serviceName": "chat", "batchId": "batch_1"}
FILE: dict[str, Any] = {"serviceName": "chat", "inputFileId": "file-1"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    async with real_cluster(tmp_path_factory.mktemp("kubernetes")) as running:
        restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
        await running.api.patch("/api/v1/namespaces/models", {"metadata": {"labels": restricted}})
        await running.put(SERVICE["spec"])
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(cluster: RealCluster) -> AsyncIterator[ApiClient]:
    async with client(cluster) as connected:
        yield connected


class Batches:
    """The operator's reconciler of BatchJobs in the test's own process."""

    def __init__(self, client: ApiClient, now: float = 1_800_000_000.0) -> None:
        self.now = now
        self.transitions: list[str] = []
        self._listed = Listed(client)
        self._reconciler = BatchJobReconciler(
            self._listed.api, self._listed.cache, IMAGE, self._tell, lambda: self.now, 600.0
        )

    async def reconcile(self, name: str) -> float | None:
        await self._listed.relist()
        return await self._reconciler.reconcile("models", name)

    def _tell(self, about: Manifest, transition: Transition) -> None:
        self.transitions.append(f"{transition.fact.type} {transition.fact.status} {transition.fact.reason}")


async def get(cluster: RealCluster, where: str, name: str) -> Manifest | None:
    answer = await cluster.admin.get(f"{where}/{name}")
    manifest: Manifest = answer.json()
    return manifest if answer.status_code == 200 else None


async def stands(cluster: RealCluster, name: str) -> str:
    return await cluster.condition("Complete", name, "BatchJob")


REFUSED: list[tuple[str, Any, str]] = [
    ("no service", {"batchId": "batch_1"}, "spec.serviceName: Required"),
    ("neither batch nor file", {"serviceName": "chat"}, "set either batchId"),
    ("both", {**BATCH, "inputFileId": "file-1"}, "set either batchId"),
    ("an id that is none", {"serviceName": "chat", "batchId": "../etc"}, "spec.batchId"),
    ("a file that is none", {"serviceName": "chat", "inputFileId": "batch_1"}, "spec.inputFileId"),
    (
        "a key for a batch that has an owner",
        {**BATCH, "apiKeySecretRef": {"name": "k"}},
        "spec.apiKeySecretRef",
    ),
    ("another endpoint", {**FILE, "endpoint": "/v1/images"}, "spec.endpoint"),
    ("no concurrency", {**BATCH, "concurrency": 0}, "spec.concurrency"),
    ("too many retries", {**BATCH, "maxRetries": 101}, "spec.maxRetries"),
    ("a window of no time", {**FILE, "completionWindow": "1s"}, "spec.completionWindow"),
    (
        "a window of 60 days",
        {**FILE, "completionWindow": "1440h"},
        "spec.completionWindow",
    ),
    (
        "a window for a batch that has one",
        {**BATCH, "completionWindow": "10m"},
        "spec.completionWindow",
    ),
    ("gone at once", {**BATCH, "ttlAfterFinished": "0s"}, "spec.ttlAfterFinished"),
    ("a field that is none", {**BATCH, "shards": 4}, 'unknown field "spec.shards"'),
    ("a queue's name that is none", {**BATCH, "queueName": "A B"}, "spec.queueName"),
]


@pytest.mark.parametrize(("spec", "named"), [one[1:] for one in REFUSED], ids=[one[0] for one in REFUSED])
async def test_batch_job_invalid_spec_is_rejected_with_its_field(
    cluster: RealCluster, spec: Any, named: str
) -> None:
    answer = await create(cluster, spec)
    assert answer[0] == 422 or (answer[0] == 400 and "unknown field" in named), answer
    assert named in answer[1], answer


@pytest.mark.parametrize("name", ["a" * 51, "a.b"], ids=["a long name", "a name with a dot"])
async def test_batch_job_name_unfit_for_pods_is_rejected(cluster: RealCluster, name: str) -> None:
    status, message = await create(cluster, BATCH, name)
    assert status == 422 and "at most 50 characters" in message


async def create(cluster: RealCluster, spec: Any, name: str = "night") -> tuple[int, str]:
    body = {"apiVersion": API, "kind": "BatchJob", "metadata": {"name": name}, "spec": spec}
    answer = await cluster.admin.post(f"{WHERE}?dryRun=All&fieldValidation=Strict", json=body)
    return answer.status_code, answer.json().get("message", "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("serviceName", "other"),
        ("inputFileId", "file-2"),
        ("endpoint", "/v1/completions"),
        ("apiKeySecretRef", {"name": "another"}),
        ("apiKeySecretRef", None),
        ("concurrency", 7),
        ("maxRetries", 7),
        ("queueName", "night"),
        ("suspend", True),
        ("completionWindow", "10m"),
        ("ttlAfterFinished", "10m"),
        ("podTemplate", {"spec": {"nodeSelector": {"a": "b"}}}),
    ],
)
async def test_batch_job_change_a_job_cannot_follow_is_rejected(
    cluster: RealCluster, field: str, value: Any
) -> None:
    await cluster.put({**FILE, "apiKeySecretRef": {"name": "mine"}}, "fixed", kind="BatchJob")
    headers = {"content-type": "application/merge-patch+json"}
    answer = await cluster.admin.patch(
        f"{WHERE}/fixed?dryRun=All", json={"spec": {field: value}}, headers=headers
    )
    follows = field in ("suspend", "ttlAfterFinished", "podTemplate")
    assert answer.status_code == (200 if follows else 422), answer.text
    assert follows or f"{field} cannot be changed" in answer.text


async def test_batch_job_lifecycle_writes_each_step_once(cluster: RealCluster, api: ApiClient) -> None:
    """The API server takes each thing that is done on the way, and nothing is done twice."""
    batches = Batches(api)
    await cluster.put({**BATCH, "concurrency": 8}, "way", kind="BatchJob")
    await batches.reconcile("way")
    job = await get(cluster, JOBS, "way")
    assert job is not None and job["spec"]["completionMode"] == "Indexed"
    (owner,) = job["metadata"]["ownerReferences"]
    stored = await get(cluster, WHERE, "way")
    assert stored is not None and owner["uid"] == stored["metadata"]["uid"] and owner["controller"]
    assert await stands(cluster, "way") == "False Waiting"
    since = len(cluster.requests())
    await batches.reconcile("way")
    await Batches(api, now=batches.now + 1000).reconcile("way")
    assert counted([one for one in cluster.requests(since) if one.is_work]) == {}
    # The pod that would be made of it is admitted under `restricted`.
    pod = {"metadata": {"name": "way-0-abcde"}, "spec": job["spec"]["template"]["spec"]}
    answer = await cluster.admin.post(path("v1", "Pod", "models"), params={"dryRun": "All"}, json=pod)
    assert answer.status_code == 201, answer.text

    await cluster.put({**BATCH, "concurrency": 8, "suspend": True}, "way", kind="BatchJob")
    await batches.reconcile("way")
    job = await get(cluster, JOBS, "way")
    assert job is not None and job["spec"]["suspend"] is True
    assert await stands(cluster, "way") == "False Suspended"
    await cluster.put({**BATCH, "concurrency": 8}, "way", kind="BatchJob")
    await batches.reconcile("way")

    # Cancelled by the API, while no pod can be scheduled that would hear of it.
    batch_status = {"phase": "cancelled", "batchId": "batch_1", "total": 3, "completed": 1}
    await cluster.api.patch(f"{WHERE}/way/status", {"status": batch_status})
    assert await batches.reconcile("way") == 30
    assert await stands(cluster, "way") == "False Cancelled"
    batches.now += 30
    await batches.reconcile("way")
    job = await get(cluster, JOBS, "way")
    assert job is None or "deletionTimestamp" in job["metadata"]
    stored = await get(cluster, WHERE, "way")
    assert stored is not None and stored["status"]["completed"] == 1, "what routers say stays theirs"
    assert "Failed True Cancelled" in batches.transitions


async def test_batch_job_foreign_job_of_same_name_is_not_touched(
    cluster: RealCluster, api: ApiClient
) -> None:
    pod = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "none"}]}
    body = {"metadata": {"name": "taken"}, "spec": {"template": {"spec": pod}}}
    await cluster.api.post(JOBS, body)
    await cluster.put(BATCH, "taken", kind="BatchJob")
    batches = Batches(api)
    await batches.reconcile("taken")
    assert await stands(cluster, "taken") == "False NameTaken"
    job = await get(cluster, JOBS, "taken")
    assert job is not None and "ownerReferences" not in job["metadata"]


async def test_batch_job_invalid_pod_template_is_reported_in_status(
    cluster: RealCluster, api: ApiClient
) -> None:
    spec = {**BATCH, "podTemplate": {"spec": {"restartPolicy": "Always"}}}
    await cluster.put(spec, "wrong", kind="BatchJob")
    batches = Batches(api)
    with pytest.raises(Exception, match="restartPolicy"):
        await batches.reconcile("wrong")
    assert await stands(cluster, "wrong") == "False Refused"


@pytest_asyncio.fixture(loop_scope="module")
async def router(cluster: RealCluster, api: ApiClient, tmp_path: Path) -> BatchJobApi:
    """As a router's pod has it: with the account that the operator has made for it."""
    await Inside(api).reconcile()
    account = "system:serviceaccount:models:chat-router"
    await cluster.granted(account, "create", "baton.dev/v1alpha1/batchjobs", "models")
    (tmp_path / "token").write_text(await cluster.token("models", "chat-router"))
    (tmp_path / "namespace").write_text("models")
    (tmp_path / "ca.crt").write_bytes((cluster.api.account / "ca.crt").read_bytes())
    return BatchJobApi(KubernetesAccess(cluster.api.url, tmp_path))


async def test_router_account_may_create_and_patch_batch_jobs_only(
    cluster: RealCluster, router: BatchJobApi, tmp_path: Path
) -> None:
    service = await cluster.service()

    class Named:
        id = "batch_0a1b"

    batch_job = batch_job_manifest(Named, "chat", service["metadata"]["uid"])  # type: ignore[arg-type]
    assert await router.create(batch_job) == 201 and await router.create(batch_job) == 409
    status = {"phase": "in_progress", "batchId": Named.id, "completed": 1, "total": 3}
    assert await router.patch_status("batch-0a1b", status) == 200
    assert await router.patch_status("batch-none", status) == 404
    stored = await get(cluster, WHERE, "batch-0a1b")
    assert stored is not None and stored["status"]["completed"] == 1
    token = (tmp_path / "token").read_text()
    for method, where in (
        ("GET", WHERE),
        ("GET", f"{WHERE}/batch-0a1b"),
        ("DELETE", f"{WHERE}/batch-0a1b"),
        ("PATCH", f"{WHERE}/batch-0a1b"),
        ("GET", JOBS),
        ("GET", path("v1", "Secret", "models")),
    ):
        headers = {"authorization": f"Bearer {token}", "content-type": "application/merge-patch+json"}
        answer = await cluster.admin.request(method, where, headers=headers, json={})
        assert answer.status_code == 403, f"{method} {where}"


async def test_pod_token_signed_by_kubernetes_is_accepted(
    cluster: RealCluster, api: ApiClient, router: BatchJobApi
) -> None:
    """
    Router checks tokens with keys that every account may read, and accepts no other token signed by them.
    """
    await cluster.put(BATCH, "signed", kind="BatchJob")
    await Batches(api).reconcile("signed")
    job = await get(cluster, JOBS, "signed")
    assert job is not None
    template = job["spec"]["template"]
    projected = template["spec"]["volumes"][0]["projected"]["sources"][0]["serviceAccountToken"]
    pod = {"metadata": {"name": "signed-0-abcde", "labels": template["metadata"]["labels"]}}
    created = (
        await cluster.admin.post(path("v1", "Pod", "models"), json={**pod, "spec": template["spec"]})
    ).json()
    tokens = pod_tokens(router, "chat")

    async def signed(audience: str, bound: bool = True) -> str:
        spec: dict[str, Any] = {"audiences": [audience], "expirationSeconds": 3600}
        if bound:
            reference = {"apiVersion": "v1", "kind": "Pod", "name": "signed-0-abcde"}
            spec["boundObjectRef"] = {**reference, "uid": created["metadata"]["uid"]}
        where = f"{path('v1', 'ServiceAccount', 'models', template['spec']['serviceAccountName'])}/token"
        answer = await cluster.admin.post(
            where, json={"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        )
        assert answer.status_code == 201, answer.text
        token: str = answer.json()["status"]["token"]
        return token

    try:
        assert await tokens.job(await signed(projected["audience"])) == "signed"
        for wrong in (
            await signed("https://kubernetes.default.svc"),
            await signed(batch_jobs.audience("models", "other")),
            await signed(projected["audience"], bound=False),
        ):
            with pytest.raises(Unauthorized):
                await tokens.job(wrong)
    finally:
        await tokens.close()


async def test_operator_deleted_account_or_role_is_restored_at_once(cluster: RealCluster) -> None:
    """Long before the operator would look at the service by itself."""
    group = "rbac.authorization.k8s.io/v1"
    paths = [
        path("v1", "ServiceAccount", "models", "chat-batches"),
        path(group, "Role", "models", "chat-router"),
        path(group, "RoleBinding", "models", "chat-router"),
    ]

    async def is_there(where: str) -> bool:
        return (await cluster.admin.get(where)).status_code == 200

    async with running_operator(cluster, "watching", "--resync-s=86400") as operator:

        async def watches() -> bool:
            return await operator.status("/readyz") == 200

        await cluster.until(watches)
        for where in paths:
            await cluster.until(lambda where=where: is_there(where))  # type: ignore[misc]
        uids = [(await cluster.admin.get(where)).json()["metadata"]["uid"] for where in paths]
        for where, uid in zip(paths, uids, strict=True):
            await cluster.api.delete(where)

            async def is_back(where: str = where, uid: str = uid) -> bool:
                answer = await cluster.admin.get(where)
                return answer.status_code == 200 and answer.json()["metadata"]["uid"] != uid

            await cluster.until(is_back)
