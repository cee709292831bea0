"""Workers start when the files of their model exist: a Job fetches them, slowly or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from baton_api import labels
from baton_operator.rollout.model_fetch import PROOF
from tests.operator.fake_cluster import FakeCluster

HUB: dict[str, Any] = {
    "model": {"uri": "hf://org/model", "cache": {"type": "PVC", "size": "20Gi"}},
    "prefill": {},
    "decode": {"replicas": 2},
}
OTHER: dict[str, Any] = {**HUB, "model": {**HUB["model"], "uri": "hf://org/other"}}


def settled(spec: dict[str, Any] = HUB) -> FakeCluster:
    cluster = FakeCluster(spec)
    cluster.settle()
    return cluster


def workers(cluster: FakeCluster, revision: str) -> int:
    """How many are asked for."""
    return sum(
        one["spec"]["replicas"]
        for (_, kind, _), one in cluster.objects.items()
        if kind == "Deployment" and one["metadata"]["labels"].get(labels.REVISION) == revision
    )


def test_rollout_waits_for_a_long_download_and_is_not_undone() -> None:
    """No worker starts on an empty volume, and the old revision keeps serving at full size."""
    cluster = settled()
    old = cluster.service["status"]["currentRevision"]
    cluster.fetch_s = 300.0
    cluster.change(OTHER)
    for _ in range(280):
        cluster.reconcile()
        cluster.happen()
        new = cluster.service["status"]["updateRevision"]
        assert new != old and workers(cluster, new) == 0
        assert cluster.revision(old)["weight"] == 100 and workers(cluster, old) == 3
        assert cluster.condition("Degraded")[0] == "False"
    assert cluster.revision(new)["phase"] == "Waiting"
    assert cluster.condition("ModelReady") == ("False", "Fetching")
    assert cluster.condition("Progressing") == ("True", "FetchingModel")
    cluster.settle()
    assert cluster.service["status"]["currentRevision"] == new
    assert cluster.condition("Ready") == ("True", "Serving") and workers(cluster, old) == 0
    assert cluster.service["status"]["model"]["resolvedRevision"] == "0123abcd"


def test_old_revision_is_scaled_while_a_download_lasts() -> None:
    cluster = settled()
    old = cluster.service["status"]["currentRevision"]
    cluster.fetch_s = 1000.0
    cluster.change({**OTHER, "decode": {"replicas": 4}})
    for _ in range(60):
        cluster.reconcile()
        cluster.happen()
    assert cluster.revision(old)["decodeReady"] == 4


def test_removed_prefill_workers_stay_until_the_model_is_there() -> None:
    cluster = settled()
    old = cluster.service["status"]["currentRevision"]
    cluster.fetch_s = 1000.0
    cluster.change({name: part for name, part in OTHER.items() if name != "prefill"})
    for _ in range(60):
        cluster.reconcile()
        cluster.happen()
    assert cluster.revision(old)["prefillReady"] == 1


@pytest.mark.parametrize("gone", [False, True], ids=["there", "gone"])
def test_failed_fetch_is_failed_until_files_are_there(gone: bool) -> None:
    """Also when the Job's time to live is over, or a user has deleted it to try again."""
    cluster = settled()
    old = cluster.service["status"]["currentRevision"]
    cluster.fetches_fail = True
    cluster.change(OTHER)
    cluster.settle()
    cluster.fetch_s = 1000.0
    for _ in range(5 if gone else 0):
        cluster.delete_jobs()
        cluster.reconcile()
        cluster.happen()
    assert cluster.condition("ModelReady") == ("False", "Failed")
    assert cluster.condition("Progressing") == ("False", "FetchFailed")
    assert cluster.condition("Degraded") == ("True", "FetchFailed")
    assert "BackoffLimitExceeded" in cluster.message("ModelReady")
    assert "The model org/model is gated" in cluster.message("ModelReady"), "the fetch's last words"
    assert cluster.service["status"]["currentRevision"] == old and workers(cluster, old) == 3
    cluster.fetches_fail, cluster.fetch_s = False, 0.0
    cluster.delete_jobs()
    cluster.settle()
    assert cluster.condition("ModelReady") == ("True", "Present")
    assert cluster.condition("Degraded")[0] == "False"
    assert cluster.condition("Ready") == ("True", "Serving")


def test_failed_first_fetch_starts_no_worker_after_job_deletion() -> None:
    cluster = FakeCluster(HUB)
    cluster.fetches_fail = True
    cluster.settle()
    cluster.fetch_s = 1000.0
    for _ in range(20):
        cluster.delete_jobs()
        cluster.reconcile()
        cluster.happen()
    assert not cluster.alive()
    assert cluster.condition("ModelReady") == ("False", "Failed")
    assert cluster.condition("Ready") == ("False", "ModelMissing")


def test_fetched_model_is_proved_by_revisions_that_use_it() -> None:
    """Neither the Job's end nor a change of the engine causes another fetch."""
    cluster = settled()
    cluster.delete_jobs()
    cluster.settle()
    assert cluster.condition("ModelReady") == ("True", "Present")
    cluster.change({**HUB, "engine": {"maxModelLen": 1024}})
    cluster.settle()
    assert cluster.names("Job") == [] and cluster.condition("Ready") == ("True", "Serving")
    proofs = [one["metadata"]["annotations"][PROOF] for one in generations(cluster)]
    assert len(proofs) == 2 and len(set(proofs)) == 1


def test_ready_workers_prove_their_model_where_no_job_is_left() -> None:
    """As 0.1.0 leaves it, which wrote nothing down."""
    cluster = settled()
    cluster.delete_jobs()
    for one in generations(cluster):
        del one["metadata"]["annotations"][PROOF]
    cluster.settle()
    assert cluster.names("Job") == []
    assert all(PROOF in one["metadata"]["annotations"] for one in generations(cluster))


def test_model_whose_claim_was_deleted_is_fetched_again() -> None:
    """Neither the proof nor the Job of the first claim says anything about the second."""
    cluster = settled()
    cluster.change({**HUB, "suspend": True})
    cluster.settle()
    (first,) = cluster.names("Job")
    del cluster.objects["v1", "PersistentVolumeClaim", "chat-model"]
    cluster.later(60)
    cluster.change(HUB)
    cluster.settle()
    assert cluster.names("Job") == [first] and len(cluster.files) == 2
    assert cluster.condition("Ready") == ("True", "Serving")


def test_another_claim_of_the_user_is_filled_by_another_job() -> None:
    def cached(claim: str) -> dict[str, Any]:
        return {**HUB, "model": {"uri": "hf://org/model", "cache": {"type": "PVC", "claimName": claim}}}

    cluster = settled(cached("one"))
    (first,) = cluster.names("Job")
    cluster.change(cached("two"))
    cluster.reconcile()
    assert len(cluster.names("Job")) == 2 and cluster.names("Job") != [first]
    assert cluster.condition("ModelReady") == ("False", "Fetching")


def test_job_without_a_pod_is_named_in_the_condition() -> None:
    cluster = FakeCluster(HUB)
    for _ in range(3):
        cluster.reconcile()
    (job,) = cluster.names("Job")
    assert cluster.message("ModelReady") == f"The Job {job} has no pod yet. See `kubectl describe job {job}`."


def test_fetching_pod_runs_where_and_as_the_workers_do() -> None:
    """On their nodes, which may be tainted, by their account, and within the limits that a quota may want."""
    placement = {
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "priorityClassName": "serving",
        "runtimeClassName": "nvidia",
        "topologySpreadConstraints": [{"topologyKey": "zone"}],
    }
    cluster = settled({**HUB, "decode": {"placement": placement}})
    pod = job(cluster)["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "chat-workers"
    assert pod["nodeSelector"] == {"pool": "gpu"} and pod["tolerations"] == placement["tolerations"]
    assert pod["priorityClassName"] == "serving"
    assert not {"runtimeClassName", "topologySpreadConstraints"} & pod.keys()
    assert "memory" in pod["containers"][0]["resources"]["limits"]
    cluster = settled({**HUB, "security": {"serviceAccountName": "bucket-reader"}})
    assert job(cluster)["spec"]["template"]["spec"]["serviceAccountName"] == "bucket-reader"


def test_last_words_of_a_failed_fetch_stay_with_its_pod() -> None:
    """So a gated model's 401 is in the condition: the log's end is the pod's message, and the pod stays."""
    spec = job(settled())["spec"]["template"]["spec"]
    assert spec["restartPolicy"] == "Never"
    assert spec["containers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_pods_that_fetch_for_themselves_ask_for_the_room() -> None:
    model = {"uri": "hf://org/model", "cache": {"size": "20Gi"}}
    cluster = settled({**HUB, "model": model})
    (worker, *_) = [
        one["spec"]["template"]["spec"]
        for (_, kind, name), one in cluster.objects.items()
        if kind == "Deployment" and "decode" in name
    ]
    (fetch,) = worker["initContainers"]
    assert fetch["resources"]["requests"]["ephemeral-storage"] == "20Gi"
    assert fetch["resources"]["limits"]["ephemeral-storage"] == "20Gi"
    (volume,) = [one["emptyDir"] for one in worker["volumes"] if one["name"] == "model"]
    assert volume == {"sizeLimit": "20Gi"}


def test_pods_without_a_cache_fetch_one_commit_per_revision() -> None:
    """Workers of one revision never differ, although the hub has a newer commit by then."""
    spec = {**HUB, "model": {"uri": "hf://org/model"}}
    cluster = settled(spec)
    assert cluster.message("ModelReady") == "Each worker's pod fetches the files when it starts."
    revision = cluster.service["status"]["currentRevision"]
    cluster.newest = "89abcdef"
    cluster.change({**spec, "decode": {"replicas": 5}})
    cluster.settle()
    assert {pod.note for pod in cluster.alive(revision)} == {"0123abcd"}
    assert cluster.service["status"]["model"]["resolvedRevision"] == "0123abcd"
    cluster.change({**spec, "engine": {"maxModelLen": 1024}})
    cluster.settle()
    assert cluster.service["status"]["model"]["resolvedRevision"] == "89abcdef", "another generation"
    cluster.change({**spec, "rollout": {"rollbackTo": revision}})
    cluster.settle()
    assert {pod.note for pod in cluster.alive(revision)} == {"0123abcd"}


@pytest.mark.parametrize(
    "model",
    [{"uri": "hf://org/model", "revision": "v1"}, {"uri": "s3://bucket/model"}, HUB["model"]],
    ids=["a revision", "a bucket", "a Job"],
)
def test_model_that_is_the_same_for_all_pods_is_not_pinned(model: dict[str, Any]) -> None:
    cluster = settled({**HUB, "model": model})
    assert not [name for name in cluster.names("ConfigMap") if name.endswith("-model")]


@pytest.mark.parametrize(
    ("size", "then"), [("40Gi", "40Gi"), ("10Gi", "20Gi"), ("20480Mi", "20Gi")], ids=["more", "less", "same"]
)
def test_claim_grows_with_its_size_without_a_rollout(size: str, then: str) -> None:
    cluster = settled()
    before = cluster.service["status"]["currentRevision"]
    cache = {**HUB["model"]["cache"], "size": size}
    cluster.change({**HUB, "model": {**HUB["model"], "cache": cache}})
    cluster.settle()
    claim = cluster.objects["v1", "PersistentVolumeClaim", "chat-model"]["spec"]
    assert claim["resources"]["requests"]["storage"] == then
    assert claim["accessModes"] == ["ReadWriteMany"]
    assert [one["name"] for one in cluster.service["status"]["revisions"]] == [before]


def test_claim_has_the_access_mode_that_its_storage_has_without_a_rollout() -> None:
    cache = {**HUB["model"]["cache"], "accessMode": "ReadWriteOnce"}
    cluster = settled({**HUB, "model": {**HUB["model"], "cache": cache}})
    assert cluster.objects["v1", "PersistentVolumeClaim", "chat-model"]["spec"]["accessModes"] == [
        "ReadWriteOnce"
    ]
    before = cluster.service["status"]["currentRevision"]
    cluster.change(HUB)  # with the default
    cluster.settle()
    assert [one["name"] for one in cluster.service["status"]["revisions"]] == [before]


def job(cluster: FakeCluster) -> Any:
    """The Job that fetches."""
    (fetch,) = [one for (_, kind, _), one in cluster.objects.items() if kind == "Job"]
    return fetch


def generations(cluster: FakeCluster) -> list[Any]:
    return [one for (_, _, name), one in sorted(cluster.objects.items()) if "-rev-" in name]
