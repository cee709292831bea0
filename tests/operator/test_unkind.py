"""
The law of the operator, in a cluster that is unkind to it by a seeded schedule.

Workers crash and are evicted, fetches fail and their Jobs vanish, a quota refuses pods, and the spec changes
in the middle of all that. Serving workers keep serving, status is true, and at rest there are no writes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from baton_api import labels
from baton_operator.reconcilers.plan import ServicePlan, ServiceState
from baton_operator.rollout.decision import ALL, RevisionState, RoleName
from baton_operator.scaling.roles import worker_roles
from tests.operator.fake_cluster import FakeCluster
from tests.seeds import seeds

EPSILON = 1e-9


def spec(rng: random.Random) -> dict[str, Any]:
    """Of a service with any of what a rollout depends on."""
    surge, unavailable = rng.choice([(1, 0), (2, 0), (0, 1), (2, 1)])
    bounds = {"maxSurge": surge, "maxUnavailable": unavailable}
    generated: dict[str, Any] = {
        "model": {"uri": "builtin://smollm2"},
        "engine": {"maxModelLen": rng.choice([1024, 2048, 4096])},
        "decode": {"replicas": rng.randint(1, 4), "updateStrategy": bounds},
    }
    if rng.random() < 0.8:
        generated["prefill"] = {"replicas": rng.randint(1, 3), "updateStrategy": bounds}
    if rng.random() < 0.5:
        cache = {"type": "PVC", "size": "20Gi"}
        generated["model"] = {"uri": rng.choice(["hf://org/one", "hf://org/two"]), "cache": cache}
    if rng.random() < 0.2:
        steps = [{"weight": 25, "pause": rng.choice(["0s", "30s"])}]
        generated["rollout"] = {"canary": {"steps": steps}}
    return generated


@pytest.mark.parametrize("seed", seeds(40, quick=8))
def test_operator_in_an_unkind_cluster_keeps_its_law(seed: int) -> None:
    rng = random.Random(seed)
    cluster = FakeCluster(spec(rng), seed=seed, troubles=0)
    cluster.settle()
    cluster.fetch_s = rng.choice([0.0, 20.0, 200.0])
    for _ in range(4):
        cluster.troubles = rng.randint(0, 12)
        cluster.change(spec(rng))
        plan = check(cluster)
        if rng.random() < 0.3:
            assert plan.state is not None
            cluster.broken.add(plan.state.target.name)
        for _ in range(rng.randint(1, 80)):
            cluster.happen()
            check(cluster)
    cluster.troubles, cluster.quota, cluster.fetches_fail = 0, False, False
    comes_to_rest(cluster)


def check(cluster: FakeCluster) -> ServicePlan:
    """Reconcile, and compare the actions and the status with the cluster."""
    before = cluster.observe()
    plan = cluster.reconcile()
    state = plan.state
    assert state is not None
    serves_on(state)
    weighs_what_serves(state)
    prunes_nothing_alive(before.objects, plan, cluster)
    says_what_is(cluster, state)
    return plan


def serves_on(state: ServiceState) -> None:
    """No ready worker is given up before another one has taken over, beyond what may be unavailable."""
    carried = [one for one in state.seen if state.revision_plans[one.revision].phase != "Failed"]
    replicas = {one.revision: {name: role.replicas for name, role in one.roles.items()} for one in carried}
    before = sum(left(one, replicas[one.revision]).share(state.targets) for one in carried)
    after = sum(
        left(one, state.revision_plans[one.revision].replicas).share(state.targets) for one in carried
    )
    missing = [
        role.update_strategy.max_unavailable / state.targets[name]
        for name, role in worker_roles(state.spec).items()
        if state.targets[name]
    ]
    lost = max(missing, default=0.0)
    assert after >= min(before, 1 - lost) - EPSILON, (before, after, state.revision_plans)


def left(one: RevisionState, replicas: Mapping[RoleName, int]) -> RevisionState:
    """Return the revision after Kubernetes has scaled it: pods that are not ready end first."""
    roles = {name: replace(role, ready=min(role.ready, replicas[name])) for name, role in one.roles.items()}
    return replace(one, roles=roles)


def weighs_what_serves(state: ServiceState) -> None:
    """All requests go somewhere, and only to revisions that can serve as long as there is one."""
    weights = {name: fate.weight for name, fate in state.revision_plans.items()}
    serving = {one.revision for one in state.seen if one.share(state.targets) > 0}
    good = {name for name in serving if state.revision_plans[name].phase != "Failed"}
    assert sum(weights.values()) == ALL or not good, weights
    if good:
        assert {name for name, weight in weights.items() if weight} <= serving, (weights, serving)


def prunes_nothing_alive(objects: Any, plan: ServicePlan, cluster: FakeCluster) -> None:
    alive = {pod.revision for pod in cluster.pods if not pod.finished}
    for gone in plan.prune:
        assert objects[gone]["metadata"]["labels"].get(labels.REVISION) not in alive


def says_what_is(cluster: FakeCluster, state: ServiceState) -> None:
    status = cluster.service["status"]
    workers = [one for one in cluster.objects.values() if one["kind"] == "Deployment" and is_of(one, state)]
    if cluster.condition("ModelReady")[0] == "True":
        assert all(cluster.wanted_files(one) <= cluster.files for one in workers), "the files are there"
    for pod in cluster.alive():
        assert not pod.ready or pod.revision in {one["name"] for one in status["revisions"]}
    ready = [pod.role for pod in cluster.pods if pod.ready and not pod.terminating and not pod.finished]
    assert status["decode"]["readyReplicas"] == ready.count("decode") + ready.count("both")
    assert "prefill" not in status or status["prefill"]["readyReplicas"] == ready.count("prefill")
    assert cluster.condition("Ready") == cluster.condition("Available")
    if cluster.condition("Ready")[0] == "True":
        serving = {pod.role for pod in cluster.alive(status["currentRevision"]) if pod.ready}
        assert serving & {"decode", "both"}, "requests are answered"
    jobs = [one for (_, kind, _), one in cluster.objects.items() if kind == "Job"]
    for job in jobs:
        failed = any(one["type"] == "Failed" for one in job.get("status", {}).get("conditions", ()))
        if failed and job["metadata"]["name"] == status["model"]["downloadJob"] and not state.model.present:
            assert cluster.condition("ModelReady") == ("False", "Failed")


def is_of(deployment: Any, state: ServiceState) -> bool:
    of_it: bool = deployment["metadata"]["labels"].get(labels.REVISION) == state.target.name
    return of_it


def comes_to_rest(cluster: FakeCluster) -> None:
    """When nothing goes wrong any more: the wanted generation serves, or was taken back, alone."""
    for _ in range(2000):
        before = cluster.writes
        plan = check(cluster)
        if cluster.happen() or cluster.writes != before:
            continue
        if plan.again_s is not None:
            cluster.later(plan.again_s)
        elif cluster.condition("ModelReady") == ("False", "Failed"):
            cluster.delete_jobs()
        else:
            break
    else:
        raise AssertionError("it never comes to rest")
    for _ in range(3):
        cluster.later(3600)
        plan = cluster.reconcile()
        assert not plan.apply and not plan.create and not plan.prune
    assert cluster.writes == before
    status = cluster.service["status"]
    serving = status["currentRevision"]
    (chosen,) = [one["name"] for one in status["revisions"] if one["weight"]]
    if status["updateRevision"] not in cluster.broken:
        assert cluster.condition("Ready") == ("True", "Serving")
        assert serving == status["updateRevision"]
    assert {pod.revision for pod in cluster.alive()} <= {serving or chosen}
    for one in cluster.objects.values():
        if one["kind"] == "Deployment" and labels.REVISION in one["metadata"]["labels"]:
            assert one["metadata"]["labels"][labels.REVISION] in (serving or chosen, status["updateRevision"])
