"""Status says what is: pods that ended, were refused or crash, and what of it is in the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton_operator.reconcilers.report import rejected_status, scaler_status
from baton_operator.scaling import roles
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


def test_evicted_pod_is_not_counted_and_named_until_replaced() -> None:
    cluster = settled()
    evict(cluster, "decode")
    cluster.reconcile()
    decode = cluster.service["status"]["decode"]
    assert (decode["replicas"], decode["readyReplicas"]) == (2, 2)
    assert cluster.message("DecodeReady") == f"2/3 ready: {EVICTED}"
    cluster.settle()
    decode = cluster.service["status"]["decode"]
    assert (decode["replicas"], decode["readyReplicas"]) == (3, 3)
    assert cluster.message("DecodeReady") == "3/3 ready"
    assert cluster.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize(
    ("requested", "limited", "recommended", "expected"),
    [
        (2, "", 2, ("False", "NotLimited")),
        (9, "", 2, ("True", "AtMaximum")),
        (2, "AtMaximum", 9, ("True", "AtMaximum")),
        (2, "GpuBudget", 2, ("True", "GpuBudget")),
    ],
)
def test_scaling_limited_at_the_maximum(
    requested: int, limited: str, recommended: int, expected: tuple[str, str]
) -> None:
    """By the operator's advice, and by what an HPA or `kubectl scale` wrote."""
    cluster = FakeCluster(
        {
            "model": {"uri": "builtin://smollm2"},
            "decode": {"scaling": {"minReplicas": 1, "maxReplicas": 2}},
            "autoscaling": {"mode": "External"},
        }
    )
    cluster.settle()
    scaler = cluster.objects[roles.API, roles.KIND, "chat-decode"]
    scaler["spec"]["replicas"] = requested
    scaler["status"] = {
        "scaling": {"recommended": recommended},
        "conditions": [
            {"type": "ScalingActive", "status": "True", "reason": "Demand", "message": ""},
            {
                "type": "ScalingLimited",
                "status": str(bool(limited)),
                "reason": limited or "NotLimited",
                "message": "",
            },
        ],
    }
    cluster.settle()
    assert cluster.condition("ScalingLimited") == expected
    assert cluster.service["status"]["decode"]["desiredReplicas"] == 2


def test_revision_with_only_evicted_pods_is_gone() -> None:
    """Evicted pods' objects stay until deleted: the revision is neither drained nor kept for them."""
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
def test_pods_rejected_by_quota_are_reported(spec: dict[str, Any]) -> None:
    cluster = settled()
    cluster.quota = True
    cluster.change({**spec, "decode": {"replicas": 5}})
    for _ in range(30):
        cluster.reconcile()
        cluster.happen()
    reason = "FailedCreate: pods is forbidden: exceeded quota: gpus"
    assert cluster.condition("Progressing") == ("True", "PodsRefused")
    assert cluster.message("Progressing") == reason
    assert cluster.message("DecodeReady").endswith(f"/5 ready: {reason}")
    cluster.quota = False
    cluster.settle()
    assert cluster.condition("Progressing") == ("False", "Complete")
    assert cluster.message("DecodeReady") == "5/5 ready"


def test_router_with_rejected_pods_reports_the_reason() -> None:
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
    assert cluster.message("RouterReady") == "1/1 ready: FailedCreate: no account"


ZERO: dict[str, Any] = {
    "model": {"uri": "builtin://smollm2"},
    "decode": {"scaling": {"minReplicas": 0, "maxReplicas": 2}},
    "autoscaling": {"mode": "External"},
}


def test_service_scaled_to_zero_is_ready_but_not_available() -> None:
    """A request waits for the first worker and is answered."""
    cluster = FakeCluster({**ZERO, "router": {"scaleFromZeroTimeout": "2m"}})
    cluster.settle()
    assert cluster.condition("Available") == ("True", "Serving")
    cluster.objects["baton.dev/v1alpha1", "RoleScaler", "chat-decode"]["spec"]["replicas"] = 0
    cluster.settle()
    assert cluster.condition("Available") == ("False", "ScaledToZero")
    assert cluster.condition("Ready") == ("True", "ScaledToZero")
    assert "waits up to 2m" in cluster.message("Ready")


def test_service_of_fixed_size_zero_is_not_ready() -> None:
    """No request would start a worker."""
    cluster = FakeCluster({**PAIR, "prefill": {"replicas": 0}, "decode": {"replicas": 0}})
    cluster.settle()
    assert cluster.condition("Ready") == cluster.condition("Available") == ("False", "ScaledToZero")


def test_service_after_a_rollback_is_ready_and_degraded() -> None:
    cluster = settled()
    cluster.change(CHANGED)
    state = cluster.reconcile().state
    assert state is not None
    cluster.broken.add(state.target.name)
    cluster.settle()
    assert cluster.condition("Ready") == cluster.condition("Available") == ("True", "RolledBack")
    assert cluster.condition("Degraded") == ("True", "RolledBack")


def test_refused_spec_of_a_new_service_is_not_ready() -> None:
    cluster = FakeCluster(PAIR)
    status, _ = rejected_status(cluster.observe(), ValueError("no such thing"), cluster.now)
    conditions = {one["type"]: (one["status"], one["reason"]) for one in status["conditions"]}
    assert conditions["Ready"] == conditions["Available"] == ("False", "Invalid")
    assert conditions["SpecSupported"] == ("False", "Invalid")


def test_refused_spec_of_a_serving_service_is_observed() -> None:
    """Requests are answered by workers of the earlier spec; status follows metadata.generation."""
    cluster = settled()
    cluster.change(CHANGED)
    status, _ = rejected_status(cluster.observe(), ValueError("no such thing"), cluster.now)
    assert status["observedGeneration"] == cluster.service["metadata"]["generation"] == 2
    conditions = {one["type"]: one for one in status["conditions"]}
    for name in ("Ready", "Available"):
        assert (conditions[name]["status"], conditions[name]["reason"]) == ("True", "SpecRefused")
        assert conditions[name]["message"].endswith("no such thing")
    assert conditions["Progressing"]["observedGeneration"] == 1


def test_role_conditions_count_ready_and_desired_pods() -> None:
    """`kubectl get` shows them."""
    cluster = settled()
    evict(cluster, "decode")
    cluster.reconcile()
    shown = [cluster.message(type) for type in ("PrefillReady", "DecodeReady", "RouterReady")]
    assert shown == ["2/2 ready", f"2/3 ready: {EVICTED}", "1/1 ready"]


@pytest.mark.parametrize(
    ("broken", "routers", "reason"),
    [(True, False, "NoPrefill"), (True, True, "NoPrefill"), (False, False, "NoRouter")],
    ids=["no worker, so routers wait", "no worker", "no router"],
)
def test_missing_part_that_the_others_wait_for_is_the_reason(
    broken: bool, routers: bool, reason: str
) -> None:
    """A router is ready only while it has workers."""
    cluster = FakeCluster(PAIR)
    state = cluster.reconcile().state
    assert state is not None
    cluster.broken |= {state.target.name} if broken else set()
    cluster.settle()
    cluster.pods = [replace(pod, ready=routers) if pod.role == "router" else pod for pod in cluster.pods]
    cluster.reconcile()
    assert cluster.condition("Ready") == cluster.condition("Available") == ("False", reason)
    assert cluster.condition("RouterReady") == ((("True", "AllReady")) if routers else ("False", "NoneReady"))


def test_trouble_of_pods_that_are_being_deleted_is_past() -> None:
    """As after a spec with a wrong image was corrected."""
    cluster = settled()
    for number, pod in enumerate(cluster.pods):
        cluster.pods[number] = replace(pod, trouble="ErrImagePull: no such image")
    cluster.reconcile()
    types = ("PrefillReady", "DecodeReady", "RouterReady")
    assert all("ErrImagePull" in cluster.message(type) for type in types)
    leaving = [replace(pod, name=f"{pod.name}-old", ready=False, terminating=True) for pod in cluster.pods]
    cluster.pods = [*leaving, *(replace(pod, trouble="") for pod in cluster.pods)]
    cluster.reconcile()
    assert [cluster.message(type) for type in types] == ["2/2 ready", "3/3 ready", "1/1 ready"]


@pytest.mark.parametrize(
    ("troubles", "reason"),
    [
        (["Unschedulable: 0/1 nodes"], "InsufficientCapacity"),
        (["Unschedulable: 0/1 nodes", "CrashLoopBackOff: no such model"], "PodTrouble"),
    ],
    ids=["no room", "one crashes and has no room for the other"],
)
def test_reason_of_a_slow_rollout_is_that_of_its_message(troubles: list[str], reason: str) -> None:
    cluster = settled()
    for number, trouble in enumerate(troubles):
        cluster.pods[number] = replace(cluster.pods[number], ready=False, trouble=trouble)
        assert cluster.pods[number].role != "router"
    cluster.reconcile()
    assert cluster.condition("Progressing") == ("True", reason)
    assert cluster.message("Progressing") == troubles[-1]


@pytest.mark.parametrize(
    ("refused", "reason", "words"),
    [("", "NoService", "chat does not exist"), ("no such thing", "ServiceInvalid", "refused: no such thing")],
)
def test_scaler_without_a_state_says_which_of_both_it_is(refused: str, reason: str, words: str) -> None:
    scaler = {
        "metadata": {"name": "chat-decode"},
        "spec": {"serviceName": "chat", "role": "decode", "replicas": 1},
    }
    (bound,) = scaler_status(scaler, None, 0.0, scaled=True, refused=refused)["conditions"]
    assert (bound["type"], bound["status"], bound["reason"]) == ("Bound", "False", reason)
    assert words in bound["message"]


def test_failed_revision_keeps_its_cause() -> None:
    """Also after other revisions, for which no condition says it."""
    cluster = settled()
    cluster.change(CHANGED)
    cluster.reconcile()
    failed = cluster.service["status"]["updateRevision"]
    cluster.broken.add(failed)
    cluster.settle()
    cause = cluster.revision(failed)["failure"]
    assert (
        cause.startswith("a worker started ") and "failure" not in cluster.service["status"]["revisions"][-1]
    )
    for spec in (CHANGED, {**PAIR, "engine": {"maxModelLen": 2048}}, CHANGED):
        cluster.change(spec)
        cluster.settle()
        cluster.later(60)
        cluster.reconcile()
        assert cluster.revision(failed)["failure"] == cause
    assert cluster.message("Degraded").startswith(f"Revision {failed} failed: {cause}. Change")
    assert cluster.message("Progressing") == f"Revision {failed} failed: {cause}."
