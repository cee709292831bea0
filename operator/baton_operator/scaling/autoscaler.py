"""
The autoscaler: it samples a service, decides for both roles, and writes the replicas of their RoleScalers.

Only the reconciler copies them to Deployments, so rollouts keep them. With mode External the autoscaler
writes no replicas but publishes its decisions. The status of a RoleScaler stores capacity and start-up time
for the next operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from baton_api.errors import SetupError
from baton_api.profiles import Profile
from baton_operator import names
from baton_operator.cluster.api_server import ApiServer
from baton_operator.cluster.state import ClusterReader, Pod
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.part import Duration
from baton_operator.kinds.service_policies import ProfileSource
from baton_operator.manifests.conditions import Fact, Transition, updated, written
from baton_operator.manifests.objects import Manifest, timestamp
from baton_operator.reconcilers.reconciler import ReportTransition
from baton_operator.rollout.decision import RoleName
from baton_operator.scaling import engine_slots, role_scalers, sizing
from baton_operator.scaling.budget import GpuBudget, GpuDemand, allocate, gpus, holder, of_role
from baton_operator.scaling.decision import DecisionAndMemory, capacity
from baton_operator.scaling.history import CapacityEstimate, StartupTimes
from baton_operator.scaling.metrics import RoleDecision, ScalingMetrics, ServiceName
from baton_operator.scaling.prometheus import (
    METRIC_LABEL,
    MetricsClient,
    MetricsLost,
    MetricsQuery,
    held_requests,
)
from baton_operator.scaling.roles import ScaledRole, ScalingSettings, decide_all, policy_of
from baton_operator.scaling.sample import STARTUP_S, RoleMemory, ScalingDecision, WorkerSize
from baton_operator.scaling.signals import RolePods, ServiceMetrics, role_sample

SLEEP_INTERVAL_S = 2.0
"""Seconds between two checks of a service at zero. Its first request waits for as long."""

PENDING = "Unschedulable"

COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation of pods: a Deployment removes the pod with the lowest cost first."""


@dataclass(slots=True)
class ServiceMemory:
    """Memory of one service between two reconciliations."""

    revision: str = ""
    memories: dict[RoleName, RoleMemory] = field(default_factory=dict)
    startups: dict[RoleName, StartupTimes] = field(default_factory=dict)
    profile_error: str = ""
    """Last reported error of its profile."""
    profile: Profile | None = None
    profile_source: ProfileSource | None = None
    """Source of the profile."""
    reread_at: float = 0.0
    requests: sizing.LearnedRequests = field(default_factory=sizing.LearnedRequests)


class Autoscaler:
    """The reconciler of the queue keys of kind Scaling. `clock` returns Unix seconds."""

    def __init__(
        self,
        api: ApiServer,
        reader: ClusterReader,
        prometheus: MetricsClient,
        own: ScalingSettings,
        report: ReportTransition,
        scaling_metrics: ScalingMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._api = api
        self._reader = reader
        self._prometheus = prometheus
        self._own = own
        self._report = report
        self._scaling_metrics = scaling_metrics
        self._clock = clock
        self._memory_of: dict[ServiceName, ServiceMemory] = {}
        self._budget = GpuBudget(own.gpu_budget, reader)

    async def reconcile(self, namespace: str, name: str) -> float | None:
        service = self._reader.service(namespace, name)
        spec = _scaled(service) if service is not None else None
        if service is None or spec is None:
            self._memory_of.pop((namespace, name), None)
            self._budget.forget((namespace, name))
            self._scaling_metrics.forget((namespace, name))
            return None
        interval = spec.autoscaling.interval.seconds
        scalers: dict[RoleName, Manifest] = {}
        for role, wanted in role_scalers.roles(spec).items():
            if wanted.scaling is None:
                continue
            scaler = self._reader.scaler(namespace, name, role)
            if scaler is not None:
                scalers[role] = scaler
        if not scalers:
            return interval
        pods = self._reader.pods(namespace, name)
        awake = len(role_scalers.roles(spec)) > len(scalers)
        asleep = not awake and all(one["spec"]["replicas"] == 0 for one in scalers.values())
        try:
            await self._scale(service, spec, scalers, pods, asleep=asleep)
        finally:
            self._budget.written((namespace, name))
        return min(interval, SLEEP_INTERVAL_S) if asleep else interval

    async def _scale(
        self,
        service: Manifest,
        spec: InferenceServiceSpec,
        scalers: Mapping[RoleName, Manifest],
        pods: Sequence[Pod],
        *,
        asleep: bool,
    ) -> None:
        metadata = service["metadata"]
        key: ServiceName = (metadata["namespace"], metadata["name"])
        now = self._clock()
        service_memory = self._memory_of.setdefault(key, ServiceMemory())
        _carry_over_capacity(service_memory, service)
        slots = engine_slots.decode_slots(spec)
        query = MetricsQuery(*key, spec.objectives.percentile, self._own.window_s, slots)
        metrics = await self._sleeping(pods) if asleep else await self._measured(spec, query)
        memories = {name: _memory(service_memory, name, one, pods, now) for name, one in scalers.items()}
        profile = await self._profile(service, spec, service_memory, now)
        sizes: Mapping[RoleName, WorkerSize] = {}
        if profile is not None:
            service_memory.requests = service_memory.requests.looked(profile, metrics, now)
            ahead_s = max(one.startup_s for one in memories.values())
            prefills = _prefill_replicas(spec, scalers)
            sizes = sizing.worker_sizes(profile, service_memory.requests, spec.objectives, ahead_s, prefills)
        roles: dict[RoleName, ScaledRole] = {}
        for name, scaler in scalers.items():
            policy = policy_of(spec, name)
            replicas = role_scalers.scaled(role_scalers.roles(spec)[name], scaler["spec"]["replicas"])
            role_pods = _role_pods(name, service, pods, replicas, now)
            sample = role_sample(name, metrics, role_pods, policy.objective_s, size=sizes.get(name))
            roles[name] = ScaledRole(policy, memories[name], sample)

        def grant(decisions: Mapping[RoleName, ScalingDecision]) -> Mapping[RoleName, int]:
            return self._allocate(key, spec, pods, roles, decisions, now)

        decided = decide_all(roles, grant, now)
        service_memory.memories = {name: memory for name, (_, memory) in decided.items()}
        published = {
            name: RoleDecision(roles[name].sample, one, capacity(memory, roles[name].sample))
            for name, (one, memory) in decided.items()
        }
        self._scaling_metrics.decided(key, published, measured=not metrics.lost)
        await self._write_decisions(
            service, spec, query, pods=pods, scalers=scalers, decided=decided, now=now
        )

    async def _write_decisions(
        self,
        service: Manifest,
        spec: InferenceServiceSpec,
        query: MetricsQuery,
        pods: Sequence[Pod],
        scalers: Mapping[RoleName, Manifest],
        decided: Mapping[RoleName, DecisionAndMemory],
        now: float,
    ) -> None:
        """Write replicas, with mode Internal, and status of the RoleScalers."""
        costs_set = False
        for name, (decision, memory) in decided.items():
            scaler = scalers[name]
            before = scaler["spec"]["replicas"]
            if spec.autoscaling.mode == "Internal" and decision.replicas != before:
                if decision.replicas < before and not costs_set:
                    costs_set = True
                    await self._set_deletion_costs(spec, query, pods)
                await self._write_replicas(service, scaler, name, decision)
            await self._write_status(scaler, decision, memory, now)

    async def _profile(
        self, service: Manifest, spec: InferenceServiceSpec, service_memory: ServiceMemory, now: float
    ) -> Profile | None:
        """Return the profile of the service; None if it has no readable one."""
        source = spec.autoscaling.profile
        if source == service_memory.profile_source and now < service_memory.reread_at:
            return service_memory.profile
        service_memory.profile_source, service_memory.profile, profile_error = source, None, ""
        try:
            if source is not None:
                namespace = service["metadata"]["namespace"]
                service_memory.profile = await sizing.read_profile(self._api, namespace, source)
                service_memory.reread_at = now + sizing.REREAD_S
        except SetupError as error:
            profile_error = error.message
        if profile_error and profile_error != service_memory.profile_error:
            fact = Fact("ProfileRead", False, "ProfileUnusable", profile_error[:1024])
            self._report(service, Transition(fact, warning=True))
        service_memory.profile_error = profile_error
        return service_memory.profile

    async def _measured(self, spec: InferenceServiceSpec, query: MetricsQuery) -> ServiceMetrics:
        try:
            return ServiceMetrics(await self._prometheus.query(self._url(spec), query.text, METRIC_LABEL))
        except MetricsLost as lost:
            return ServiceMetrics({}, str(lost))

    async def _sleeping(self, pods: Sequence[Pod]) -> ServiceMetrics:
        """Return the metrics of a service at zero: only the requests that routers hold."""
        routers = _routers(pods)
        held = await held_requests(
            [f"http://{_host(pod.address)}:{names.ROUTER_METRICS_PORT}" for pod in routers]
        )
        if held.value is None:
            return ServiceMetrics({}, held.why)
        zeros = ("demand_prompt", "demand_answer", "queued_prompt", "in_flight", "waiting", "age")
        return ServiceMetrics({**dict.fromkeys(zeros, 0.0), "routers": len(routers), "held": held.value})

    def _url(self, spec: InferenceServiceSpec) -> str:
        named = spec.autoscaling.prometheus
        return named.url if named is not None else self._own.prometheus_url

    def _allocate(
        self,
        key: ServiceName,
        spec: InferenceServiceSpec,
        pods: Sequence[Pod],
        roles: Mapping[RoleName, ScaledRole],
        decisions: Mapping[RoleName, ScalingDecision],
        now: float,
    ) -> dict[RoleName, int]:
        demands: dict[RoleName, GpuDemand] = {}
        for name, role in role_scalers.roles(spec).items():
            current = roles[name].sample.replicas if name in roles else (role.replicas or 0)
            requested = decisions[name].replicas if name in decisions else current
            pressure = decisions[name].pressure if name in decisions else 0.0
            pods_of_it = len(of_role(name, pods))
            demands[name] = GpuDemand(holder(key, name), gpus(role), current, pods_of_it, requested, pressure)
        allowed = {one.holder: one.requested for one in demands.values()}
        if spec.autoscaling.gpu_budget is not None:
            allowed |= allocate(demands.values(), spec.autoscaling.gpu_budget)
        bounded = [replace(one, requested=allowed[one.holder]) for one in demands.values()]
        until = now + 3 * spec.autoscaling.interval.seconds
        allowed = dict(self._budget.grant(key, bounded, now, until))
        return {name: allowed[demands[name].holder] for name in decisions}

    async def _set_deletion_costs(
        self, spec: InferenceServiceSpec, query: MetricsQuery, pods: Sequence[Pod]
    ) -> None:
        """Make Kubernetes remove the least busy worker. Without metrics it removes the youngest."""
        try:
            running = await self._prometheus.query(self._url(spec), query.running, "pod")
        except MetricsLost:
            return
        for pod in pods:
            if pod.name not in running or pod.terminating:
                continue
            cost = {"metadata": {"annotations": {COST: f"{running[pod.name]:.0f}"}}}
            await self._api.merge("v1", "Pod", query.namespace, pod.name, cost)

    async def _write_replicas(
        self, service: Manifest, scaler: Manifest, name: RoleName, decision: ScalingDecision
    ) -> None:
        metadata = scaler["metadata"]
        before = scaler["spec"]["replicas"]
        body = {
            # A concurrent change makes the write fail with 409, and the key is retried.
            "metadata": {"resourceVersion": metadata["resourceVersion"]},
            "spec": {"replicas": decision.replicas},
        }
        await self._api.merge(
            role_scalers.API, role_scalers.KIND, metadata["namespace"], metadata["name"], body
        )
        up = decision.replicas > before
        key = metadata["namespace"], service["metadata"]["name"]
        self._scaling_metrics.changed(key, name, "up" if up else "down")
        message = f"{name}: scaled from {before} to {decision.replicas} workers. {decision.message}"
        fact = Fact(f"{name.capitalize()}Scaled", True, "ScaledUp" if up else "ScaledDown", message)
        self._report(service, Transition(fact, warning=False))

    async def _write_status(
        self, scaler: Manifest, decision: ScalingDecision, memory: RoleMemory, now: float
    ) -> None:
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
        same = all(scaling.get(one) == value for one, value in status.items() if one != "capacity")
        same = same and all(shown.get(one.type) == (one.status, one.reason) for one in facts)
        if same and _near(scaling.get("capacity"), status.get("capacity")):
            return  # messages contain changing numbers, so they are written only with other changes
        if decision.replicas != scaler["spec"]["replicas"]:
            status["lastScaleTime"] = timestamp(now)
        conditions, _ = written(facts, known, scaler["metadata"].get("generation", 0), now)
        await self._api.write_status(scaler, {"scaling": status, "conditions": updated(known, conditions)})


def _scaled(service: Manifest) -> InferenceServiceSpec | None:
    """Return the spec of a service that is scaled, otherwise None."""
    try:
        spec = InferenceServiceSpec.model_validate(service["spec"])
    except ValidationError:
        return None  # the InferenceService reconciler reports it
    return None if spec.autoscaling.mode == "Disabled" or spec.suspend else spec


def _carry_over_capacity(service_memory: ServiceMemory, service: Manifest) -> None:
    """Use the capacity of the old revision as the seed of a new one."""
    revision = service.get("status", {}).get("currentRevision", "")
    if service_memory.revision and revision and revision != service_memory.revision:
        service_memory.memories = {
            name: replace(one, capacity=CapacityEstimate(seed=one.capacity.value))
            for name, one in service_memory.memories.items()
        }
    service_memory.revision = revision or service_memory.revision


def _restored(scaler: Manifest, now: float) -> RoleMemory:
    """Return the memory from the status that a previous operator wrote."""
    status = scaler.get("status", {}).get("scaling", {})
    startup = status.get("startupDuration")
    return RoleMemory.new(now, status.get("capacity"), Duration(startup).seconds if startup else STARTUP_S)


def _memory(
    service_memory: ServiceMemory, name: RoleName, scaler: Manifest, pods: Sequence[Pod], now: float
) -> RoleMemory:
    """Return the memory of a role, with the start-up times of its pods."""
    memory = service_memory.memories.get(name) or _restored(scaler, now)
    starts = service_memory.startups.setdefault(name, StartupTimes())
    starts.look(of_role(name, pods), now)
    return replace(memory, startup_s=starts.most_s or memory.startup_s)


def is_rolling_out(service: Manifest) -> bool:
    """
    Return whether a rollout is in progress.

    A failed revision was rolled back, and a waiting one has no workers. Both states may last for weeks, in
    which the serving revision scales as usual.
    """
    status = service.get("status", {})
    current = status.get("currentRevision", "")
    wanted = status.get("updateRevision", current)
    phases = {one["name"]: one["phase"] for one in status.get("revisions", ())}
    return bool(current) and current != wanted and phases.get(wanted) not in ("Failed", "Waiting", "Retired")


def _prefill_replicas(spec: InferenceServiceSpec, scalers: Mapping[RoleName, Manifest]) -> int | None:
    """Return the desired prefill workers; None without such a role."""
    if "prefill" in scalers:
        replicas: int = scalers["prefill"]["spec"]["replicas"]
        return replicas
    return None if spec.prefill is None else spec.prefill.replicas or 0


def _role_pods(name: RoleName, service: Manifest, pods: Sequence[Pod], replicas: int, now: float) -> RolePods:
    workers = of_role(name, pods)
    return RolePods(
        replicas=replicas,
        ready=sum(pod.ready and not pod.terminating for pod in workers),
        routers=len(_routers(pods)),
        pending_s=max((now - pod.created for pod in workers if PENDING in pod.trouble), default=0.0),
        rolling=is_rolling_out(service),
    )


def _routers(pods: Sequence[Pod]) -> list[Pod]:
    return [pod for pod in pods if pod.role == names.ROUTER and pod.ready and not pod.terminating]


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _near(before: float | None, now: float | None) -> bool:
    """Whether a new figure is not worth a write."""
    if before is None or now is None:
        return now is None
    return abs(now - before) <= 0.1 * before
