"""
The autoscaler: it samples a service, decides for both roles, and writes the replicas of their RoleScalers.

    reads     metrics from Prometheus, or from the routers of a service at zero; pods and RoleScalers
    decides   workers of each role: `decision.decide`, coupled by `roles.decide_all` within the GPU budget
    writes    replicas (not with mode External) and status of the RoleScalers; deletion costs of pods

Only the reconciler of InferenceServices copies replicas to Deployments, so rollouts keep them. The status of
a RoleScaler stores capacity and start-up time for the next operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from baton_api import metrics
from baton_api.errors import SetupError
from baton_api.metrics import Metric
from baton_api.profiles import Profile
from baton_operator import names
from baton_operator.cluster.api_server import ApiServer
from baton_operator.cluster.state import ClusterReader, Pod
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.part import Duration
from baton_operator.kinds.service_policies import ProfileSource
from baton_operator.kinds.worker_role import WorkerRole
from baton_operator.manifests.objects import (
    Fact,
    Manifest,
    ObjectName,
    ReportTransition,
    Transition,
    timestamp,
    updated,
    written,
)
from baton_operator.rollout.decision import RoleName
from baton_operator.scaling import roles, sizing
from baton_operator.scaling.budget import GpuBudget, GpuDemand, allocate, of_role
from baton_operator.scaling.decision import DecisionAndMemory, capacity
from baton_operator.scaling.history import CapacityEstimate, StartupTimes
from baton_operator.scaling.prometheus import (
    METRIC_LABEL,
    MetricsClient,
    MetricsLost,
    MetricsQuery,
    held_requests,
)
from baton_operator.scaling.roles import (
    ScaledRole,
    ScalingSettings,
    decide_all,
    desired_workers,
    policy_of,
    worker_roles,
)
from baton_operator.scaling.sample import STARTUP_S, RoleMemory, RoleSample, ScalingDecision, WorkerSize
from baton_operator.scaling.signals import RolePods, ServiceMetrics, role_sample

INPUTS = ("demand", "backlog", "latency", "first_token", "utilisation", "rate", "requests", "queued", "held")


@dataclass(frozen=True, slots=True)
class RoleDecision:
    """The last decision of a role, with its inputs."""

    sample: RoleSample
    decision: ScalingDecision
    capacity: float | None


class ScalingMetrics(Collector):
    """Metrics of all scaled services. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._decided: dict[ObjectName, Mapping[RoleName, RoleDecision]] = {}
        self._measured: dict[ObjectName, float] = {}
        self._changes: Counter[tuple[ObjectName, RoleName, str]] = Counter()

    def decided(self, service: ObjectName, roles: Mapping[RoleName, RoleDecision], *, measured: bool) -> None:
        """Record the decisions of a service. `measured`: whether Prometheus answered."""
        self._decided[service] = roles
        if measured or service not in self._measured:
            self._measured[service] = self._clock()

    def changed(self, service: ObjectName, role: RoleName, direction: str) -> None:
        """Count a change of replicas; `direction` is up or down."""
        self._changes[service, role, direction] += 1

    def forget(self, service: ObjectName) -> None:
        self._decided.pop(service, None)
        self._measured.pop(service, None)

    def collect(self) -> Iterator[Family]:
        now = self._clock()
        gauges = {
            metric.name: GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for metric in GAUGES
        }

        def put(metric: Metric, value: float, *labels: str) -> None:
            gauges[metric.name].add_metric(labels, value)

        for service, since in self._measured.items():
            put(metrics.AUTOSCALER_METRICS_AGE, now - since, *service)
        for service, decisions in self._decided.items():
            for role, scaled in decisions.items():
                of_role = (*service, role)
                put(metrics.AUTOSCALER_DESIRED, scaled.decision.replicas, *of_role)
                put(metrics.AUTOSCALER_RECOMMENDED, scaled.decision.raw, *of_role)
                put(metrics.AUTOSCALER_DECIDED_BY, 1, *of_role, scaled.decision.reason)
                if scaled.decision.raw < scaled.decision.replicas == scaled.sample.replicas:
                    put(metrics.AUTOSCALER_HELD, 1, *of_role, scaled.decision.reason)
                if scaled.capacity is not None:
                    put(metrics.AUTOSCALER_CAPACITY, scaled.capacity, *of_role)
                for name in INPUTS:
                    reading = getattr(scaled.sample, name)
                    put(metrics.AUTOSCALER_UNKNOWN, float(not reading.has_value), *of_role, name)
                    if reading.value is not None:
                        put(metrics.AUTOSCALER_INPUT, reading.value, *of_role, name)
        yield from gauges.values()
        metric = metrics.AUTOSCALER_DECISIONS
        changes = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        for (service, role, direction), count in self._changes.items():
            changes.add_metric((*service, role, direction), count)
        yield changes


GAUGES = (
    metrics.AUTOSCALER_METRICS_AGE,
    metrics.AUTOSCALER_DESIRED,
    metrics.AUTOSCALER_RECOMMENDED,
    metrics.AUTOSCALER_DECIDED_BY,
    metrics.AUTOSCALER_HELD,
    metrics.AUTOSCALER_CAPACITY,
    metrics.AUTOSCALER_UNKNOWN,
    metrics.AUTOSCALER_INPUT,
)


SLEEP_INTERVAL_S = 2.0
"""Seconds between two checks of a service at zero. Its first request waits for as long."""

PENDING = "Unschedulable"

COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation of pods: a Deployment removes the pod with the lowest cost first."""


@dataclass(slots=True)
class ServiceMemory:
    """Memory of one service between two reconciliations."""

    revision: str = ""
    roles: dict[RoleName, RoleMemory] = field(default_factory=dict)
    startups: dict[RoleName, StartupTimes] = field(default_factory=dict)
    profile_error: str = ""
    """Last reported error of its profile."""
    profile: Profile | None = None
    profile_source: ProfileSource | None = None
    """Source of the profile."""
    reread_at: float = 0.0
    requests: sizing.LearnedRequests = field(default_factory=sizing.LearnedRequests)

    def serves(self, revision: str) -> None:
        """Use the capacity of the old revision as the seed of a new one."""
        if self.revision and revision and revision != self.revision:
            self.roles = {
                name: replace(role, capacity=CapacityEstimate(seed=role.capacity.value))
                for name, role in self.roles.items()
            }
        self.revision = revision or self.revision

    def of_role(self, name: RoleName, scaler: Manifest, workers: Sequence[Pod], now: float) -> RoleMemory:
        """Return the memory of a role, with the start-up times of its pods."""
        memory = self.roles.get(name) or _restored(scaler, now)
        starts = self.startups.setdefault(name, StartupTimes())
        starts.look(workers, now)
        return replace(memory, startup_s=starts.most_s or memory.startup_s)


@dataclass(frozen=True, slots=True)
class ScaledService:
    """A service at one time."""

    manifest: Manifest
    spec: InferenceServiceSpec
    scalers: Mapping[RoleName, Manifest]
    """RoleScalers of the scaled roles."""
    pods: Sequence[Pod]
    now: float
    """Unix seconds."""

    @property
    def name(self) -> ObjectName:
        metadata = self.manifest["metadata"]
        return metadata["namespace"], metadata["name"]

    @property
    def roles(self) -> Mapping[RoleName, WorkerRole]:
        return worker_roles(self.spec)

    @property
    def asleep(self) -> bool:
        """Whether all of its roles are scaled to zero."""
        zero = all(scaler["spec"]["replicas"] == 0 for scaler in self.scalers.values())
        return zero and len(self.roles) == len(self.scalers)

    @property
    def routers(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.role == names.ROUTER and pod.ready and not pod.terminating]

    def replicas(self, name: RoleName) -> int:
        """Return the desired workers of a role."""
        return desired_workers(self.roles[name], self.scalers.get(name))

    def role_pods(self, name: RoleName) -> RolePods:
        workers = of_role(name, self.pods)
        return RolePods(
            replicas=self.replicas(name),
            ready=sum(pod.ready and not pod.terminating for pod in workers),
            routers=len(self.routers),
            pending_s=max((self.now - pod.created for pod in workers if PENDING in pod.trouble), default=0.0),
            rolling=is_rolling_out(self.manifest),
        )


@dataclass(slots=True)
class Autoscaler:
    """The reconciler of the queue keys of kind Scaling."""

    api: ApiServer
    reader: ClusterReader
    prometheus: MetricsClient
    own: ScalingSettings
    report: ReportTransition
    metrics: ScalingMetrics
    clock: Callable[[], float]
    """Returns Unix seconds."""
    _memory_of: dict[ObjectName, ServiceMemory] = field(default_factory=dict)
    _budget: GpuBudget = field(init=False)

    def __post_init__(self) -> None:
        self._budget = GpuBudget(self.own.gpu_budget, self.reader)

    async def reconcile(self, namespace: str, name: str) -> float | None:
        manifest = self.reader.cache.service(namespace, name)
        spec = InferenceServiceSpec.of(manifest)
        if manifest is None or spec is None or spec.autoscaling.mode == "Disabled" or spec.suspend:
            self._memory_of.pop((namespace, name), None)
            self._budget.forget((namespace, name))
            self.metrics.forget((namespace, name))
            return None
        scaled = [role for role, one in worker_roles(spec).items() if one.scaling is not None]
        scalers = {role: self.reader.scaler(namespace, name, role) for role in scaled}
        existing = {role: scaler for role, scaler in scalers.items() if scaler is not None}
        interval = spec.autoscaling.interval.seconds
        if not existing:
            return interval
        pods = self.reader.pods(namespace, name)
        service = ScaledService(manifest, spec, existing, pods, self.clock())
        try:
            await self._scale(service)
        finally:
            self._budget.written(service.name)
        return min(interval, SLEEP_INTERVAL_S) if service.asleep else interval

    async def _scale(self, service: ScaledService) -> None:
        spec, now = service.spec, service.now
        memory = self._memory_of.setdefault(service.name, ServiceMemory())
        memory.serves(service.manifest.get("status", {}).get("currentRevision", ""))
        metrics = await (self._sleeping(service) if service.asleep else self._measured(service))
        memories = {
            name: memory.of_role(name, scaler, of_role(name, service.pods), now)
            for name, scaler in service.scalers.items()
        }
        sizes: Mapping[RoleName, WorkerSize] = {}
        if profile := await self._profile(service, memory):
            memory.requests = memory.requests.looked(profile, metrics, now)
            ahead_s = max(one.startup_s for one in memories.values())
            prefills = service.replicas("prefill") if spec.prefill else None
            sizes = sizing.worker_sizes(profile, memory.requests, spec.objectives, ahead_s, prefills)
        roles: dict[RoleName, ScaledRole] = {}
        for name in memories:
            policy, pods = policy_of(spec, name), service.role_pods(name)
            sample = role_sample(name, metrics, pods, policy.objective_s, sizes.get(name))
            roles[name] = ScaledRole(policy, memories[name], sample)
        decided = decide_all(roles, partial(self._allocate, service), now)
        memory.roles = {name: one for name, (_, one) in decided.items()}
        published = {
            name: RoleDecision(roles[name].sample, decision, capacity(one, roles[name].sample))
            for name, (decision, one) in decided.items()
        }
        self.metrics.decided(service.name, published, measured=not metrics.lost)
        await self._write(service, decided)

    async def _write(self, service: ScaledService, decided: Mapping[RoleName, DecisionAndMemory]) -> None:
        """Write replicas, with mode Internal, and status of the RoleScalers."""
        costs_set = False
        for name, (decision, memory) in decided.items():
            before = service.scalers[name]["spec"]["replicas"]
            if service.spec.autoscaling.mode == "Internal" and decision.replicas != before:
                if decision.replicas < before and not costs_set:
                    costs_set = True
                    await self._set_deletion_costs(service)
                await self._write_replicas(service, name, decision)
            await self._write_status(service, name, decision, memory)

    async def _profile(self, service: ScaledService, memory: ServiceMemory) -> Profile | None:
        """Return the profile of the service; None if it has no readable one."""
        source = service.spec.autoscaling.profile
        if source == memory.profile_source and service.now < memory.reread_at:
            return memory.profile
        memory.profile_source, memory.profile, error_text = source, None, ""
        try:
            if source is not None:
                memory.profile = await sizing.read_profile(self.api, service.name[0], source)
                memory.reread_at = service.now + sizing.REREAD_S
        except SetupError as error:
            error_text = error.message
        if error_text and error_text != memory.profile_error:
            fact = Fact("ProfileRead", False, "ProfileUnusable", error_text[:1024])
            self.report(service.manifest, Transition(fact, warning=True))
        memory.profile_error = error_text
        return memory.profile

    def _query(self, service: ScaledService) -> MetricsQuery:
        slots = sizing.decode_slots(service.spec)
        return MetricsQuery(*service.name, service.spec.objectives.percentile, self.own.window_s, slots)

    async def _measured(self, service: ScaledService) -> ServiceMetrics:
        query = self._query(service).text
        try:
            return ServiceMetrics(await self.prometheus.query(self._url(service), query, METRIC_LABEL))
        except MetricsLost as lost:
            return ServiceMetrics({}, str(lost))

    async def _sleeping(self, service: ScaledService) -> ServiceMetrics:
        """Return the metrics of a service at zero: only the requests that routers hold."""
        routers = service.routers
        held = await held_requests(
            [f"http://{pod.host}:{names.ROUTER_METRICS_PORT}" for pod in routers],
        )
        if held.value is None:
            return ServiceMetrics({}, held.why)
        zeros = ("demand_prompt", "demand_answer", "queued_prompt", "in_flight", "waiting", "age")
        return ServiceMetrics({**dict.fromkeys(zeros, 0.0), "routers": len(routers), "held": held.value})

    def _url(self, service: ScaledService) -> str:
        named = service.spec.autoscaling.prometheus
        return named.url if named is not None else self.own.prometheus_url

    def _allocate(
        self, service: ScaledService, decisions: Mapping[RoleName, ScalingDecision]
    ) -> dict[RoleName, int]:
        wanted = service.spec.autoscaling
        demands: dict[RoleName, GpuDemand] = {}
        for name, role in service.roles.items():
            demand = GpuDemand.of(service.name, name, role, service.replicas(name), service.pods)
            if decision := decisions.get(name):
                demand = replace(demand, requested=decision.replicas, pressure=decision.pressure)
            demands[name] = demand
        if wanted.gpu_budget is not None:
            allowed = allocate(demands.values(), wanted.gpu_budget)
            demands = {name: replace(one, requested=allowed[one.holder]) for name, one in demands.items()}
        until = service.now + 3 * wanted.interval.seconds
        allowed = self._budget.grant(service.name, list(demands.values()), service.now, until)
        return {name: allowed[demands[name].holder] for name in decisions}

    async def _set_deletion_costs(self, service: ScaledService) -> None:
        """Make Kubernetes remove the least busy worker. Without metrics it removes the youngest."""
        try:
            running = await self.prometheus.query(self._url(service), self._query(service).running, "pod")
        except MetricsLost:
            return
        for pod in service.pods:
            if pod.name in running and not pod.terminating:
                cost = {"metadata": {"annotations": {COST: f"{running[pod.name]:.0f}"}}}
                await self.api.merge("v1", "Pod", service.name[0], pod.name, cost)

    async def _write_replicas(
        self, service: ScaledService, name: RoleName, decision: ScalingDecision
    ) -> None:
        metadata, before = service.scalers[name]["metadata"], service.scalers[name]["spec"]["replicas"]
        body = {
            # A concurrent change makes the write fail with 409, and the key is retried.
            "metadata": {"resourceVersion": metadata["resourceVersion"]},
            "spec": {"replicas": decision.replicas},
        }
        where = (roles.API, roles.KIND, metadata["namespace"], metadata["name"])
        await self.api.merge(*where, body)
        up = decision.replicas > before
        self.metrics.changed(service.name, name, "up" if up else "down")
        message = f"{name}: scaled from {before} to {decision.replicas} workers. {decision.message}"
        fact = Fact(f"{name.capitalize()}Scaled", True, "ScaledUp" if up else "ScaledDown", message)
        self.report(service.manifest, Transition(fact, warning=False))

    async def _write_status(
        self, service: ScaledService, name: RoleName, decision: ScalingDecision, memory: RoleMemory
    ) -> None:
        earlier, now = service.scalers[name], service.now
        # Read again: it has changed with its replicas, and the reconciler may have written its conditions.
        scaler = self.reader.scaler(*service.name, name) or earlier
        before: dict[str, Any] = scaler.get("status", {})
        status: dict[str, Any] = {"recommended": decision.replicas, "bound": decision.bound}
        if memory.capacity.learnt:
            status["capacity"] = float(f"{memory.capacity.value or 0.0:.3g}")
        if memory.startup_s != STARTUP_S:
            status["startupDuration"] = Duration(max(1, round(memory.startup_s)))
        limit = decision.limited or "NotLimited"
        facts = (
            Fact("ScalingActive", decision.source == "Measured", decision.reason, decision.message),
            Fact(
                "ScalingLimited", bool(decision.limited), limit, decision.message if decision.limited else ""
            ),
        )
        known = before.get("conditions", ())
        shown = {one["type"]: (one["status"], one["reason"]) for one in known}
        scaling = before.get("scaling", {})
        same = all(scaling.get(field) == value for field, value in status.items() if field != "capacity")
        same = same and all(shown.get(fact.type) == (fact.status, fact.reason) for fact in facts)
        if same and _near(scaling.get("capacity"), status.get("capacity")):
            return  # messages contain changing numbers, so they are written only with other changes
        if decision.replicas != earlier["spec"]["replicas"]:
            status["lastScaleTime"] = timestamp(now)
        conditions, _ = written(facts, known, scaler["metadata"].get("generation", 0), now)
        patch = {"scaling": status, "conditions": updated(known, conditions)}
        await self.api.write_status(scaler, patch, shared=True)


def _restored(scaler: Manifest, now: float) -> RoleMemory:
    """Return the memory from the status that a previous operator wrote."""
    status = scaler.get("status", {}).get("scaling", {})
    startup = status.get("startupDuration")
    return RoleMemory.new(now, status.get("capacity"), Duration(startup).seconds if startup else STARTUP_S)


def is_rolling_out(service: Manifest) -> bool:
    """Return whether a rollout is in progress. A failed revision was rolled back, and a waiting one has no
    workers. Both states may last for weeks, in which the serving revision scales as usual.
    """
    status = service.get("status", {})
    current = status.get("currentRevision", "")
    wanted = status.get("updateRevision", current)
    phases = {revision["name"]: revision["phase"] for revision in status.get("revisions", ())}
    return bool(current) and current != wanted and phases.get(wanted) not in ("Failed", "Waiting", "Retired")


def _near(before: float | None, now: float | None) -> bool:
    """Whether a new figure is not worth a write."""
    if before is None or now is None:
        return now is None
    return abs(now - before) <= 0.1 * before
