"""Disruptions under load: killed, deleted and evicted pods, and outages of the kubelet."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import pytest

from e2e import node
from e2e.kubernetes import Kubernetes, services_are_near
from e2e.polling import until
from e2e.services import NAME, READY_S, tiny_service
from e2e.stopwatch import Stopwatch
from e2e.traffic import Traffic

PER_SECOND = 20
AWAY_S = 20
LOST = ("ConnectError", "ReadError", "RemoteProtocolError")
"""Errors of a client whose server process died."""


@pytest.fixture(scope="module")
def replicated(cluster: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> Kubernetes:
    """A service with two pods of each role."""
    if not services_are_near():
        pytest.skip("Services are unreachable from here, and a kubectl port-forward ends with its pod")
    folder = tmp_path_factory.mktemp("model")
    cluster.apply(tiny_service(cluster, folder, prefill=2, decode=2, routers=2))
    cluster.wait(f"bsvc/{NAME}", "condition=Ready", READY_S)
    _await_all_ready(cluster)
    return cluster


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_deleted_worker_pod_fails_no_request(replicated: Kubernetes, role: str) -> None:
    with replicated.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        until("twenty answers before it", lambda: traffic.outcome.answered > 20, 60)
        watch = Stopwatch(f"a {role} pod killed")
        victim = _pods(replicated, role)[0]["metadata"]["name"]
        replicated.kubectl("delete", "pod", victim, "--grace-period=0", "--force")
        _await_all_ready(replicated)
        watch.note("-> all are ready again")
    assert not traffic.outcome.failures


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_killed_worker_process_fails_no_request(replicated: Kubernetes, role: str) -> None:
    """As after a crash, the pod stays and its container restarts."""
    node.needed()
    with replicated.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        until("twenty answers before it", lambda: traffic.outcome.answered > 20, 60)
        watch = Stopwatch(f"kill -9 of a {role} worker")
        _kill_process(replicated, role)
        _await_all_ready(replicated)
        watch.note("-> all are ready again")
    assert not traffic.outcome.failures


def test_deleted_router_pod_fails_no_request(replicated: Kubernetes) -> None:
    with replicated.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        until("twenty answers before it", lambda: traffic.outcome.answered > 20, 60)
        watch = Stopwatch("a router pod deleted")
        replicated.kubectl("delete", "pod", _pods(replicated, "router")[0]["metadata"]["name"], timeout_s=180)
        _await_all_ready(replicated)
        watch.note("-> all are ready again")
    assert not traffic.outcome.failures


def test_killed_router_process_fails_only_its_requests(replicated: Kubernetes) -> None:
    """
    Its streams are lost, and new connections to it are refused until Kubernetes detects the failure. A client
    that retries, as the OpenAI SDK does, loses only streams.
    """
    node.needed()
    half = PER_SECOND / 2
    with (
        replicated.reach(NAME) as url,
        Traffic(url, half) as once,
        Traffic(url, half, retries=2) as again,
    ):
        until("answers before it", lambda: min(once.outcome.answered, again.outcome.answered) > 20, 60)
        watch, before = Stopwatch("kill -9 of a router"), time.monotonic()
        _kill_process(replicated, "router")
        _await_all_ready(replicated)
        watch.note("-> all are ready again")
        failed, answered = once.outcome.failures.total(), once.outcome.answered
        until("a hundred answers after it", lambda: once.outcome.answered > answered + 100, 120)
        assert once.outcome.failures.total() == failed, "requests fail although all are ready"
    late = max((one - before for one in once.outcome.failed_at), default=0.0)
    print(f"\nthe last request failed {late:.1f} s after it")
    assert all(any(sign in why for sign in LOST) for why in once.outcome.failures)
    assert all(why.startswith("in the stream") for why in again.outcome.failures)


def test_drained_node_fails_no_request(replicated: Kubernetes) -> None:
    """On a cluster with one node, the new pods wait until it is uncordoned, here immediately."""
    name = _pods(replicated, "decode")[0]["spec"]["nodeName"]
    with replicated.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        until("twenty answers before it", lambda: traffic.outcome.answered > 20, 60)
        watch = Stopwatch("kubectl drain")
        drain = [
            "kubectl",
            "drain",
            name,
            f"--pod-selector=baton.dev/service={NAME}",
            "--delete-emptydir-data",
            f"--timeout={READY_S}s",
        ]
        with subprocess.Popen(drain, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as draining:
            until("the node is cordoned", lambda: _cordoned(replicated, name), 30)
            replicated.kubectl("uncordon", name)
            output, _ = draining.communicate(timeout=READY_S + 30)
        watch.note("all pods evicted, one of each role at a time")
        assert draining.returncode == 0, output
        assert "Cannot evict pod" in output, "the budget never delayed an eviction"
        _await_all_ready(replicated)
        watch.note("-> all are ready again")
    assert not traffic.outcome.failures


def test_short_kubelet_outage_fails_no_request(replicated: Kubernetes) -> None:
    node.needed()
    before = _processes(replicated)
    with replicated.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        until("twenty answers before it", lambda: traffic.outcome.answered > 20, 60)
        with node.without("kubelet"):
            until("answers without it", lambda: traffic.outcome.answered > 20 + AWAY_S * PER_SECOND, READY_S)
        answered = traffic.outcome.answered
        until("answers after it", lambda: traffic.outcome.answered > answered + 100, READY_S)
    assert not traffic.outcome.failures
    assert _processes(replicated) == before


def test_long_kubelet_outage_restarts_no_pod(replicated: Kubernetes) -> None:
    """
    When Kubernetes marks a node as not ready, it removes its pods from Services, although they run. With one
    node these are all pods. Existing connections continue; new ones are refused until the kubelet is back.
    """
    node.needed()
    before = _processes(replicated)
    name = _pods(replicated, "decode")[0]["spec"]["nodeName"]
    with replicated.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        until("twenty answers before it", lambda: traffic.outcome.answered > 20, 60)
        watch = Stopwatch("the kubelet stopped")
        with node.without("kubelet"):
            until("the node is not ready", lambda: _not_ready(replicated, name), READY_S)
            watch.note("-> the node is not ready")
            failed = traffic.outcome.failures.total()
            until("its pods are not ready", lambda: not _pods(replicated, "router"), READY_S)
            time.sleep(AWAY_S)
        watch = Stopwatch("the kubelet started again")
        _await_all_ready(replicated)
        replicated.wait(f"bsvc/{NAME}", "condition=Ready", READY_S)
        watch.note("-> all are ready again")
    assert not failed, "requests failed before the node was not ready"
    assert _processes(replicated) == before
    with replicated.reach(NAME) as url, Traffic(url, PER_SECOND) as after:
        until("a hundred answers", lambda: after.outcome.answered > 100, 120)
    assert not after.outcome.failures


def _cordoned(cluster: Kubernetes, name: str) -> bool:
    return bool(cluster.object("node", name)["spec"].get("unschedulable", False))


def _pods(cluster: Kubernetes, role: str) -> list[Any]:
    """Return the pods of a role that are ready and not terminating."""
    return [
        pod
        for pod in cluster.objects("pods", f"baton.dev/service={NAME},baton.dev/role={role}")
        if "deletionTimestamp" not in pod["metadata"]
        and any(
            one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ())
        )
    ]


def _await_all_ready(cluster: Kubernetes) -> None:
    """Wait for two ready pods of each role."""
    roles = ("prefill", "decode", "router")
    until("two ready pods of each role", lambda: all(len(_pods(cluster, one)) == 2 for one in roles), READY_S)


def _kill_process(cluster: Kubernetes, role: str) -> None:
    """Kill the process of one pod of a role, and wait until its container has restarted."""
    name = _pods(cluster, role)[0]["metadata"]["name"]
    pod = cluster.object("pod", name)
    uid, starts = pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]
    node.kill_container(pod)
    until("its container has restarted", lambda: _processes(cluster)[uid] > starts, READY_S)


def _processes(cluster: Kubernetes) -> dict[str, int]:
    """Return the number of restarts by pod."""
    return {
        pod["metadata"]["uid"]: sum(one["restartCount"] for one in pod["status"]["containerStatuses"])
        for pod in cluster.objects("pods", f"baton.dev/service={NAME}")
    }


def _not_ready(cluster: Kubernetes, name: str) -> bool:
    conditions = cluster.object("node", name)["status"]["conditions"]
    return any(one["type"] == "Ready" and one["status"] != "True" for one in conditions)
