"""Decisions for a BatchJob: a table of states and what follows, then the laws that always hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from baton_api import batch_jobs, labels
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.manifests import batches as manifests
from baton_operator.manifests.objects import Manifest
from baton_operator.manifests.pods import USER
from baton_operator.reconcilers.batch_job import JOB_GRACE_S, needs_attention
from tests.operator.fake_batches import IMAGE, SERVICE, FakeBatch
from tests.operator.fake_cluster import FakeCluster

JOBS: dict[str, Any] = SERVICE["spec"]


def job_of(spec: dict[str, Any], service: dict[str, Any] | None = None) -> Manifest:
    batch_job = {
        "metadata": {"name": "night", "namespace": "models", "uid": "uid-1"},
        "spec": {"serviceName": "chat", **spec},
    }
    return manifests.job(batch_job, InferenceServiceSpec.model_validate(service or JOBS), IMAGE)


def test_batch_job_of_a_batch_has_owner_labels_and_token() -> None:
    job = job_of({"batchId": "batch_1", "concurrency": 8})
    owner = {"apiVersion": "baton.dev/v1alpha1", "kind": "BatchJob", "name": "night", "uid": "uid-1"}
    assert job["metadata"]["ownerReferences"] == [{**owner, "controller": True}]
    assert job["metadata"]["labels"][batch_jobs.LABEL] == "night"
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 1, 1)
    assert spec["backoffLimitPerIndex"] == 6 and spec["podReplacementPolicy"] == "Failed"
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["FailJob", "Ignore", "Ignore"]
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["serviceAccountName"]) == ("Never", "chat-batches")
    assert pod["automountServiceAccountToken"] is False and pod["securityContext"]["runAsUser"] == USER
    (container,) = pod["containers"]
    assert container["args"] == [
        "batch",
        "run",
        "--router=http://chat",
        "--token-file=/var/run/secrets/baton/token",
        "--concurrency=8",
        "--batch=batch_1",
    ]
    token = pod["volumes"][0]["projected"]["sources"][0]["serviceAccountToken"]
    assert token["audience"] == batch_jobs.audience("models", "chat") == "baton-batches:models:chat"
    assert "env" in container and "BATON_API_KEY" not in str(container["env"])


def test_batch_job_with_several_pods_divides_concurrency() -> None:
    spec = job_of({"batchId": "batch_1", "concurrency": 10, "parallelism": 3})["spec"]
    assert (spec["completions"], spec["parallelism"]) == (3, 3)
    (container,) = spec["template"]["spec"]["containers"]
    assert "--concurrency=4" in container["args"]


def test_batch_job_of_a_file_refers_to_the_owners_key() -> None:
    job = job_of({"inputFileId": "file-1", "endpoint": "/v1/embeddings", "apiKeySecretRef": {"name": "mine"}})
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][-3:] == [
        "--input-file=file-1",
        "--endpoint=/v1/embeddings",
        "--batch-job=night/uid-1",
    ]
    reference = {"secretKeyRef": {"name": "mine", "key": "key"}}
    assert {"name": "BATON_API_KEY", "valueFrom": reference} in container["env"]


def test_batch_job_for_kueue_starts_suspended() -> None:
    queued = FakeBatch({"queueName": "night"})
    queued.reconcile()
    assert queued.job is not None
    assert queued.job["metadata"]["labels"][manifests.QUEUE] == "night" and queued.job["spec"]["suspend"]
    assert queued.condition("Suspended") == ("True", "Suspended")
    queued.job["spec"]["suspend"] = False  # Kueue admits it
    queued.reconcile()
    assert queued.job["spec"]["suspend"] is False and queued.condition("Complete") == ("False", "Waiting")


def test_batch_job_pod_template_merges_and_service_sets_image() -> None:
    over = {"spec": {"nodeSelector": {"pool": "cheap"}, "containers": [{"name": "main", "tty": True}]}}
    service = {
        **JOBS,
        "router": {"image": "mine:2"},
        "security": {"imagePullSecrets": [{"name": "registry"}]},
    }
    pod = job_of({"batchId": "batch_1", "podTemplate": over}, service)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (pod["nodeSelector"], container["tty"], container["image"]) == ({"pool": "cheap"}, True, "mine:2")
    assert pod["imagePullSecrets"] == [{"name": "registry"}]


def _nothing(batch: FakeBatch) -> None:
    pass


def _suspended(batch: FakeBatch) -> None:
    batch.suspend(True)


def _no_service(batch: FakeBatch) -> None:
    batch.service = None


def _invalid_service(batch: FakeBatch) -> None:
    batch.service = {**SERVICE, "spec": {**JOBS, "decode": {"replicas": "many"}}}


def _other_execution(batch: FakeBatch) -> None:
    batch.service = {**SERVICE, "spec": {**JOBS, "router": {}}}


def _taken(batch: FakeBatch) -> None:
    batch.job = {"metadata": {"name": "night", "ownerReferences": [{"uid": "another"}]}, "spec": {}}


def _running(batch: FakeBatch) -> None:
    batch.reconcile()
    batch.starts()


def _rests(batch: FakeBatch) -> None:
    _running(batch)
    batch.suspend(True)


def _through(batch: FakeBatch) -> None:
    _running(batch)
    batch.ends()


def _failing(reason: str) -> Callable[[FakeBatch], None]:
    def so(batch: FakeBatch) -> None:
        _running(batch)
        batch.ends("Failed", reason)

    return so


def _failed_long_ago(batch: FakeBatch) -> None:
    _failing("FailedIndexes")(batch)
    batch.reconcile()
    batch.job = None  # its time to live is over


def _phase(phase: str) -> Callable[[FakeBatch], None]:
    def so(batch: FakeBatch) -> None:
        _through(batch)
        batch.says(phase)

    return so


@pytest.mark.parametrize(
    ("arrange", "complete", "failed", "suspended", "makes"),
    [
        (_nothing, "False Waiting", "False", "False", 1),
        (_suspended, "False Suspended", "False", "True", 1),
        (_no_service, "False NoService", "False", "False", 0),
        (_invalid_service, "False ServiceInvalid", "False", "False", 0),
        (_other_execution, "False NotByJobs", "False", "False", 0),
        (_taken, "False NameTaken", "True", "False", 0),
        (_running, "False Running", "False", "False", 1),
        (_rests, "False Suspended", "False", "True", 1),
        (_through, "False Finishing", "False", "False", 1),
        (_failing("FailedIndexes"), "False FailedIndexes", "True", "False", 1),
        (_failing("PodFailurePolicy"), "False PodFailurePolicy", "True", "False", 1),
        (_failing("DeadlineExceeded"), "False DeadlineExceeded", "True", "False", 1),
        (_failed_long_ago, "False FailedIndexes", "True", "False", 1),
        (_phase("completed"), "True Completed", "False", "False", 1),
        (_phase("expired"), "False Expired", "True", "False", 1),
        (_phase("cancelled"), "False Cancelled", "True", "False", 1),
        (_phase("failed"), "False InvalidInput", "True", "False", 1),
    ],
    ids=[
        "new",
        "new and suspended",
        "no service",
        "a service with an invalid spec",
        "a service that runs batches itself",
        "a name that is taken",
        "running",
        "told to rest",
        "through",
        "its pod failed too often",
        "its pod may not",
        "it took too long",
        "failed, and the Job is gone",
        "completed",
        "expired",
        "cancelled",
        "no batch",
    ],
)
def test_batch_conditions_follow_the_state(
    arrange: Callable[[FakeBatch], None], complete: str, failed: str, suspended: str, makes: int
) -> None:
    batch = FakeBatch()
    arrange(batch)
    batch.reconcile()
    assert " ".join(batch.condition("Complete")) == complete
    assert (batch.condition("Failed")[0], batch.condition("Suspended")[0]) == (failed, suspended)
    assert batch.jobs_made == makes


def test_batch_spec_change_patches_only_mutable_fields() -> None:
    batch = FakeBatch()
    _running(batch)
    batch.batch_job["spec"] |= {"suspend": True, "ttlAfterFinished": "10m", "maxRetries": 1}
    decision = batch.reconcile()
    changed = {"suspend": True, "ttlSecondsAfterFinished": 600}
    assert decision is not None and decision.patch == {"spec": changed}
    batch.suspend(False)
    decision = batch.reconcile()
    assert decision is not None and decision.patch == {"spec": {"suspend": False}}


def test_batch_template_change_waits_for_job_deletion() -> None:
    """Status reports a changed template until a user deletes the Job."""
    batch = FakeBatch({"podTemplate": {"spec": {"nodeSelector": {"pool": "cheap"}}}})
    _running(batch)
    batch.reconcile()
    assert batch.condition("UpToDate") == ("True", "AsMade")
    batch.batch_job["spec"]["podTemplate"] = {"spec": {"nodeSelector": {"pool": "dear"}}}
    decision = batch.reconcile()
    assert decision is not None and decision.patch is None and batch.jobs_made == 1
    assert batch.condition("UpToDate") == ("False", "TemplateChanged")
    (condition,) = (one for one in batch.batch_job["status"]["conditions"] if one["type"] == "UpToDate")
    assert "kubectl delete job/night" in condition["message"]
    assert batch.condition("Complete") == ("False", "Running"), "it goes on as it is"
    batch.job = None
    batch.reconcile()
    assert batch.job is not None and batch.jobs_made == 2
    assert batch.job["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "dear"}
    batch.reconcile()
    assert batch.condition("UpToDate") == ("True", "AsMade")


def test_batch_template_in_other_field_order_is_up_to_date() -> None:
    batch = FakeBatch({"podTemplate": {"spec": {"hostNetwork": False, "nodeSelector": {"pool": "cheap"}}}})
    _running(batch)
    batch.batch_job["spec"]["podTemplate"] = {
        "spec": {"nodeSelector": {"pool": "cheap"}, "hostNetwork": False}
    }
    batch.reconcile()
    assert batch.condition("UpToDate")[0] == "True"
    assert batch.job is not None
    del batch.job["metadata"]["annotations"]  # made by an operator that noted nothing
    batch.reconcile()
    assert batch.condition("UpToDate")[0] == "True"


@pytest.mark.parametrize(
    ("spec", "flag", "deadline_s"),
    [
        ({"inputFileId": "file-1", "completionWindow": "10m"}, ["--completion-window=600s"], 1200),
        ({"inputFileId": "file-1"}, [], 87_000),
        ({"batchId": "batch_1"}, [], None),
    ],
    ids=["its own", "a day", "the batch's of the API"],
)
def test_batch_window_is_a_flag_and_job_deadline_is_later(
    spec: dict[str, Any], flag: list[str], deadline_s: int | None
) -> None:
    job_spec = job_of(spec)["spec"]
    (container,) = job_spec["template"]["spec"]["containers"]
    assert [one for one in container["args"] if "window" in one] == flag
    assert job_spec.get("activeDeadlineSeconds") == deadline_s


def test_batch_ended_running_job_is_deleted_after_a_delay() -> None:
    batch = FakeBatch()
    _running(batch)
    batch.says("cancelled")
    decision = batch.reconcile()
    assert decision is not None and not decision.delete_job and decision.again_s == JOB_GRACE_S
    batch.now += JOB_GRACE_S
    decision = batch.reconcile()
    assert decision is not None and decision.delete_job and batch.job is None
    assert batch.stored is not None, "a person has made it, and may look at it"


def test_batch_of_a_router_is_deleted_after_its_ttl() -> None:
    batch = FakeBatch({"ttlAfterFinished": "1h"}, by_router=True)
    _phase("completed")(batch)
    decision = batch.reconcile()
    assert decision is not None and not decision.forget and decision.again_s == 3600
    batch.now += 3600
    batch.reconcile()
    assert batch.stored is None


@pytest.mark.parametrize("seed", range(200))
def test_batch_random_events_make_one_job_and_no_repeated_write(seed: int) -> None:
    batch = FakeBatch(by_router=bool(seed % 2), seed=seed)
    ended = False
    for _ in range(60):
        batch.reconcile()
        before = batch.writes
        batch.reconcile()
        assert batch.writes == before, "what was done is not done again"
        if batch.stored is not None:
            failed = batch.condition("Failed")[0] == "True"
            assert failed or not ended or batch.condition("Complete")[0] == "True", "an end is the end"
            ended = failed or batch.condition("Complete")[0] == "True"
            assert not (failed and batch.condition("Complete")[0] == "True")
        batch.happen()
    assert batch.jobs_made <= 1


def test_batch_progress_update_needs_no_attention() -> None:
    """Routers report a batch's progress every two seconds, but Jobs need no look for that."""
    batch = FakeBatch()
    assert needs_attention(batch.batch_job)
    batch.batch_job["status"] = {"observedGeneration": 1, "phase": "in_progress", "completed": 3}
    assert not needs_attention(batch.batch_job)
    batch.batch_job["metadata"]["generation"] = 2
    assert needs_attention(batch.batch_job)
    batch.batch_job["metadata"]["generation"] = 1
    batch.says("cancelled")
    assert needs_attention(batch.batch_job)


def test_batch_decision_leaves_its_inputs_unchanged() -> None:
    for arrange in (_nothing, _rests, _phase("completed")):
        batch = FakeBatch()
        arrange(batch)
        before = copy.deepcopy((batch.stored, batch.job, batch.service))
        batch.decide()
        assert (batch.stored, batch.job, batch.service) == before


# --- What the service has for it ---

KEPT: dict[str, Any] = {
    **JOBS,
    "router": {
        "replicas": 2,
        "batches": {
            "execution": "Jobs",
            "databaseSecretRef": {"name": "ledger"},
            "files": {"uri": "s3://bucket/files", "endpoint": "http://minio:9000"}
            | {"credentialsSecretRef": {"name": "bucket"}},
        },
    },
}


def _router(cluster: FakeCluster) -> dict[str, Any]:
    deployment = cluster.objects["apps/v1", "Deployment", "chat-router"]
    pod: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return pod


def _rules(cluster: FakeCluster) -> list[dict[str, Any]]:
    role = cluster.objects["rbac.authorization.k8s.io/v1", "Role", "chat-router"]
    rules: list[dict[str, Any]] = role["rules"]
    return rules


def test_routers_make_batch_jobs_only_where_jobs_run_batches() -> None:
    cluster = FakeCluster({**JOBS, "router": {}})
    cluster.settle()
    plain = _router(cluster)["containers"][0]["args"]
    assert not [flag for flag in plain if "batch" in flag] and len(_rules(cluster)) == 1
    assert cluster.names("ServiceAccount") == ["chat-router", "chat-workers"]
    cluster.change(JOBS)
    cluster.settle()
    flags = _router(cluster)["containers"][0]["args"]
    assert [flag for flag in flags if flag not in plain] == [
        "--batch-execution=external",
        "--batch-jobs=chat",
        "--batch-jobs-uid=uid-1",
    ]
    more = [(rule["resources"], rule["verbs"]) for rule in _rules(cluster)[1:]]
    assert more == [(["batchjobs"], ["create"]), (["batchjobs/status"], ["patch"])]
    assert cluster.names("ServiceAccount") == ["chat-batches", "chat-router", "chat-workers"]
    border = cluster.objects["networking.k8s.io/v1", "NetworkPolicy", "chat-batches"]["spec"]
    assert border["ingress"] == [] and len(border["egress"]) == 2
    cluster.change({**JOBS, "router": {}})
    cluster.settle()
    assert cluster.names("ServiceAccount") == ["chat-router", "chat-workers"]
    assert "chat-batches" not in cluster.names("NetworkPolicy")


def test_batch_runners_reach_routers_of_any_exposure() -> None:
    cluster = FakeCluster({**JOBS, "security": {"ingressNamespaceLabels": {"team": "a"}}})
    cluster.settle()
    policy = cluster.objects["networking.k8s.io/v1", "NetworkPolicy", "chat-router"]["spec"]
    api, metrics = policy["ingress"]
    runners = {"matchLabels": {labels.SERVICE: "chat", labels.ROLE: "batch"}}
    assert {"podSelector": runners} in api["from"]
    assert {"podSelector": runners} not in metrics["from"]


def test_router_has_batch_storage_by_reference() -> None:
    cluster = FakeCluster(KEPT)
    cluster.settle()
    (container,) = _router(cluster)["containers"]
    assert {"--files-store=s3://bucket/files", "--files-endpoint=http://minio:9000"} <= set(container["args"])
    assert container["envFrom"] == [{"secretRef": {"name": "bucket"}}]
    env = {one["name"]: one.get("valueFrom", {}).get("secretKeyRef") for one in container["env"]}
    assert env["BATON_ROUTER_DATABASE"] == {"name": "ledger", "key": "url"}
    assert env["BATON_ROUTER_BATCH_SECRET"] == {"name": "ledger", "key": "runners", "optional": True}
    batches = {**KEPT["router"]["batches"], "files": {"claimName": "files"}}
    cluster.change({**KEPT, "router": {"replicas": 2, "batches": batches}})
    cluster.settle()
    pod = _router(cluster)
    assert {"name": "files", "persistentVolumeClaim": {"claimName": "files"}} in pod["volumes"]
    assert {"name": "files", "mountPath": "/var/lib/baton-files"} in pod["containers"][0]["volumeMounts"]
    assert "--files-store=/var/lib/baton-files" in pod["containers"][0]["args"]
