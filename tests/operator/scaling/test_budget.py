"""The budget of accelerators over all services: what counts is written in the cluster."""

from __future__ import annotations

import random
from typing import Any

import pytest

from baton_api import labels
from baton_operator.cluster.api_resources import API
from baton_operator.cluster.cache import ObjectCache
from baton_operator.cluster.state import ClusterReader
from baton_operator.manifests.objects import Manifest
from baton_operator.scaling.budget import GpuBudget, GpuDemand, holder

GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
SPEC: dict[str, Any] = {
    "model": {"uri": "builtin://smollm2"},
    "decode": {"scaling": {"minReplicas": 1, "maxReplicas": 9}, **GPU},
    "autoscaling": {"mode": "Internal"},
}


class Cluster:
    """Scaled services as the cache has them."""

    def __init__(self) -> None:
        self.cache = ObjectCache([], lambda change: None)
        self.reader = ClusterReader(self.cache)
        for one in self.cache.stores:
            one.replace({}, 1)
        self._version = 1

    def store(self, api: str, kind: str, name: str, **fields: Any) -> None:
        self._version += 1
        given = fields.pop("labels", {})
        metadata = {"name": name, "namespace": "models", "uid": f"uid-{kind}-{name}", "labels": given}
        metadata["resourceVersion"] = str(self._version)
        manifest: Manifest = {"apiVersion": api, "kind": kind, "metadata": metadata, **fields}
        store = self.cache.store(kind, "models")
        assert store is not None
        store.happened("MODIFIED", manifest)

    def service(self, name: str, replicas: int, **spec: Any) -> None:
        self.store(API, "InferenceService", name, spec={**SPEC, **spec})
        self.write(name, replicas)

    def write(self, name: str, replicas: int) -> None:
        """The autoscaler's number."""
        spec = {"serviceName": name, "role": "decode", "replicas": replicas}
        self.store(API, "RoleScaler", f"{name}-decode", spec=spec)

    def pods(self, name: str, count: int) -> None:
        pod_labels = {labels.MANAGED_BY: labels.OPERATOR, labels.SERVICE: name, labels.ROLE: "both"}
        for number in range(count):
            self.store("v1", "Pod", f"{name}-{number}", labels=pod_labels, status={"phase": "Running"})

    def written(self, name: str) -> int:
        scaler = self.reader.scaler("models", name, "decode")
        assert scaler is not None
        replicas: int = scaler["spec"]["replicas"]
        return replicas


def look(budget: GpuBudget, cluster: Cluster, name: str, requested: int, pressure: float = 1.0) -> int:
    """The service decides; its grant is not written yet."""
    key, replicas = ("models", name), cluster.written(name)
    demand = GpuDemand(holder(key, "decode"), 1, replicas, replicas, requested, pressure)
    return budget.grant(key, [demand], 0.0, 45.0)[demand.holder]


def test_written_grant_is_not_outbid_by_another_service() -> None:
    """Two services that want four each of six accelerators get six, and not four each."""
    cluster = Cluster()
    cluster.service("a", 1)
    cluster.service("b", 1)
    budget = GpuBudget(6, cluster.reader)
    assert look(budget, cluster, "a", 4) == 4
    cluster.write("a", 4)
    budget.written(("models", "a"))
    assert look(budget, cluster, "b", 4, pressure=9.0) == 2


def test_new_leader_counts_services_it_has_not_looked_at() -> None:
    cluster = Cluster()
    cluster.service("a", 1)
    cluster.service("b", 4)
    assert look(GpuBudget(6, cluster.reader), cluster, "a", 6) == 2


def test_grant_that_is_being_written_is_reserved() -> None:
    """Between a decision and its write others decide; a write that fails sets its share free."""
    cluster = Cluster()
    cluster.service("a", 1)
    cluster.service("b", 1)
    budget = GpuBudget(6, cluster.reader)
    assert look(budget, cluster, "a", 4) == 4
    assert look(budget, cluster, "b", 4, pressure=9.0) == 2
    budget.written(("models", "a"))
    budget.forget(("models", "a"))
    assert look(budget, cluster, "b", 9, pressure=9.0) == 5


def test_budget_unmet_demand_of_greater_need_goes_first() -> None:
    cluster = Cluster()
    cluster.service("a", 2)
    cluster.service("b", 2)
    cluster.pods("b", 4)  # two of them still end
    budget = GpuBudget(6, cluster.reader)
    assert look(budget, cluster, "a", 4, pressure=5.0) == 2
    cluster.store("v1", "Pod", "b-3", status={"phase": "Succeeded"}, labels={})
    assert look(budget, cluster, "b", 3, pressure=1.0) == 2, "what is free is kept for the other one"


@pytest.mark.parametrize(
    ("spec", "free"),
    [
        ({"suspend": True}, 6),
        ({"autoscaling": {"mode": "Disabled"}, "decode": {"replicas": 3, **GPU}}, 6),
        ({"decode": {"scaling": {"minReplicas": 1, "maxReplicas": 9}}}, 6),
        ({"prefill": {"replicas": 2, **GPU}}, 1),
        ({"model": {}}, 6),
    ],
    ids=["suspended", "not scaled", "no accelerators", "both roles", "invalid"],
)
def test_services_hold_what_their_roles_use(spec: dict[str, Any], free: int) -> None:
    cluster = Cluster()
    cluster.service("a", 0)
    cluster.service("b", 3, **spec)
    assert look(GpuBudget(6, cluster.reader), cluster, "a", 9) == free


@pytest.mark.parametrize("seed", range(30))
def test_budget_is_never_exceeded_whatever_the_order(seed: int) -> None:
    """Looks, writes that are late or fail, and new leaders in any order."""
    rng = random.Random(seed)
    cluster, gpus = Cluster(), rng.randint(3, 12)
    names = "abc"
    for name in names:
        cluster.service(name, 1)
    budget = GpuBudget(gpus, cluster.reader)
    granted: dict[str, int] = {}
    for _ in range(60):
        name = rng.choice(names)
        if name in granted:
            allowed = granted.pop(name)
            if rng.random() < 0.8:
                cluster.write(name, allowed)
            budget.written(("models", name))
        else:
            granted[name] = look(budget, cluster, name, rng.randint(0, 9), rng.random())
        if rng.random() < 0.1:
            granted.clear()
            budget = GpuBudget(gpus, cluster.reader)
        assert sum(map(cluster.written, names)) <= gpus
