"""
The loop around the decisions: one service looked at, both roles decided, and what changes written down.

Numbers are written into RoleScalers, and by nobody else's hand into Deployments, so that a rollout never
forgets them. With mode External nothing is written: what would be is published, for whoever scales. What a
role can do and how long it takes to start are kept in its RoleScaler's status, for the next operator.
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
from baton_operator.kinds.renames import with_new_names
from baton_operator.kinds.role_scaler import ScalingStatus
from baton_operator.kinds.service_policies import ProfileSource
from baton_operator.manifests.conditions import Fact, Transition
from baton_operator.manifests.objects import Manifest, timestamp
from baton_operator.reconcilers.reconciler import ReportTransition
from baton_operator.rollout.decision import RoleName
from baton_operator.scaling import role_scalers, sizing
from baton_operator.scaling.budget import GpuBudget, GpuDemand, allocate, gpus, holder, of_role
from baton_operator.scaling.decision import capacity
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
"""Between two looks at a service that sleeps: its first request waits for as long."""

PENDING = "Unschedulable"

COST = "controller.kubernetes.io/pod-deletion-cost"
"""Of several workers Kubernetes ends the one with the least."""


@dataclass(slots=True)
class ServiceMemory:
    """What is remembered of one service between two looks."""

    revision: str = ""
    memories: dict[RoleName, RoleMemory] = field(default_factory=dict)
    startups: dict[RoleName, StartupTimes] = field(default_factory=dict)
    complaint: str = ""
    """What is wrong with its profile, as it was told."""
    profile: Profile | None = None
    profile_source: ProfileSource | None = None
    """From where it was read."""
    reread_at: float = 0.0
    requests: sizing.LearnedRequests = field(default_factory=sizing.LearnedRequests)


class Autoscaler:
    """The reconciler of the kind Scaling. `clock` gives Unix seconds."""

    def __init__(
        self,
        api: ApiServer,
        reader: ClusterReader,
        metrics: MetricsClient,
        own: ScalingSettings,
        tell: ReportTransition,
        figures: ScalingMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._api = api
        self._reader = reader
        self._metrics = metrics
        self._own = own
        self._tell = tell
        self._figures = figures
        self._clock = clock
        self._known: dict[ServiceName, ServiceMemory] = {}
        self._budget = GpuBudget(own.gpu_budget, reader)

    async def reconcile(self, namespace: str, name: str) -> float | None:
        service = self._reader.service(namespace, name)
        spec = _scaled(service) if service is not None else None
        if service is None or spec is None:
            self._known.pop((namespace, name), None)
            self._budget.forget((namespace, name))
            self._figures.forget((namespace, name))
            return None
        interval = spec.autoscaling.interval.seconds
        bound: dict[RoleName, Manifest] = {}
        for role, wanted in role_scalers.roles(spec).items():
            if wanted.scaling is None:
                continue
            there = self._reader.scaler(namespace, name, role)
            if there is not None:
                bound[role] = there
        if not bound:
            return interval
        pods = self._reader.pods(namespace, name)
        awake = len(role_scalers.roles(spec)) > len(bound)
        asleep = not awake and all(one["spec"]["replicas"] == 0 for one in bound.values())
        try:
            await self._look(service, spec, bound, pods, asleep=asleep)
        finally:
            self._budget.written((namespace, name))
        return min(interval, SLEEP_INTERVAL_S) if asleep else interval

    async def _look(
        self,
        service: Manifest,
        spec: InferenceServiceSpec,
        bound: Mapping[RoleName, Manifest],
        pods: Sequence[Pod],
        *,
        asleep: bool,
    ) -> None:
        metadata = service["metadata"]
        key: ServiceName = (metadata["namespace"], metadata["name"])
        now = self._clock()
        known = self._known.setdefault(key, ServiceMemory())
        _learn_generation(known, service)
        question = MetricsQuery(*key, spec.objectives.percentile, self._own.window_s)
        figures = await self._asleep(pods) if asleep else await self._asked(spec, question)
        memories = {name: _memory(known, name, one, pods, now) for name, one in bound.items()}
        profile = await self._profile(service, spec, known, now)
        sized: Mapping[RoleName, WorkerSize] = {}
        if profile is not None:
            known.requests = known.requests.looked(profile, figures, now)
            ahead_s = max(one.startup_s for one in memories.values())
            prefills = None if spec.prefill is None else spec.prefill.replicas or 0
            if "prefill" in bound:
                prefills = bound["prefill"]["spec"]["replicas"]
            sized = sizing.worker_sizes(profile, known.requests, spec.objectives, ahead_s, prefills)
        roles: dict[RoleName, ScaledRole] = {}
        for name, scaler in bound.items():
            workers = of_role(name, pods)
            policy = policy_of(spec, name)
            there = RolePods(
                replicas=role_scalers.scaled(role_scalers.roles(spec)[name], scaler["spec"]["replicas"]),
                ready=sum(pod.ready and not pod.terminating for pod in workers),
                routers=len(_routers(pods)),
                pending_s=max((now - pod.created for pod in workers if PENDING in pod.trouble), default=0.0),
                rolling=rolls(service),
            )
            seen = role_sample(name, figures, there, policy.objective_s, size=sized.get(name))
            roles[name] = ScaledRole(policy, memories[name], seen)

        def grant(decisions: Mapping[RoleName, ScalingDecision]) -> Mapping[RoleName, int]:
            return self._grant(key, spec, pods, roles, decisions, now)

        made = decide_all(roles, grant, now)
        known.memories = {name: memory for name, (_, memory) in made.items()}
        self._figures.decided(
            key,
            {
                name: RoleDecision(roles[name].sample, one, capacity(memory, roles[name].sample))
                for name, (one, memory) in made.items()
            },
            measured=not figures.lost,
        )
        costs = False
        for name, (decision, memory) in made.items():
            scaler = bound[name]
            before = scaler["spec"]["replicas"]
            if spec.autoscaling.mode == "Internal" and decision.replicas != before:
                if decision.replicas < before and not costs:
                    costs = True
                    await self._weigh(spec, question, pods)
                await self._write(service, scaler, name, decision)
            await self._say(scaler, decision, memory, now)

    async def _profile(
        self, service: Manifest, spec: InferenceServiceSpec, known: ServiceMemory, now: float
    ) -> Profile | None:
        """What the service's profile says of its workers; None if it has none that can be read."""
        source = spec.autoscaling.profile
        if source == known.profile_source and now < known.reread_at:
            return known.profile
        known.profile_source, known.profile, complaint = source, None, ""
        try:
            if source is not None:
                namespace = service["metadata"]["namespace"]
                known.profile = await sizing.read_profile(self._api, namespace, source)
                known.reread_at = now + sizing.REREAD_S
        except SetupError as error:
            complaint = error.message
        if complaint and complaint != known.complaint:
            fact = Fact("ProfileRead", False, "ProfileUnusable", complaint[:1024])
            self._tell(service, Transition(fact, warning=True))
        known.complaint = complaint
        return known.profile

    async def _asked(self, spec: InferenceServiceSpec, question: MetricsQuery) -> ServiceMetrics:
        try:
            return ServiceMetrics(await self._metrics.ask(self._url(spec), question.text, METRIC_LABEL))
        except MetricsLost as lost:
            return ServiceMetrics({}, str(lost))

    async def _asleep(self, pods: Sequence[Pod]) -> ServiceMetrics:
        """Nobody works, so that all there is to know is who waits, and routers know that."""
        there = _routers(pods)
        held = await held_requests([f"http://{_host(pod.address)}:{names.ROUTER_PORT}" for pod in there])
        if held.value is None:
            return ServiceMetrics({}, held.why)
        nothing = ("demand_prompt", "demand_answer", "queued_prompt", "in_flight", "waiting", "age")
        return ServiceMetrics({**dict.fromkeys(nothing, 0.0), "routers": len(there), "held": held.value})

    def _url(self, spec: InferenceServiceSpec) -> str:
        named = spec.autoscaling.prometheus
        return named.url if named is not None else self._own.prometheus_url

    def _grant(
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
            there = roles[name].sample.replicas if name in roles else (role.replicas or 0)
            requested = decisions[name].replicas if name in decisions else there
            pressure = decisions[name].pressure if name in decisions else 0.0
            pods_of_it = len(of_role(name, pods))
            demands[name] = GpuDemand(holder(key, name), gpus(role), there, pods_of_it, requested, pressure)
        allowed = {one.holder: one.requested for one in demands.values()}
        if spec.autoscaling.gpu_budget is not None:
            allowed |= allocate(demands.values(), spec.autoscaling.gpu_budget)
        bounded = [replace(one, requested=allowed[one.holder]) for one in demands.values()]
        until = now + 3 * spec.autoscaling.interval.seconds
        allowed = dict(self._budget.grant(key, bounded, now, until))
        return {name: allowed[demands[name].holder] for name in decisions}

    async def _weigh(self, spec: InferenceServiceSpec, question: MetricsQuery, pods: Sequence[Pod]) -> None:
        """Have the worker go that has least to do. Without metrics Kubernetes takes the youngest."""
        try:
            running = await self._metrics.ask(self._url(spec), question.running, "pod")
        except MetricsLost:
            return
        for pod in pods:
            if pod.name not in running or pod.terminating:
                continue
            cost = {"metadata": {"annotations": {COST: f"{running[pod.name]:.0f}"}}}
            await self._api.merge("v1", "Pod", question.namespace, pod.name, cost)

    async def _write(
        self, service: Manifest, scaler: Manifest, name: RoleName, decision: ScalingDecision
    ) -> None:
        metadata = scaler["metadata"]
        before = scaler["spec"]["replicas"]
        body = {
            # Whoever has written it in the meantime is not written over: it is looked at again.
            "metadata": {"resourceVersion": metadata["resourceVersion"]},
            "spec": {"replicas": decision.replicas},
        }
        await self._api.merge(
            role_scalers.API, role_scalers.KIND, metadata["namespace"], metadata["name"], body
        )
        up = decision.replicas > before
        key = metadata["namespace"], service["metadata"]["name"]
        self._figures.changed(key, name, "up" if up else "down")
        message = f"{name}: from {before} to {decision.replicas} workers. {decision.message}"
        fact = Fact(f"{name.capitalize()}Scaled", True, "ScaledUp" if up else "ScaledDown", message)
        self._tell(service, Transition(fact, warning=False))

    async def _say(self, scaler: Manifest, decision: ScalingDecision, memory: RoleMemory, now: float) -> None:
        before: dict[str, Any] = scaler.get("status", {}).get("scaling", {})
        status: dict[str, Any] = {
            "recommended": decision.replicas,
            "reason": decision.reason,
            "source": decision.source,
            "limited": decision.limited,
            "bound": decision.bound,
        }
        if memory.capacity.learnt:
            status["capacity"] = float(f"{memory.capacity.value or 0.0:.3g}")
        if memory.startup_s != STARTUP_S:
            status["startupDuration"] = Duration(max(1, round(memory.startup_s)))
        status |= {name: None for name in ScalingStatus.renamed_fields if name in before}
        same = all(before.get(one) == value for one, value in status.items() if one not in ("capacity",))
        if same and _near(before.get("capacity"), status.get("capacity")):
            return
        # What it says in words has numbers in it, which always change: it is said anew with the rest.
        status["message"] = decision.message[:1024]
        if decision.replicas != scaler["spec"]["replicas"]:
            status["lastScaleTime"] = timestamp(now)
        await self._api.write_status(scaler, {"scaling": status})


def _scaled(service: Manifest) -> InferenceServiceSpec | None:
    """The spec, if it is one of a service that is scaled."""
    try:
        spec = InferenceServiceSpec.model_validate(service["spec"])
    except ValidationError:
        return None  # the service's own reconciler says so
    return None if spec.autoscaling.mode == "Disabled" or spec.suspend else spec


def _learn_generation(known: ServiceMemory, service: Manifest) -> None:
    """What was learned of one revision is where the next one begins."""
    revision = service.get("status", {}).get("currentRevision", "")
    if known.revision and revision and revision != known.revision:
        known.memories = {
            name: replace(one, capacity=CapacityEstimate(seed=one.capacity.value))
            for name, one in known.memories.items()
        }
    known.revision = revision or known.revision


def _remembered(scaler: Manifest, now: float) -> RoleMemory:
    """As another operator has left it."""
    noted = with_new_names(ScalingStatus, scaler.get("status", {}).get("scaling", {}))
    startup = noted.get("startupDuration")
    return RoleMemory.new(now, noted.get("capacity"), Duration(startup).seconds if startup else STARTUP_S)


def _memory(
    known: ServiceMemory, name: RoleName, scaler: Manifest, pods: Sequence[Pod], now: float
) -> RoleMemory:
    """What is remembered of a role, with the starts of its pods."""
    memory = known.memories.get(name) or _remembered(scaler, now)
    starts = known.startups.setdefault(name, StartupTimes())
    starts.look(of_role(name, pods), now)
    return replace(memory, startup_s=starts.most_s or memory.startup_s)


def rolls(service: Manifest) -> bool:
    """
    Whether one revision is giving way to another.

    A revision that failed was taken back, and one that waits has no workers. Either may last for weeks,
    in which the revision that serves is scaled as ever.
    """
    status = service.get("status", {})
    current = status.get("currentRevision", "")
    wanted = status.get("updateRevision", current)
    phases = {one["name"]: one["phase"] for one in status.get("revisions", ())}
    return bool(current) and current != wanted and phases.get(wanted) not in ("Failed", "Waiting", "Retired")


def _routers(pods: Sequence[Pod]) -> list[Pod]:
    return [pod for pod in pods if pod.role == names.ROUTER and pod.ready and not pod.terminating]


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _near(before: float | None, now: float | None) -> bool:
    """Whether a new figure is not worth a write."""
    if before is None or now is None:
        return now is None
    return abs(now - before) <= 0.1 * before
