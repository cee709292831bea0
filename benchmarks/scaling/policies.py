"""Who decides: the operator's own decisions, or nobody. An HPA is in `hpa`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton_operator.rollout import RoleName
from baton_operator.scaling.observation import Decision, Memory, Policy
from baton_operator.scaling.service import Role, decide_all
from baton_operator.scaling.signals import Pods, observed
from benchmarks.scaling.case import ITL_S, MOST, ROLES, STARTUP_S, TTFT_S, peak
from benchmarks.scaling.day import MINUTE
from benchmarks.scaling.hpa import Hpa
from benchmarks.scaling.world import Scaler, Sight


class Baton:
    """The operator's decisions, each of which is said. What a worker can do it has to learn."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._policies: dict[RoleName, Policy] = {
            "prefill": Policy(least=0, most=MOST, objective_s=TTFT_S, queue_s=TTFT_S),
            "decode": Policy(least=0, most=MOST, objective_s=ITL_S),
        }
        self._memories = {name: Memory.new(0.0, startup_s=STARTUP_S) for name in ROLES}
        self._say = say

    def wanted(self, seen: Sight) -> dict[RoleName, int]:
        roles: dict[RoleName, Role] = {}
        for name, policy in self._policies.items():
            ready = sum(pod.ready_s is not None for pod in seen.pods[name])
            pods = Pods(replicas=len(seen.pods[name]), ready=ready, routers=1)
            observation = observed(name, seen.figures, pods, policy.objective_s)
            roles[name] = Role(policy, self._memories[name], observation)
        made = decide_all(roles, _all, seen.now)
        for name, (decision, memory) in made.items():
            self._memories[name] = memory
            before = roles[name].seen
            if decision.replicas != before.replicas:
                known = f"{before.demand.value or 0:.0f} tokens/s by {memory.capacity.value or 0:.0f}"
                what = f"{name:7} -> {decision.replicas}  {decision.reason}: {decision.message} ({known})"
                self._say(f"  {seen.now / MINUTE:5.1f} min {what}")
        return {name: decision.replicas for name, (decision, _) in made.items()}


@dataclass(frozen=True, slots=True)
class Static:
    """As many as the highest load of each role needs, always."""

    counts: Mapping[RoleName, int]

    def wanted(self, seen: Sight) -> Mapping[RoleName, int]:
        return self.counts


def _all(decisions: Mapping[RoleName, Decision]) -> dict[RoleName, int]:
    """Accelerators for whoever wishes for one."""
    return {name: one.replicas for name, one in decisions.items()}


POLICIES: Mapping[str, Callable[[], Scaler]] = {
    "baton": lambda: Baton(print),
    "hpa": Hpa,
    "static": lambda: Static(peak()),
}


def first(kind: str) -> Mapping[RoleName, int]:
    """Workers that are there when the load begins."""
    return peak() if kind == "static" else dict.fromkeys(ROLES, 1)
