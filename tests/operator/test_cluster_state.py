"""The state read from a service's objects: pods that wait, crash, were evicted, or are never created."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.cluster.state import Pod, pod_creation_failure

EVICTED = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed container"}}
GATED = {"terminated": {"exitCode": 1, "reason": "Error", "message": "The model a/b is gated.\n"}}
UNPLACED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}

TROUBLES = [
    pytest.param({"phase": "Running"}, "", id="none"),
    pytest.param(EVICTED, "Evicted: The node was low on resource: memory.", id="evicted"),
    pytest.param({"conditions": [UNPLACED]}, "Unschedulable: 0/3 nodes", id="unschedulable"),
    pytest.param(
        {"containerStatuses": [{"state": BACK_OFF}]},
        "CrashLoopBackOff: back-off 5m0s restarting failed container",
        id="crashing",
    ),
    pytest.param(
        {"initContainerStatuses": [{"state": BACK_OFF, "lastState": GATED}]},
        "CrashLoopBackOff: The model a/b is gated.",
        id="crashing with last words",
    ),
    pytest.param(
        {"phase": "Pending", "initContainerStatuses": [{"state": GATED}]},
        "Error: The model a/b is gated.",
        id="ended, before the next start",
    ),
    pytest.param(
        {"phase": "Pending", "initContainerStatuses": [{"state": {"terminated": {"exitCode": 0}}}]},
        "",
        id="first container has succeeded",
    ),
    pytest.param(
        {"phase": "Failed", "containerStatuses": [{"state": GATED}]},
        "Error: The model a/b is gated.",
        id="failed with last words",
    ),
    pytest.param(
        {"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}, "", id="starting"
    ),
]


def pod(status: dict[str, Any], **labels: str) -> Pod:
    return Pod.of({"metadata": {"name": "chat-1", "labels": labels}, "status": status})


@pytest.mark.parametrize(("status", "trouble"), TROUBLES)
def test_pod_trouble_is_kubernetes_word_and_last_message(status: dict[str, Any], trouble: str) -> None:
    assert pod(status).trouble == trouble


@pytest.mark.parametrize(
    ("phase", "finished"),
    [("Pending", False), ("Running", False), ("Unknown", False), ("Failed", True), ("Succeeded", True)],
)
def test_pod_phase_says_whether_anything_still_runs(phase: str, finished: bool) -> None:
    assert pod({"phase": phase}).finished is finished


def test_job_pod_has_its_job_and_termination_message() -> None:
    done = {"state": {"terminated": {"exitCode": 0, "message": "0123abcd\n"}}}
    of_job = pod({"containerStatuses": [done]}, **{"batch.kubernetes.io/job-name": "chat-model-1"})
    assert (of_job.job, of_job.note) == ("chat-model-1", "0123abcd")
    assert pod({"containerStatuses": [{"state": GATED}]}).note == "", "a failure's last words are no result"


def test_deployment_with_rejected_pods_has_the_reason() -> None:
    message = 'pods "chat-decode-x" is forbidden: exceeded quota: gpus'
    condition = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
    assert pod_creation_failure({"status": {"conditions": [condition]}}) == f"FailedCreate: {message}"
    assert pod_creation_failure({"status": {"conditions": [{**condition, "status": "False"}]}}) == ""
    assert pod_creation_failure(None) == pod_creation_failure({}) == ""
