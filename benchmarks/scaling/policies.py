"""Policies: the operator's decisions, or a fixed number of workers. `hpa` has an HPA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton_api.profiles import Profile
from baton_operator.kinds.part import Duration
from baton_operator.kinds.service_policies import Objectives
from baton_operator.rollout.decision import RoleName
from baton_operator.scaling import sizing
from baton_operator.scaling.decision import capacity
from baton_operator.scaling.roles import ScaledRole, decide_all
from baton_operator.scaling.sample import RoleMemory, ScalingDecision, ScalingPolicy, WorkerSize
from baton_operator.scaling.signals import RolePods, role_sample
from benchmarks.scaling.case import ITL_S, ROLES, TTFT_S, Case, peak, profile
from benchmarks.scaling.day import MINUTE
from benchmarks.scaling.hpa import Hpa
from benchmarks.scaling.world import Scaler, Sight

SLO = Objectives(time_to_first_token=Duration(TTFT_S), inter_token_latency=Duration(ITL_S))


class Baton:
    """The operator's decisions, which are printed. It learns the capacity of a worker, or has a profile."""

    def __init__(self, case: Case, say: Callable[[str], None], profile: Profile | None = None) -> None:
        self._profile = profile
        self._requests = sizing.LearnedRequests()
        self._startup_s = case.startup_s
        self._node_s = case.node_s
        self._policies: dict[RoleName, ScalingPolicy] = {
            "prefill": ScalingPolicy(least=0, most=case.most, objective_s=TTFT_S, queue_s=TTFT_S),
            "decode": ScalingPolicy(least=0, most=case.most, objective_s=ITL_S),
        }
        self._memories = {name: RoleMemory.new(0.0, startup_s=case.startup_s) for name in ROLES}
        self._say = say

    def wanted(self, sample: Sight) -> dict[RoleName, int]:
        roles: dict[RoleName, ScaledRole] = {}
        sized: Mapping[RoleName, WorkerSize] = {}
        if self._profile is not None:
            self._requests = self._requests.looked(self._profile, sample.metrics, sample.now)
            sized = sizing.worker_sizes(
                self._profile, self._requests, SLO, self._startup_s, len(sample.pods["prefill"])
            )
        for name, policy in self._policies.items():
            ready = sum(pod.ready_s is not None for pod in sample.pods[name])
            pods = RolePods(
                replicas=len(sample.pods[name]),
                ready=ready,
                routers=1,
                pending_s=self._pending_s(name, sample),
            )
            observation = role_sample(name, sample.metrics, pods, policy.objective_s, sized.get(name))
            roles[name] = ScaledRole(policy, self._memories[name], observation)
        decisions = decide_all(roles, _all, sample.now)
        for name, (decision, memory) in decisions.items():
            self._memories[name] = memory
            before = roles[name].sample
            if decision.replicas != before.replicas:
                demand = f"{before.demand.value or 0:.0f} tokens/s by {capacity(memory, before) or 0:.0f}"
                what = f"{name:7} -> {decision.replicas}  {decision.reason}: {decision.message} ({demand})"
                self._say(f"  {sample.now / MINUTE:5.1f} min {what}")
        return {name: decision.replicas for name, (decision, _) in decisions.items()}

    def _pending_s(self, name: RoleName, sample: Sight) -> float:
        """For how long the oldest pod has waited for a node."""
        waited = (sample.now - pod.started_s for pod in sample.pods[name] if pod.ready_s is None)
        return max((one for one in waited if one < self._node_s), default=0.0)


@dataclass(frozen=True, slots=True)
class Static:
    """As many as the highest load of each role needs, always."""

    counts: Mapping[RoleName, int]

    def wanted(self, sample: Sight) -> Mapping[RoleName, int]:
        return self.counts


def _all(decisions: Mapping[RoleName, ScalingDecision]) -> dict[RoleName, int]:
    """Grant all requested accelerators."""
    return {name: one.replicas for name, one in decisions.items()}


POLICIES: Mapping[str, Callable[[Case], Scaler]] = {
    "baton": lambda case: Baton(case, print),
    "baton-profile": lambda case: Baton(case, print, profile(case)),
    "hpa": lambda case: Hpa(case.most),
    "static": lambda case: Static(peak(case)),
}


def first(kind: str, case: Case) -> Mapping[RoleName, int]:
    """Return the workers at the start of the load."""
    return peak(case) if kind == "static" else dict.fromkeys(ROLES, 1)
