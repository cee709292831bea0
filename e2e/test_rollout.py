"""Rollouts under load: revisions start, wait, fail and are rolled back without a failed request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from e2e.kubernetes import Kubernetes
from e2e.polling import until
from e2e.services import NAME, READY_S, addresses, tiny_service
from e2e.stopwatch import Stopwatch
from e2e.traffic import Traffic

PER_SECOND = 20


def test_rollout_to_a_new_revision_fails_no_request(cluster: Kubernetes, tmp_path: Path) -> None:
    cluster.apply(tiny_service(cluster, tmp_path))
    cluster.wait(f"bsvc/{NAME}", "condition=Ready", READY_S)
    old = _status(cluster)["currentRevision"]

    with cluster.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        until("twenty answers before the change", lambda: traffic.outcome.answered > 20, 60)
        watch = Stopwatch("a rollout")
        cluster.patch(f"bsvc/{NAME}", {"spec": {"engine": {"maxModelLen": 256}}})
        until("a new revision serves", lambda: _status(cluster)["currentRevision"] != old, READY_S)
        watch.note("changed -> the new revision serves")
        until("the old revision is gone", lambda: not _pods(cluster, old), READY_S)
        watch.note("-> the old revision is gone")

    assert traffic.outcome.answered > 20
    assert not traffic.outcome.failures
    cluster.wait(f"bsvc/{NAME}", "condition=Ready", 30)


def test_revision_that_never_gets_ready_is_rolled_back(cluster: Kubernetes) -> None:
    old = _status(cluster)["currentRevision"]
    with cluster.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        watch = Stopwatch("a rollout that fails")
        change = {"engine": {"args": ["--no-such-flag"]}, "rollout": {"progressDeadline": "1m"}}
        cluster.patch(f"bsvc/{NAME}", {"spec": change})
        cluster.wait(f"bsvc/{NAME}", "condition=Degraded", READY_S)
        watch.note("changed -> rolled back")

    assert not traffic.outcome.failures
    failed = [one for one in _status(cluster)["revisions"] if one["phase"] == "Failed"]
    assert failed and _status(cluster)["currentRevision"] == old


def test_paused_rollout_delays_the_change(cluster: Kubernetes) -> None:
    old = _status(cluster)["currentRevision"]
    with cluster.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        watch = Stopwatch("a rollout that is paused")
        policy = {"paused": True, "progressDeadline": "1h"}
        change = {"engine": {"args": [], "maxModelLen": 192}, "rollout": policy}
        cluster.patch(f"bsvc/{NAME}", {"spec": change})
        until("the rollout is paused", lambda: _reason(cluster, "Progressing") == "Paused", READY_S)
        waiting = _status(cluster)["updateRevision"]
        answered = traffic.outcome.answered
        until("a hundred answers meanwhile", lambda: traffic.outcome.answered > answered + 100, 120)
        assert _status(cluster)["currentRevision"] == old != waiting
        assert not _pods(cluster, waiting)
        watch.note("changed -> a hundred answers by the old revision")
        cluster.patch(f"bsvc/{NAME}", {"spec": {"rollout": {"paused": False}}})
        until("it serves", lambda: _status(cluster)["currentRevision"] == waiting, READY_S)
        watch.note("resumed -> the new revision serves")
        until("the old revision is gone", lambda: not _pods(cluster, old), READY_S)
    assert not traffic.outcome.failures


def test_rollback_to_an_earlier_revision_serves_it(cluster: Kubernetes) -> None:
    before = _status(cluster)["currentRevision"]
    retired = [one["name"] for one in _status(cluster)["revisions"] if one["phase"] == "Retired"]
    with cluster.reach(NAME) as url, Traffic(url, PER_SECOND) as traffic:
        watch = Stopwatch("rollbackTo")
        cluster.patch(f"bsvc/{NAME}", {"spec": {"rollout": {"rollbackTo": retired[0]}}})
        until("it serves", lambda: _status(cluster)["currentRevision"] == retired[0], READY_S)
        watch.note("set -> the earlier revision serves")
        until("the other revision is gone", lambda: not _pods(cluster, before), READY_S)
        watch.note("-> the other revision is gone")
        workers = addresses(cluster, retired[0])
        answered = traffic.outcome.of(workers)
        until("it answers", lambda: traffic.outcome.of(workers) > answered + 20, READY_S)
    assert not traffic.outcome.failures


def _status(cluster: Kubernetes) -> Any:
    return cluster.object("bsvc", NAME)["status"]


def _pods(cluster: Kubernetes, revision: str) -> list[Any]:
    return cluster.objects("pods", f"baton.dev/revision={revision}")


def _reason(cluster: Kubernetes, condition: str) -> str:
    reasons = {one["type"]: one["reason"] for one in _status(cluster)["conditions"]}
    return str(reasons.get(condition, ""))
