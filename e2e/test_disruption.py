"""Pods that go while people ask: killed, deleted, and evicted from a node that is drained."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from e2e.kubernetes import Kubernetes, services_are_near
from e2e.patience import until
from e2e.services import NAME, READY_S, tiny_service
from e2e.stopwatch import Stopwatch
from e2e.traffic import Traffic

PER_SECOND = 10


@pytest.fixture(scope="module")
def spare(cluster: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> Kubernetes:
    """A service with a spare pod of each kind."""
    if not services_are_near():
        pytest.skip("Services are out of reach here, and what kubectl forwards ends with its pod")
    folder = tmp_path_factory.mktemp("model")
    cluster.apply(tiny_service(cluster, folder, prefill=2, decode=2, routers=2))
    cluster.wait(f"isvc/{NAME}", "condition=Ready", READY_S)
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


def test_a_router_that_is_told_to_end_takes_no_request_along(spare: Kubernetes) -> None:
    with spare.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        until("twenty answers before it", lambda: traffic.outcome.answered > 20, 60)
        watch = Stopwatch("a router pod deleted")
        spare.kubectl("delete", "pod", _pods(spare, "router")[0]["metadata"]["name"], timeout_s=180)
        _whole(spare)
        watch.note("-> all are ready again")
    assert not traffic.outcome.failures


def test_a_drained_node_takes_no_request_along(spare: Kubernetes) -> None:
    """On a cluster of one node the evicted pods' successors wait until it may be used again: at once."""
    node = _pods(spare, "decode")[0]["spec"]["nodeName"]
    with spare.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        until("twenty answers before it", lambda: traffic.outcome.answered > 20, 60)
        watch = Stopwatch("kubectl drain")
        drain = [
            "kubectl",
            "drain",
            node,
            f"--pod-selector=baton.dev/service={NAME}",
            "--delete-emptydir-data",
            f"--timeout={READY_S}s",
        ]
        with subprocess.Popen(drain, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as draining:
            until("the node is cordoned", lambda: _cordoned(spare, node), 30)
            spare.kubectl("uncordon", node)
            said, _ = draining.communicate(timeout=READY_S + 30)
        watch.note("all pods evicted, one of each role at a time")
        assert draining.returncode == 0, said
        assert "Cannot evict pod" in said, "the budget was never in the way"
        _whole(spare)
        watch.note("-> all are ready again")
    assert not traffic.outcome.failures


def _cordoned(cluster: Kubernetes, node: str) -> bool:
    return bool(cluster.object("node", node)["spec"].get("unschedulable", False))


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
