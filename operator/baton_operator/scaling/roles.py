"""
The scaling decisions of both roles of a service, and what couples them.

More prefill workers only lengthen the queue of full decode workers, so prefill does not grow then. Prefill
workers need at least one decode worker. And both share the GPU budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.rollout.decision import RoleName
from baton_operator.scaling import role_scalers
from baton_operator.scaling.decision import decide, utilisation
from baton_operator.scaling.sample import RoleMemory, RoleSample, ScalingDecision, ScalingPolicy

FULL = 0.9
"""Of a decode worker's KV blocks, above which prompts that are computed would only wait."""

Grant = Callable[[Mapping[RoleName, ScalingDecision]], Mapping[RoleName, int]]
"""How many workers each role may have of those that it wishes for."""


@dataclass(frozen=True, slots=True)
class ScaledRole:
    """One role that is scaled."""

    policy: ScalingPolicy
    memory: RoleMemory
    sample: RoleSample


def decide_all(
    roles: Mapping[RoleName, ScaledRole], grant: Grant, now: float
) -> dict[RoleName, tuple[ScalingDecision, RoleMemory]]:
    """The next numbers of workers. Roles that are not scaled are not among them."""
    made = {name: decide(role.policy, role.memory, role.sample, now) for name, role in roles.items()}
    if "prefill" in roles and "decode" in roles:
        prefill, decode = roles["prefill"], roles["decode"]
        if _is_full(decode) and made["prefill"][0].replicas > prefill.sample.replicas:
            why = "Decode is full: more prompts would only wait there."
            capped = replace(prefill.sample, capped=why)
            made["prefill"] = decide(prefill.policy, prefill.memory, capped, now)
        made["decode"] = _paired(made["prefill"][0], decode, *made["decode"])
    allowed = grant({name: decision for name, (decision, _) in made.items()})
    return {
        name: (_within(decision, roles[name].sample.replicas, allowed[name]), memory)
        for name, (decision, memory) in made.items()
    }


def _is_full(role: ScaledRole) -> bool:
    return utilisation(role.policy, role.memory, role.sample).above(FULL)


def _paired(
    prefill: ScalingDecision, decode: ScaledRole, decision: ScalingDecision, memory: RoleMemory
) -> tuple[ScalingDecision, RoleMemory]:
    """Whoever computes prompts needs somebody who takes them over."""
    if not prefill.replicas or decision.replicas or not decode.policy.most:
        return decision, memory
    return replace(decision, replicas=1, reason="PairedFloor", message="There are prefill workers."), memory


def _within(decision: ScalingDecision, there: int, allowed: int) -> ScalingDecision:
    if allowed >= decision.replicas:
        return decision
    message = f"{decision.message} The GPUs that it may have are enough for {allowed}."
    return replace(
        decision, replicas=max(allowed, there), reason="GpuBudget", message=message, limited="GpuBudget"
    )


ZERO_AFTER_S = 300.0
"""Without a request, if nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """The operator's."""

    prometheus_url: str = ""
    gpu_budget: int = 0
    """Accelerators of all services together; 0: as many as there are."""
    window_s: int = 120
    """Over which rates are taken."""


def policy_of(spec: InferenceServiceSpec, name: RoleName) -> ScalingPolicy:
    """Of a role that has `scaling`."""
    scaling = role_scalers.roles(spec)[name].scaling
    assert scaling is not None
    wanted = spec.autoscaling
    first_token_s = spec.objectives.time_to_first_token.seconds
    objective_s = first_token_s if name == "prefill" else spec.objectives.inter_token_latency.seconds
    return ScalingPolicy(
        least=scaling.min_replicas,
        most=scaling.max_replicas,
        fallback=scaling.fallback_replicas,
        objective_s=objective_s,
        up=scaling.scale_up,
        down=scaling.scale_down,
        loss=wanted.on_metrics_loss,
        zero_after_s=wanted.scale_to_zero_after.seconds if wanted.scale_to_zero_after else ZERO_AFTER_S,
        queue_s=objective_s if name == "prefill" else None,
        first_token_s=first_token_s if name == "decode" and spec.prefill is None else None,
    )
