"""Workers of several nodes: LeaderWorkerSets, whose groups are counted, rolled out and limited as workers."""

from __future__ import annotations

from typing import Any

import pytest

from baton_api import labels
from baton_operator.manifests.objects import TEMPLATE, Manifest, merged
from baton_operator.manifests.workers import GROUP_API, GROUP_KIND, WORKER_INDEX
from baton_operator.reconcilers.report import scaler_status
from baton_operator.scaling.budget import GpuDemand, of_role
from tests.operator.fake_cluster import FakeCluster
from tests.seeds import seeds

WIDE: Manifest = {
    "resources": {"limits": {"nvidia.com/gpu": 8}},
    "parallelism": {"tensor": 8, "pipeline": 2, "nodes": 2},
}
VLLM: Manifest = {
    "engine": {"type": "vLLM", "image": "vllm:1"},
    "model": {"uri": "pvc://models/llama-405b"},
    "prefill": {"resources": {"limits": {"nvidia.com/gpu": 8}}, "parallelism": {"tensor": 8}},
    "decode": WIDE,
}
SGLANG = merged(VLLM, {"engine": {"type": "SGLang", "image": "sglang:1"}})


def wide(spec: Manifest, name: str = "chat", **over: Any) -> FakeCluster:
    cluster = FakeCluster(merged(spec, over), name=name)
    cluster.apis = frozenset({GROUP_API})
    cluster.settle()
    return cluster


def group(cluster: FakeCluster) -> Manifest:
    """The only LeaderWorkerSet."""
    ((_, workload),) = [one for one in cluster.objects.items() if one[0][1] == GROUP_KIND]
    assert workload["apiVersion"] == GROUP_API
    return workload


def containers(cluster: FakeCluster) -> tuple[Manifest, Manifest]:
    """The main containers of leader and of the other nodes."""
    templates = group(cluster)["spec"]["leaderWorkerTemplate"]
    leader, other = (templates[one]["spec"]["containers"][0] for one in ("leaderTemplate", "workerTemplate"))
    return leader, other


def flags(container: Manifest) -> set[str]:
    names = ("nnodes", "node-rank", "master-", "headless", "dist-init-addr")
    return {one for one in container["args"] if one.removeprefix("--").startswith(names)}


@pytest.mark.parametrize(
    ("spec", "leader", "other"),
    [
        pytest.param(
            VLLM,
            {"--nnodes=2", "--node-rank=0", "--master-addr=$(LWS_LEADER_ADDRESS)", "--master-port=29501"},
            {"--nnodes=2", "--node-rank=$(LWS_WORKER_INDEX)", "--master-addr=$(LWS_LEADER_ADDRESS)",
             "--master-port=29501", "--headless"},
            id="vLLM",
        ),
        pytest.param(
            SGLANG,
            {"--nnodes=2", "--node-rank=0", "--dist-init-addr=$(LWS_LEADER_ADDRESS):29501"},
            {"--nnodes=2", "--node-rank=$(LWS_WORKER_INDEX)", "--dist-init-addr=$(LWS_LEADER_ADDRESS):29501"},
            id="SGLang",
        ),
    ],
)  # fmt: skip
def test_nodes_find_their_leader(spec: Manifest, leader: set[str], other: set[str]) -> None:
    assert tuple(map(flags, containers(wide(spec)))) == (leader, other)


def test_group_has_its_size_and_ends_as_a_whole() -> None:
    spec = group(wide(VLLM, decode={"replicas": 3}))["spec"]
    assert spec["replicas"] == 3
    groups = spec["leaderWorkerTemplate"]
    assert (groups["size"], groups["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    assert spec["startupPolicy"] == "LeaderCreated", "a leader is ready only with the other nodes"


def test_leader_of_a_group_alone_serves() -> None:
    cluster = wide(VLLM)
    leader, other = containers(cluster)
    assert "readinessProbe" in leader and "readinessProbe" not in other
    assert other["ports"] == []
    assert other["resources"] == leader["resources"], "each node has its accelerators"
    (service,) = [
        one
        for (_, kind, _), one in cluster.objects.items()
        if kind == "Service" and one["metadata"]["labels"][labels.ROLE] == "decode"
    ]
    assert service["spec"]["selector"][WORKER_INDEX] == "0"
    # LeaderWorkerSet creates a Service of its own name, for addresses of pods that are not ready.
    assert service["metadata"]["name"] != group(cluster)["metadata"]["name"]


def test_other_nodes_outlive_the_drain_of_the_leader() -> None:
    cluster = wide(VLLM, prefill=WIDE, decode={"parallelism": {"tensor": 8, "pipeline": 1, "nodes": 1}})
    templates = group(cluster)["spec"]["leaderWorkerTemplate"]
    leader, other = (templates[one]["spec"] for one in ("leaderTemplate", "workerTemplate"))
    assert other["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"] == 5 + 120 + 30
    assert other["terminationGracePeriodSeconds"] == leader["terminationGracePeriodSeconds"]


def test_status_counts_groups() -> None:
    cluster = wide(VLLM, decode={"replicas": 2})
    status = cluster.service["status"]
    assert len([pod for pod in cluster.alive() if pod.role == "decode"]) == 4
    assert status["decode"] == {
        "desiredReplicas": 2, "replicas": 2, "readyReplicas": 2, "updatedReplicas": 2,
    }  # fmt: skip
    assert cluster.condition("Ready")[0] == "True"


def test_group_without_one_node_is_not_ready() -> None:
    cluster = wide(VLLM)
    (follower,) = [pod for pod in cluster.pods if pod.follower]
    cluster.pods.remove(follower)
    group(cluster)["status"] = {"readyReplicas": 0}
    cluster.reconcile()
    assert cluster.service["status"]["decode"]["readyReplicas"] == 0
    assert cluster.condition("Available") == ("False", "NoDecode")


def test_terminating_group_is_not_ready() -> None:
    """LeaderWorkerSet may count it a moment longer."""
    cluster = wide(VLLM)
    (leader,) = [pod for pod in cluster.pods if pod.role == "decode" and not pod.follower]
    cluster._change(leader, terminating=True)
    assert group(cluster)["status"]["readyReplicas"] == 1
    cluster.reconcile()
    assert cluster.service["status"]["decode"]["readyReplicas"] == 0


@pytest.mark.parametrize("seed", seeds(20, quick=8))
def test_rollout_replaces_groups_in_pairs(seed: int) -> None:
    """Through evictions and crashes: at the end, all pods are of the new revision, in whole groups."""
    cluster = FakeCluster(merged(VLLM, {"decode": {"replicas": 2}}), seed=seed, troubles=5)
    cluster.apis = frozenset({GROUP_API})
    cluster.settle()
    first = cluster.service["status"]["currentRevision"]
    cluster.troubles = 5
    cluster.change(merged(VLLM, {"decode": {"replicas": 2}, "engine": {"args": ["--seed=1"]}}))
    cluster.settle()
    cluster.quota = False
    cluster.settle()
    status = cluster.service["status"]
    if cluster.condition("Degraded")[0] == "True":
        assert status["currentRevision"] == first, "a worker crashed three times: the old revision serves"
    else:
        assert status["currentRevision"] == status["updateRevision"] != first
    assert {pod.revision for pod in cluster.alive()} == {status["currentRevision"]}
    assert len([pod for pod in cluster.alive() if pod.role == "decode"]) == 4
    assert status["decode"]["readyReplicas"] == 2


def test_failed_groups_roll_back() -> None:
    cluster = wide(VLLM)
    first = cluster.service["status"]["currentRevision"]
    cluster.change(merged(VLLM, {"engine": {"image": "vllm:2"}}))
    cluster.reconcile()
    cluster.broken.add(cluster.service["status"]["updateRevision"])
    cluster.settle()
    assert cluster.service["status"]["currentRevision"] == first
    assert cluster.condition("Degraded") == ("True", "RolledBack")


def test_second_reconciliation_writes_nothing() -> None:
    cluster = wide(VLLM)
    before = cluster.writes
    cluster.reconcile()
    assert cluster.writes == before


def test_template_of_another_operator_is_kept() -> None:
    """It would restart all groups in place."""
    cluster = wide(VLLM)
    old = group(cluster)
    old["metadata"]["annotations"][TEMPLATE] = "0" * 16
    old["spec"]["leaderWorkerTemplate"]["size"] = 3
    cluster.reconcile()
    assert group(cluster)["spec"]["leaderWorkerTemplate"]["size"] == 3


def test_disruption_budget_allows_one_pod_of_any_node() -> None:
    """One evicted pod ends its group, so at most that many groups end at once."""
    cluster = wide(VLLM, decode={"podDisruptionBudget": {"maxUnavailable": 2}})
    (budget,) = [
        one
        for (_, kind, name), one in cluster.objects.items()
        if kind == "PodDisruptionBudget" and name == "chat-decode"
    ]
    assert budget["spec"]["maxUnavailable"] == 2
    selector = budget["spec"]["selector"]["matchLabels"].items()
    groups = group(cluster)["spec"]["leaderWorkerTemplate"]
    for template in ("leaderTemplate", "workerTemplate"):
        assert selector <= groups[template]["metadata"]["labels"].items()


def test_autoscaler_counts_workers_and_all_their_accelerators() -> None:
    cluster = wide(VLLM, autoscaling={"mode": "External"}, decode={"scaling": {"maxReplicas": 4}})
    state = cluster.plan().state
    assert state is not None
    assert GpuDemand.of(("models", "chat"), "decode", state.spec.decode, 1, ()).gpus == 16
    assert len(of_role("decode", cluster.pods)) == 1
    (scaler,) = [one for (_, kind, _), one in cluster.objects.items() if kind == "RoleScaler"]
    status = scaler_status(scaler, state, cluster.now, scaled=True)
    assert (status["replicas"], f"{WORKER_INDEX}=0" in status["selector"]) == (1, True)


class TestMissingApi:
    def test_new_service_says_what_to_install(self) -> None:
        cluster = FakeCluster(VLLM)
        cluster.settle()
        assert cluster.condition("SpecSupported") == ("False", "ApiMissing")
        assert cluster.condition("Ready") == ("False", "ApiMissing")
        assert cluster.condition("Progressing") == ("False", "ApiMissing")
        for words in (GROUP_API, "parallelism.nodes", "https://lws.sigs.k8s.io/docs/installation"):
            assert words in cluster.message("SpecSupported")
        assert not cluster.names(GROUP_KIND)
        assert not cluster.alive(), "prefill workers alone would hold accelerators for nothing"

    def test_earlier_revision_serves_until_it_is_there(self) -> None:
        small = merged(VLLM, {"decode": {"parallelism": {"tensor": 8, "pipeline": 1, "nodes": 1}}})
        cluster = FakeCluster(small)
        cluster.settle()
        first = cluster.service["status"]["currentRevision"]
        cluster.change(VLLM)
        cluster.settle()
        assert cluster.condition("Ready") == ("True", "RollingOut")
        assert cluster.service["status"]["currentRevision"] == first
        assert cluster.revision(cluster.service["status"]["updateRevision"])["phase"] == "Waiting"
        cluster.apis = frozenset({GROUP_API})
        cluster.settle()
        assert cluster.condition("Ready") == ("True", "Serving")
        assert cluster.service["status"]["currentRevision"] != first


def test_name_that_is_too_long_for_groups_is_refused() -> None:
    cluster = FakeCluster(VLLM, name="a" * 30)
    cluster.apis = frozenset({GROUP_API})
    with pytest.raises(ValueError, match=r"has 30 characters.*at most 29"):
        cluster.plan()
    assert wide(VLLM, name="a" * 29).condition("Ready")[0] == "True"
