"""Pods that go while people ask: killed, deleted, evicted from a drained node, or left by its kubelet."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import pytest

from e2e import node
from e2e.kubernetes import Kubernetes, services_are_near
from e2e.patience import until
from e2e.services import NAME, READY_S, tiny_service
from e2e.stopwatch import Stopwatch
from e2e.traffic import Traffic

PER_SECOND = 20
AWAY_S = 20
LOST = ("ConnectError", "ReadError", "RemoteProtocolError")
"""What a client sees of a connection to somebody who is dead."""


@pytest.fixture(scope="module")
def spare(cluster: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> Kubernetes:
    """A service with a spare pod of each kind."""
    if not services_are_near():
        pytest.skip("Services are out of reach here, and what kubectl forwards ends with its pod")
    folder = tmp_path_factory.mktemp("model")
    cluster.apply(tiny_service(cluster, folder, prefill=2, decode=2, routers=2))
    cluster.wait(f"bsvc/{NAME}", "condition=Ready", READY_S)
    _whole(cluster)
    return cluster


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_worker_that_is_killed_takes_no_request_along(spare: Kubernetes, role: str) -> None:
    with spare.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        until("twenty answers before it", lambda: traffic.outcome.answered > 20, 60)
        watch = Stopwatch(f"a {role} pod killed")
        victim = _pods(spare, role)[0]["metadata"]["name"]
        spare.kubectl("delete", "pod", victim, "--grace-period=0", "--force")
        _whole(spare)
        watch.note("-> all are ready again")
    assert not traffic.outcome.failures


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_worker_whose_process_is_killed_takes_no_request_along(spare: Kubernetes, role: str) -> None:
    """As a crash does: the pod stays, and its container begins anew."""
    node.needed()
    with spare.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        until("twenty answers before it", lambda: traffic.outcome.answered > 20, 60)
        watch = Stopwatch(f"kill -9 of a {role} worker")
        _killed(spare, role)
        _whole(spare)
        watch.note("-> all are ready again")
    assert not traffic.outcome.failures


def test_a_router_that_is_told_to_end_takes_no_request_along(spare: Kubernetes) -> None:
    with spare.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        until("twenty answers before it", lambda: traffic.outcome.answered > 20, 60)
        watch = Stopwatch("a router pod deleted")
        spare.kubectl("delete", "pod", _pods(spare, "router")[0]["metadata"]["name"], timeout_s=180)
        _whole(spare)
        watch.note("-> all are ready again")
    assert not traffic.outcome.failures


def test_a_router_that_is_killed_costs_only_what_it_held(spare: Kubernetes) -> None:
    """
    Its streams are lost, and until Kubernetes has noticed, new connections to it are refused: nobody answers
    for one who is dead. A client that tries again, as the OpenAI SDK does, loses nothing but streams.
    """
    node.needed()
    half = PER_SECOND / 2
    with (
        spare.reach(NAME) as url,
        Traffic(url, half) as once,
        Traffic(url, half, retries=2) as again,
    ):
        until("answers before it", lambda: min(once.outcome.answered, again.outcome.answered) > 20, 60)
        watch, before = Stopwatch("kill -9 of a router"), time.monotonic()
        _killed(spare, "router")
        _whole(spare)
        watch.note("-> all are ready again")
        failed, answered = once.outcome.failures.total(), once.outcome.answered
        until("a hundred answers after it", lambda: once.outcome.answered > answered + 100, 120)
        assert once.outcome.failures.total() == failed, "requests fail although all are ready"
    late = max((one - before for one in once.outcome.failed_at), default=0.0)
    print(f"\nthe last request failed {late:.1f} s after it")
    assert all(any(sign in why for sign in LOST) for why in once.outcome.failures)
    assert all(why.startswith("in the stream") for why in again.outcome.failures)


def test_a_drained_node_takes_no_request_along(spare: Kubernetes) -> None:
    """On a cluster of one node the evicted pods' successors wait until it may be used again: at once."""
    name = _pods(spare, "decode")[0]["spec"]["nodeName"]
    with spare.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
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
            until("the node is cordoned", lambda: _cordoned(spare, name), 30)
            spare.kubectl("uncordon", name)
            said, _ = draining.communicate(timeout=READY_S + 30)
        watch.note("all pods evicted, one of each role at a time")
        assert draining.returncode == 0, said
        assert "Cannot evict pod" in said, "the budget was never in the way"
        _whole(spare)
        watch.note("-> all are ready again")
    assert not traffic.outcome.failures


def test_a_kubelet_that_is_away_for_a_moment_takes_no_request_along(spare: Kubernetes) -> None:
    node.needed()
    before = _processes(spare)
    with spare.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        until("twenty answers before it", lambda: traffic.outcome.answered > 20, 60)
        with node.without("kubelet"):
            until("answers without it", lambda: traffic.outcome.answered > 20 + AWAY_S * PER_SECOND, READY_S)
        answered = traffic.outcome.answered
        until("answers after it", lambda: traffic.outcome.answered > answered + 100, READY_S)
    assert not traffic.outcome.failures
    assert _processes(spare) == before


def test_a_kubelet_that_is_given_up_and_comes_back_finds_all_in_place(spare: Kubernetes) -> None:
    """
    Once Kubernetes has given up a node, none of its pods is in a Service, although they run. On the only node
    that is all of them: connections that are there go on, and new ones are refused until the kubelet is back.
    """
    node.needed()
    before = _processes(spare)
    name = _pods(spare, "decode")[0]["spec"]["nodeName"]
    with spare.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        until("twenty answers before it", lambda: traffic.outcome.answered > 20, 60)
        watch = Stopwatch("the kubelet stopped")
        with node.without("kubelet"):
            until("the node is given up", lambda: _given_up(spare, name), READY_S)
            watch.note("-> the node is given up")
            failed = traffic.outcome.failures.total()
            until("its pods are not ready", lambda: not _pods(spare, "router"), READY_S)
            time.sleep(AWAY_S)
        watch = Stopwatch("the kubelet started again")
        _whole(spare)
        spare.wait(f"bsvc/{NAME}", "condition=Ready", READY_S)
        watch.note("-> all are ready again")
    assert not failed, "before anybody had given it up"
    assert _processes(spare) == before
    with spare.reach(NAME) as url, Traffic(url, PER_SECOND) as after:
        until("a hundred answers", lambda: after.outcome.answered > 100, 120)
    assert not after.outcome.failures


def _cordoned(cluster: Kubernetes, name: str) -> bool:
    return bool(cluster.object("node", name)["spec"].get("unschedulable", False))


def _pods(cluster: Kubernetes, role: str) -> list[Any]:
    """Those that are ready, and do not end."""
    return [
        pod
        for pod in cluster.objects("pods", f"baton.dev/service={NAME},baton.dev/role={role}")
        if "deletionTimestamp" not in pod["metadata"]
        and any(
            one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ())
        )
    ]


def _whole(cluster: Kubernetes) -> None:
    """Two ready pods of each kind."""
    roles = ("prefill", "decode", "router")
    until("two ready pods of each kind", lambda: all(len(_pods(cluster, one)) == 2 for one in roles), READY_S)


def _killed(cluster: Kubernetes, role: str) -> None:
    """The process of one pod of a role, and seen to be: its container has begun anew."""
    name = _pods(cluster, role)[0]["metadata"]["name"]
    pod = cluster.object("pod", name)
    uid, starts = pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]
    node.kill_container(pod)
    until("its container has begun anew", lambda: _processes(cluster)[uid] > starts, READY_S)


def _processes(cluster: Kubernetes) -> dict[str, int]:
    """How often each pod's container has begun anew."""
    return {
        pod["metadata"]["uid"]: sum(one["restartCount"] for one in pod["status"]["containerStatuses"])
        for pod in cluster.objects("pods", f"baton.dev/service={NAME}")
    }


def _given_up(cluster: Kubernetes, name: str) -> bool:
    conditions = cluster.object("node", name)["status"]["conditions"]
    return any(one["type"] == "Ready" and one["status"] != "True" for one in conditions)
