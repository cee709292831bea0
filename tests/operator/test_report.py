"""Status says what is: pods that ended, were refused or crash, and what of it is in the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.operator.fake_cluster import FakeCluster

PAIR: dict[str, Any] = {
    "model": {"uri": "builtin://smollm2"},
    "prefill": {"replicas": 2},
    "decode": {"replicas": 3},
}
CHANGED: dict[str, Any] = {**PAIR, "engine": {"maxModelLen": 1024}}
EVICTED = "Evicted: The node was low on resource: memory."


def settled() -> FakeCluster:
    cluster = FakeCluster(PAIR)
    cluster.settle()
    return cluster


def evict(cluster: FakeCluster, role: str) -> None:
    """One pod of that role, whose object stays."""
    number = next(n for n, pod in enumerate(cluster.pods) if pod.role == role and not pod.finished)
    ended = replace(cluster.pods[number], phase="Failed", ready=False, trouble=EVICTED)
    cluster.pods[number] = ended


def test_evicted_pod_does_not_count_and_is_named_while_one_is_missing() -> None:
    cluster = settled()
    evict(cluster, "decode")
    cluster.reconcile()
    decode = cluster.service["status"]["decode"]
    assert (decode["replicas"], decode["ready"], decode["reason"]) == (2, 2, EVICTED)
    cluster.settle()
    decode = cluster.service["status"]["decode"]
    assert (decode["replicas"], decode["ready"], decode["reason"]) == (3, 3, "")
    assert cluster.condition("Ready") == ("True", "Serving")


def test_generation_of_which_only_evicted_pods_are_left_is_gone() -> None:
    """Their objects stay for as long as nobody deletes them: neither drained nor kept for that."""
    cluster = settled()
    old = cluster.service["status"]["currentRevision"]
    evict(cluster, "decode")
    evict(cluster, "prefill")
    cluster.settle()
    cluster.change(CHANGED)
    for _ in range(60):
        cluster.reconcile()
        stay = [pod for pod in cluster.pods if pod.finished]
        cluster.happen()
        cluster.pods += [pod for pod in stay if pod not in cluster.pods]
    assert len([pod for pod in cluster.pods if pod.revision == old]) == 2
    assert cluster.revision(old)["phase"] == "Retired"
    assert not [name for name in cluster.names("Deployment") if old in name]
    assert cluster.condition("Progressing") == ("False", "Complete")


@pytest.mark.parametrize("spec", [PAIR, CHANGED], ids=["more workers", "a rollout"])
def test_pods_that_a_quota_refuses_are_said_to_be_refused(spec: dict[str, Any]) -> None:
    cluster = settled()
    cluster.quota = True
    cluster.change({**spec, "decode": {"replicas": 5}})
    for _ in range(30):
        cluster.reconcile()
        cluster.happen()
    reason = "FailedCreate: pods is forbidden: exceeded quota: gpus"
    assert cluster.condition("Progressing") == ("True", "PodsRefused")
    assert cluster.message("Progressing") == reason
    assert cluster.service["status"]["decode"]["reason"] == reason
    cluster.quota = False
    cluster.settle()
    assert cluster.condition("Progressing") == ("False", "Complete")
    assert cluster.service["status"]["decode"]["reason"] == ""


def test_router_whose_pods_are_refused_says_why() -> None:
    cluster = settled()
    router = cluster.objects["apps/v1", "Deployment", "chat-router"]
    condition = {
        "type": "ReplicaFailure",
        "status": "True",
        "reason": "FailedCreate",
        "message": "no account",
    }
    router["status"] = {"conditions": [condition]}
    cluster.reconcile()
    assert cluster.service["status"]["router"]["reason"] == "FailedCreate: no account"
