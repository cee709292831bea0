"""Upgrades of the operator replace routers of a few services at a time, and stop where they fail."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from baton_operator.manifests.objects import key
from baton_operator.manifests.routers import SPEC_GENERATION
from baton_operator.reconcilers.plan import (
    WAIT_S,
    OperatorDefaults,
    RouterRollouts,
    is_settled,
    is_upgrade,
    plan_service,
)
from tests.operator.fake_api import FakeApi
from tests.operator.fake_cluster import IMAGES, FakeCluster
from tests.operator.real_cluster import started, until

Manifest = dict[str, Any]

SPEC: Manifest = {"model": {"uri": "builtin://smollm2"}, "decode": {}, "router": {"replicas": 2}}
NEW = OperatorDefaults(IMAGES.worker, "registry.example/router:2")


def deployment(image: str, generation: str | None = "1", replicas: int = 2) -> Manifest:
    return {
        "metadata": {"annotations": {SPEC_GENERATION: generation} if generation else {}},
        "spec": {"replicas": replicas, "template": {"spec": {"containers": [{"image": image}]}}},
    }


@pytest.mark.parametrize(
    ("existing", "wanted", "expected"),
    [
        pytest.param(deployment("a"), deployment("b"), True, id="another default image"),
        pytest.param(deployment("a", None), deployment("b"), True, id="routers of version 0.1.0"),
        pytest.param(deployment("a"), deployment("b", "2"), False, id="the spec has changed as well"),
        pytest.param(deployment("a"), deployment("a", replicas=3), False, id="another number of routers"),
        pytest.param(deployment("a", replicas=0), deployment("b"), False, id="no routers"),
        pytest.param(None, deployment("b"), False, id="a new service"),
        pytest.param(deployment("a"), None, False, id="nothing to apply"),
    ],
)
def test_is_upgrade_where_only_the_operator_has_changed(
    existing: Manifest | None, wanted: Manifest | None, expected: bool
) -> None:
    assert is_upgrade(existing, wanted) is expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, True, id="all are there"),
        pytest.param({"observedGeneration": 2}, False, id="the controller has not seen the change"),
        pytest.param({"updatedReplicas": 1}, False, id="one is of the old template"),
        pytest.param({"replicas": 3}, False, id="one of the old ones is left"),
        pytest.param({"availableReplicas": 1}, False, id="one is not ready"),
    ],
)
def test_is_settled_once_all_routers_are_new_and_ready(changes: Manifest, expected: bool) -> None:
    status = {"observedGeneration": 3, "replicas": 2, "updatedReplicas": 2, "availableReplicas": 2}
    one = {"metadata": {"generation": 3}, "spec": {"replicas": 2}, "status": {**status, **changes}}
    assert is_settled(one) is expected


class Upgraded:
    """A service under a new operator, with the Deployment's controller."""

    def __init__(self, number: int) -> None:
        self.name = f"service-{number}"
        self.cluster = FakeCluster(SPEC, self.name)
        self.cluster.settle()
        self.ready_in = 0

    @property
    def routers(self) -> Manifest:
        return self.cluster.objects["apps/v1", "Deployment", f"{self.name}-router"]

    @property
    def image(self) -> str:
        image: str = self.routers["spec"]["template"]["spec"]["containers"][0]["image"]
        return image

    def reconcile(self, rollouts: RouterRollouts, ready_in: int) -> float | None:
        """Seconds until the next time; routers that are replaced are ready after `ready_in` steps."""
        state = self.cluster.observe()
        plan = rollouts.admit(plan_service(state, NEW, self.cluster.now), state)
        before = self.image
        for one in plan.apply:
            self.cluster.objects[key(one)] = {
                **one,
                "status": self.cluster.objects[key(one)].get("status", {}),
            }
        if self.image != before:
            self.ready_in = ready_in
        return plan.again_s

    def step(self) -> None:
        """Of the controller: one of the two routers is new at once, the other when that one is ready."""
        self.ready_in -= 1
        ready = 2 if self.ready_in <= 0 else 1
        self.routers["status"] = {
            "observedGeneration": 1, "replicas": 2, "updatedReplicas": ready, "availableReplicas": 2,
        }  # fmt: skip

    @property
    def rolling(self) -> bool:
        return self.ready_in > 0


@pytest.mark.parametrize("seed", range(5))
def test_upgrade_replaces_routers_of_a_few_services_at_a_time(seed: int) -> None:
    """The order of reconciles and the time that routers take make no difference."""
    rng = random.Random(seed)
    services = [Upgraded(number) for number in range(12)]
    rollouts, most = RouterRollouts(3), 0
    for _ in range(2000):
        service = rng.choice(services)
        service.reconcile(rollouts, rng.randint(1, 20))
        most = max(most, sum(one.rolling for one in services))
        for one in services:
            one.step()
        if all(one.image == NEW.router and not one.rolling for one in services):
            break
    else:
        raise AssertionError("not all routers were replaced")
    assert most == 3


def test_upgrade_stops_where_routers_do_not_become_ready(caplog: pytest.LogCaptureFixture) -> None:
    """The other services keep routers that serve; one that a user changes, or deletes, is not held up."""
    caplog.set_level("INFO")
    services = [Upgraded(number) for number in range(6)]
    rollouts = RouterRollouts(2)

    def look(times: int = 3) -> None:
        for _ in range(times):
            for one in services:
                again_s = one.reconcile(rollouts, 10**6)
                one.step()
                assert one.image == NEW.router or again_s == WAIT_S, "one that waits is looked at again"

    look()
    assert [one.image == NEW.router for one in services] == [True, True, False, False, False, False]
    assert sum("keep their template" in one for one in caplog.messages) == 4, "one line for each that waits"
    services[5].cluster.change({**SPEC, "router": {"replicas": 2, "env": [{"name": "A", "value": "b"}]}})
    look()
    assert services[5].image == NEW.router
    rollouts.forget("models", services[0].name)
    look()
    assert [one.image == NEW.router for one in services] == [True, True, True, False, False, True]


@pytest.mark.slow
async def test_upgraded_operator_waits_for_routers_to_be_ready(tmp_path: Path) -> None:
    """The process itself: of two services one has to wait until the other one's routers are ready."""
    names = ("one", "two")

    def image(api: FakeApi, name: str) -> str:
        deployment = api.objects.get(("apps/v1", "deployments", "models", f"{name}-router"), {})
        containers = deployment.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [{}])
        return str(containers[0].get("image", ""))

    async with FakeApi(tmp_path) as api:
        async with started(tmp_path, api.kubeconfig, "old"):
            for name in names:
                await api.put(SPEC, name)
            await until(lambda: all(image(api, name) == IMAGES.router for name in names))
            await until(lambda: all(api.status(name).get("observedGeneration") for name in names))
        for name in names:
            report(api, name, available=1)
        options = (f"--router-image={NEW.router}", "--router-rollouts=1")
        async with started(tmp_path, api.kubeconfig, "new", *options) as operator:
            await until(lambda: NEW.router in [image(api, name) for name in names])
            await until(lambda: "keep their template" in operator.log.read_text())
            await api.at_rest()
            assert sorted(image(api, name) for name in names) == [IMAGES.router, NEW.router]


def report(api: FakeApi, name: str, available: int) -> None:
    """The Deployment's controller says how many routers are ready."""
    where = ("apps/v1", "deployments", "models", f"{name}-router")
    status = {"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2, "availableReplicas": available}
    api.objects[where] = {**api.objects[where], "status": status}
