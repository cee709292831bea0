"""
The workers of both roles of a service: how many are desired, and what couples their decisions.

More prefill workers only lengthen the queue of full decode workers, so prefill does not grow then. Prefill
workers need at least one decode worker. And both share the GPU budget.

The operator creates each RoleScaler once, with the current number of workers. After that, only an
autoscaler, its own or an external one, writes the replicas. Only the operator writes the replicas of
Deployments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from baton_operator import names
from baton_operator.cluster.api_resources import API as API
from baton_operator.cluster.state import ClusterState
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.worker_role import WorkerRole
from baton_operator.manifests.objects import Manifest, owned
from baton_operator.rollout.decision import RoleName
from baton_operator.scaling.decision import decide, utilisation
from baton_operator.scaling.sample import RoleMemory, RoleSample, ScalingDecision, ScalingPolicy

KIND = "RoleScaler"


def worker_roles(spec: InferenceServiceSpec) -> dict[RoleName, WorkerRole]:
    """Return the roles of a spec by name."""
    decode: dict[RoleName, WorkerRole] = {"decode": spec.decode}
    return {"prefill": spec.prefill, **decode} if spec.prefill is not None else decode


def labels_of(name: str) -> tuple[str, ...]:
    """Return the role labels of its workers. Those of a service without prefill workers have `both`."""
    return ("decode", "both") if name == "decode" else (name,)


def targets(cluster: ClusterState, spec: InferenceServiceSpec) -> dict[RoleName, int]:
    """Return the desired number of workers per role; 0 for a missing role."""
    scalers = {
        name: cluster.find(API, KIND, names.role(cluster.owner.name, name)) for name in worker_roles(spec)
    }
    return {
        "prefill": 0,
        **{name: desired_workers(role, scalers[name]) for name, role in worker_roles(spec).items()},
    }


def scaler(cluster: ClusterState, name: RoleName, current: int) -> Manifest:
    """Return a new RoleScaler. It starts with the `current` number of workers, so the role does not jump."""
    owner = cluster.owner
    body = {"spec": {"serviceName": owner.name, "role": name, "replicas": current}}
    labels = names.of_role(owner.name, name)
    return owned(owner, API, KIND, names.role(owner.name, name), body, labels)


def scaled(role: WorkerRole, replicas: int) -> int:
    """
    Return the requested replicas within the bounds of the role.

    >>> from baton_operator.kinds.worker_role import Scaling
    >>> scaled(WorkerRole(scaling=Scaling(min_replicas=1, max_replicas=4)), 9)
    4
    """
    if role.scaling is None:
        return replicas
    return max(role.scaling.min_replicas, min(replicas, role.scaling.max_replicas))


def desired_workers(role: WorkerRole, scaler: Manifest | None = None) -> int:
    """Return the desired number of workers. `scaler`: its RoleScaler, if it exists."""
    if role.scaling is None:
        return 1 if role.replicas is None else role.replicas
    # A new service starts with one worker, even if it may scale to zero.
    return scaled(role, scaler["spec"]["replicas"] if scaler else 1)


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
    scaling = worker_roles(spec)[name].scaling
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
