"""The loop against a real API server: its writes, its status, and its events."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from kubernetes.aio.client.exceptions import ApiException

from baton_api import labels, metrics
from baton_operator.cluster.api_resources import API, path
from baton_operator.cluster.api_server import CONFLICT, ApiServer
from baton_operator.cluster.state import ClusterReader
from baton_operator.manifests.objects import Manifest, Transition
from baton_operator.scaling.autoscaler import COST, Autoscaler, ScalingMetrics
from baton_operator.scaling.decision import HEADROOM
from baton_operator.scaling.history import ENOUGH_SAMPLES
from baton_operator.scaling.prometheus import MetricsLost
from baton_operator.scaling.roles import ScalingSettings
from tests.operator.real_cluster import Inside, Listed, RealCluster, client, real_cluster
from tests.operator.scaling.test_seeds import PREFILL, PROFILE

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

URL = "http://prometheus.example.org"
SCALING = {"minReplicas": 1, "maxReplicas": 6}
SPEC: dict[str, Any] = {
    "model": {"uri": "builtin://smollm2"},
    "prefill": {"scaling": SCALING},
    "decode": {"scaling": SCALING},
    "autoscaling": {"mode": "Internal", "prometheus": {"url": URL}},
}
NOTHING = {
    "age": 1.0, "demand_prompt": 0.0, "demand_answer": 0.0, "queued_prompt": 0.0, "in_flight": 0.0,
    "waiting": 0.0, "held": 0.0,
    "prefill_queued_tokens": 0.0, "prefill_queued": 0.0, "decode_queued": 0.0, "decode_fullest": 0.0,
    "decode_fullest_slots": 0.0, "decode_slots": 64.0, "decode_running": 0.0,
}  # fmt: skip


class FakeMetrics:
    """Prometheus, as far as the scaler sees it: it says what the test has it say, or nothing."""

    def __init__(self) -> None:
        self.signals: dict[str, float] = {}
        self.running: dict[str, float] = {}
        self.lost = ""
        self.queried: list[str] = []
        self.meanwhile: Callable[[], Awaitable[Any]] | None = None
        """Happens once, before the next answer."""

    async def query(self, url: str, promql: str, label: str) -> Mapping[str, float]:
        self.queried.append(url)
        if self.meanwhile is not None:
            once, self.meanwhile = self.meanwhile, None
            await once()
        if self.lost:
            raise MetricsLost(self.lost)
        return self.running if label == "pod" else self.signals


class Scaled:
    """One service, its operator's two halves in the test's own process, and a clock that the test moves."""

    def __init__(self, cluster: RealCluster, listed: Listed, inside: Inside, name: str) -> None:
        self.cluster = cluster
        self.listed = listed
        self.inside = inside
        self.name = name
        self.prometheus = FakeMetrics()
        self.events: list[str] = []
        self.shown = ScalingMetrics(lambda: inside.now)
        self.autoscaler = Autoscaler(
            listed.api, ClusterReader(listed.cache), self.prometheus, ScalingSettings(), self._tell,
            self.shown,
            lambda: inside.now,
        )  # fmt: skip

    def _tell(self, about: Manifest, transition: Transition) -> None:
        self.events.append(transition.fact.message)

    async def settle(self) -> None:
        """Reconcile until all wanted pods are ready and the service's status reports it."""
        for _ in range(4):
            await self.inside.reconcile(self.name)
            await self.cluster.ready_pods(self.name)

    async def look(self, seconds: float = 15.0) -> float | None:
        self.inside.now += seconds
        await self.listed.relist()
        return await self.autoscaler.reconcile("models", self.name)

    async def wanted(self, role: str) -> tuple[int, dict[str, Any]]:
        """Return the requested replicas and the scaling status."""
        scaler = await self.scaler(role)
        return scaler["spec"]["replicas"], scaler.get("status", {}).get("scaling", {})

    async def scaler(self, role: str) -> Manifest:
        answer = await self.cluster.admin.get(path(API, "RoleScaler", "models", f"{self.name}-{role}"))
        scaler: Manifest = answer.raise_for_status().json()
        return scaler

    async def generations(self, role: str) -> dict[str, int]:
        """Return the observed generation of each condition of a RoleScaler, less its generation."""
        scaler = await self.scaler(role)
        generation, conditions = scaler["metadata"]["generation"], scaler["status"]["conditions"]
        return {one["type"]: one["observedGeneration"] - generation for one in conditions}

    async def condition(self, role: str, type: str = "ScalingActive") -> str:
        return await self.cluster.condition(type, f"{self.name}-{role}", "RoleScaler")

    async def scale(self, role: str, replicas: int) -> None:
        where = path(API, "RoleScaler", "models", f"{self.name}-{role}")
        await self.cluster.api.patch(where, {"spec": {"replicas": replicas}})

    def see(self, prefill: int, decode: int, **signals: float) -> None:
        workers = {"routers": 1.0, "prefill_workers": float(prefill), "decode_workers": float(decode)}
        self.prometheus.signals = {**NOTHING, **workers, **signals}

    def gauge(self, name: str, role: str = "prefill") -> list[float]:
        samples = [one for family in self.shown.collect() for one in family.samples if one.name == name]
        return [one.value for one in samples if one.labels["role"] == role]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    async with real_cluster(tmp_path_factory.mktemp("kubernetes")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def service(cluster: RealCluster, request: pytest.FixtureRequest) -> AsyncIterator[Scaled]:
    name = f"s{abs(hash(request.node.name)) % 10**8}"
    async with client(cluster) as asking:
        scaled = Scaled(cluster, Listed(asking), Inside(asking), name)
        await cluster.put(SPEC, name)
        await scaled.settle()
        yield scaled
        await cluster.api.delete(path(API, "InferenceService", "models", name))
        for kind in ("Deployment",):
            for one in (await cluster.admin.get(path("apps/v1", kind, "models"))).json()["items"]:
                await cluster.api.delete(path("apps/v1", kind, "models", one["metadata"]["name"]))
        await cluster.ready_pods(name)


async def test_autoscaler_prefill_load_scales_prefill_with_one_event(service: Scaled) -> None:
    service.see(1, 1, demand_prompt=3000.0, prefill_speed=1000.0, in_flight=2.0)
    assert await service.look() == 15.0
    assert (await service.wanted("prefill"))[0] == 4
    assert (await service.wanted("decode"))[0] == 1
    assert await service.condition("decode") == "True Steady"
    assert [one.split(".")[0] for one in service.events] == ["prefill: scaled from 1 to 4 workers"]
    await service.settle()
    assert await service.cluster.condition("ScalingActive", service.name) == "True Measured"
    deployments = (await service.cluster.admin.get(path("apps/v1", "Deployment", "models"))).json()["items"]
    replicas = {one["metadata"]["labels"][labels.ROLE]: one["spec"]["replicas"] for one in deployments}
    assert (replicas["prefill"], replicas["decode"]) == (4, 1)
    assert service.gauge(metrics.AUTOSCALER_DESIRED.name) == [4]
    assert service.gauge(metrics.AUTOSCALER_CAPACITY.name) == [1000.0]
    writes = service.inside.writes
    service.see(4, 1, demand_prompt=3000.0, prefill_speed=1000.0, in_flight=2.0)
    for _ in range(4):
        await service.look()
        await service.inside.reconcile(service.name)
    assert len(service.events) == 1
    first = service.inside.writes
    for _ in range(4):
        await service.look()
        await service.inside.reconcile(service.name)
    assert service.inside.writes == first >= writes, "nothing is written where nothing changes"


async def test_without_metrics_nothing_shrinks_and_status_says_so(service: Scaled) -> None:
    await service.scale("prefill", 3)
    await service.settle()
    service.prometheus.lost = f"{URL} does not answer within 5 s"
    for _ in range(30):
        await service.look()
    assert (await service.wanted("prefill"))[0] == 3
    assert await service.condition("prefill") == "False MetricsHeld"
    assert await service.condition("prefill", "ScalingLimited") == "False NotLimited"
    assert await service.condition("prefill", "Bound") == "True Bound", "both writers' conditions stay"
    await service.settle()
    assert await service.cluster.condition("ScalingActive", service.name) == "False MetricsHeld"
    assert service.events == []
    assert set(service.gauge(metrics.AUTOSCALER_UNKNOWN.name)) == {1.0}


NEW = {"Bound": 0, "ScalingActive": 0, "ScalingLimited": 0}
"""All conditions of a RoleScaler, for its present generation."""


async def test_autoscaler_keeps_what_is_written_while_it_waits_for_metrics(service: Scaled) -> None:
    """The reconciler writes conditions of the same RoleScaler."""

    async def meanwhile() -> None:
        await service.scale("prefill", 2)
        await service.listed.relist()
        await service.inside.reconcile_from(service.listed, service.name)

    service.prometheus.lost = "nothing answers"
    service.prometheus.meanwhile = meanwhile
    await service.look()
    assert await service.generations("prefill") == NEW
    assert await service.condition("prefill") == "False MetricsHeld"


async def test_reconciler_keeps_what_the_autoscaler_writes_meanwhile(
    service: Scaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.scale("prefill", 2)
    await service.listed.relist()
    service.see(1, 1)
    write = ApiServer.write_status
    waiting = [service.look]

    async def slowly(api: ApiServer, manifest: Manifest, status: Any, **options: Any) -> None:
        if manifest["kind"] == "InferenceService" and waiting:
            await waiting.pop()()
        await write(api, manifest, status, **options)

    monkeypatch.setattr(ApiServer, "write_status", slowly)
    await service.inside.reconcile_from(service.listed, service.name)
    assert not waiting and await service.generations("prefill") == NEW
    assert await service.condition("prefill") == "True Stabilizing"


async def test_status_of_a_role_scaler_that_has_changed_is_written_again(service: Scaled) -> None:
    """A write from a cache that lags would remove the other writer's conditions; the queue repeats it."""
    await service.listed.relist()
    service.prometheus.lost = "nothing answers"
    await service.scale("prefill", 2)

    async def meanwhile() -> None:
        await service.inside.reconcile(service.name)

    service.prometheus.meanwhile = meanwhile
    with pytest.raises(ApiException) as late:
        await service.look()
    assert late.value.status == CONFLICT
    await service.scale("prefill", 3)
    lagging = Listed(service.listed.api.client)
    await lagging.relist()
    await service.look()
    with pytest.raises(ApiException) as late:
        await service.inside.reconcile_from(lagging, service.name)
    assert late.value.status == CONFLICT
    await service.inside.reconcile(service.name)
    assert await service.generations("prefill") == NEW


async def test_conditions_are_for_the_replicas_that_the_autoscaler_wrote(service: Scaled) -> None:
    service.see(1, 1, demand_prompt=3000.0, prefill_speed=1000.0, in_flight=2.0)
    await service.look()
    replicas, scaling = await service.wanted("prefill")
    assert replicas == 4 and "lastScaleTime" in scaling
    assert await service.generations("prefill") == {**NEW, "Bound": -1}


async def test_refused_spec_keeps_what_the_autoscaler_wrote(service: Scaled) -> None:
    """It goes on to scale the workers that serve; nothing would end the writes of both."""
    service.see(1, 1)
    await service.look()
    refused = {**SPEC, "rollout": {"rollbackTo": "00000000"}}
    await service.cluster.put(refused, service.name)
    for _ in range(2):
        await service.inside.reconcile(service.name)
        await service.look()
    before = await service.scaler("prefill")
    await service.inside.reconcile(service.name)
    after = await service.scaler("prefill")
    assert after == before and {one["type"] for one in after["status"]["conditions"]} == set(NEW)
    assert await service.condition("prefill", "Bound") == "False ServiceInvalid"
    off = {**refused, "prefill": {}, "decode": {}, "autoscaling": {"mode": "Disabled"}}
    await service.cluster.put(off, service.name)
    await service.inside.reconcile(service.name)
    status = (await service.scaler("prefill"))["status"]
    assert [one["type"] for one in status["conditions"]] == ["Bound"] and "scaling" not in status


async def test_autoscaler_scale_down_removes_least_busy_worker(service: Scaled) -> None:
    await service.scale("prefill", 3)
    await service.settle()
    service.see(3, 1, demand_prompt=500.0, prefill_speed=1000.0, first_token=0.1)
    pods = (await service.cluster.admin.get(path("v1", "Pod", "models"))).json()["items"]
    workers = [
        one["metadata"]["name"] for one in pods if f"{service.name}-prefill" in one["metadata"]["name"]
    ]
    service.prometheus.running = {name: float(number) for number, name in enumerate(workers)}
    for _ in range(18):
        await service.look()
    assert (await service.wanted("prefill"))[0] == 3
    for _ in range(2):
        await service.look()
    assert (await service.wanted("prefill"))[0] == 2
    pods = (await service.cluster.admin.get(path("v1", "Pod", "models"))).json()["items"]
    costs = {
        one["metadata"]["name"]: one["metadata"].get("annotations", {}).get(COST)
        for one in pods
        if one["metadata"]["name"] in workers
    }
    assert costs == {name: str(number) for number, name in enumerate(workers)}


async def test_autoscaler_external_mode_only_publishes_advice(service: Scaled) -> None:
    await service.cluster.put(
        {**SPEC, "autoscaling": {"mode": "External", "prometheus": {"url": URL}}}, service.name
    )
    await service.settle()
    service.see(1, 1, demand_prompt=3000.0, prefill_speed=1000.0, in_flight=2.0)
    await service.look()
    replicas, scaling = await service.wanted("prefill")
    assert (replicas, scaling["recommended"]) == (1, 4)
    assert service.gauge(metrics.AUTOSCALER_DESIRED.name) == [4]
    assert service.events == []


async def test_autoscaler_operator_restart_keeps_learned_capacity(service: Scaled) -> None:
    service.see(1, 1, demand_prompt=500.0, prefill_speed=1000.0, in_flight=1.0, first_token=0.1)
    await service.look()
    another = Scaled(service.cluster, service.listed, service.inside, service.name)
    another.see(1, 1, demand_prompt=500.0, in_flight=1.0, first_token=0.1)
    await another.look()
    assert another.gauge(metrics.AUTOSCALER_CAPACITY.name) == [1000.0]


async def test_autoscaler_profile_gives_capacity_before_measurements(service: Scaled) -> None:
    profile = {"configMapName": "measured"}
    autoscaling = {**SPEC["autoscaling"], "profile": profile}
    objectives = {"timeToFirstToken": "5s", "interTokenLatency": "100ms"}
    await service.cluster.put({**SPEC, "autoscaling": autoscaling, "objectives": objectives}, service.name)
    await service.settle()
    service.see(1, 1, demand_prompt=2000.0, in_flight=1.0, first_token=0.1)
    await service.look()
    await service.look()
    assert [one.split(".")[0] for one in service.events] == ["The ConfigMap measured does not exist"]
    assert not service.gauge(metrics.AUTOSCALER_CAPACITY.name)
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "measured", "namespace": "models"},
        "data": {"profile.json": msgspec.json.encode(PROFILE).decode()},
    }
    created = await service.cluster.admin.post(path("v1", "ConfigMap", "models"), json=body)
    created.raise_for_status()
    await service.look()
    capacity = PROFILE.capacity.prefill_tokens_per_s
    assert service.gauge(metrics.AUTOSCALER_CAPACITY.name) == [pytest.approx(capacity)]
    for _ in range(2):
        await service.look()
    needed = math.ceil(2000.0 / (HEADROOM * capacity))
    wanted, scaling = await service.wanted("prefill")
    assert wanted == needed > 1
    assert scaling["bound"] == "TimeToFirstToken"
    assert "(TimeToFirstToken)" in service.events[-1]
    assert "capacity" not in scaling, "nothing was learned yet"
    await service.settle()
    for _ in range(ENOUGH_SAMPLES + 5):
        service.see(wanted, 1, demand_prompt=2000.0, in_flight=1.0, first_token=0.1, prefill_speed=5000.0)
        await service.look()
    (later,) = service.gauge(metrics.AUTOSCALER_CAPACITY.name)
    assert capacity < later < 500 / PREFILL.seconds(500, 500) < 5000, "the profile's line counts all the time"


async def test_autoscaler_disabled_service_queries_no_metrics(service: Scaled) -> None:
    await service.cluster.put(
        {**SPEC, "prefill": {}, "decode": {}, "autoscaling": {"mode": "Disabled"}}, service.name
    )
    assert await service.look() is None
    assert service.prometheus.queried == []
