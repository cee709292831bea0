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
"""Utilization of decode workers above which further prompts would only wait."""

Grant = Callable[[Mapping[RoleName, ScalingDecision]], Mapping[RoleName, int]]
"""Returns the workers that the budget allows, by role."""


@dataclass(frozen=True, slots=True)
class ScaledRole:
    """A scaled role: its policy, memory and sample."""

    policy: ScalingPolicy
    memory: RoleMemory
    sample: RoleSample


def decide_all(
    roles: Mapping[RoleName, ScaledRole], grant: Grant, now: float
) -> dict[RoleName, tuple[ScalingDecision, RoleMemory]]:
    """Return the decision and the new memory of each scaled role."""
    decisions = {name: decide(role.policy, role.memory, role.sample, now) for name, role in roles.items()}
    if "prefill" in roles and "decode" in roles:
        prefill, decode = roles["prefill"], roles["decode"]
        if _is_full(decode) and decisions["prefill"][0].replicas > prefill.sample.replicas:
            why = "The decode workers are full: further prompts would only wait for them."
            capped = replace(prefill.sample, capped=why)
            decisions["prefill"] = decide(prefill.policy, prefill.memory, capped, now)
        decisions["decode"] = _paired(decisions["prefill"][0], decode, *decisions["decode"])
    allowed = grant({name: decision for name, (decision, _) in decisions.items()})
    return {
        name: (_within(decision, roles[name].sample.replicas, allowed[name]), memory)
        for name, (decision, memory) in decisions.items()
    }


def _is_full(role: ScaledRole) -> bool:
    return utilisation(role.policy, role.memory, role.sample).above(FULL)


def _paired(
    prefill: ScalingDecision, decode: ScaledRole, decision: ScalingDecision, memory: RoleMemory
) -> tuple[ScalingDecision, RoleMemory]:
    """Keep one decode worker while there are prefill workers."""
    if not prefill.replicas or decision.replicas or not decode.policy.most:
        return decision, memory
    return replace(
        decision, replicas=1, reason="PairedFloor", message="Prefill workers need a decode worker."
    ), memory


def _within(decision: ScalingDecision, replicas: int, allowed: int) -> ScalingDecision:
    if allowed >= decision.replicas:
        return decision
    message = f"{decision.message} The GPU budget allows {allowed}."
    return replace(
        decision, replicas=max(allowed, replicas), reason="GpuBudget", message=message, limited="GpuBudget"
    )


ZERO_AFTER_S = 300.0
"""Default seconds without requests before a role scales to zero."""


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """Settings of the autoscaler from OperatorSettings."""

    prometheus_url: str = ""
    gpu_budget: int = 0
    """GPUs of all scaled services together; 0: no limit."""
    window_s: int = 120
    """Window of rates in seconds."""


def policy_of(spec: InferenceServiceSpec, name: RoleName) -> ScalingPolicy:
    """Return the policy of a role with `scaling`."""
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
