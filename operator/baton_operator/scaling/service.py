"""
Both roles of a service: each decides by its own signals, and three things couple them.

A fuller prefill would only fill the queue of a decode that is full already, so that prefill does not grow
then. Prefill without any decode is of no use. And what both would like may be more than the accelerators
that they may have together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from baton_operator.rollout import RoleName
from baton_operator.scaling.decision import decide, used
from baton_operator.scaling.observation import Decision, Memory, Observation, Policy

FULL = 0.9
"""Of a decode worker's KV blocks, above which prompts that are computed would only wait."""

Grant = Callable[[Mapping[RoleName, Decision]], Mapping[RoleName, int]]
"""How many workers each role may have of those that it wishes for."""


@dataclass(frozen=True, slots=True)
class Role:
    """One role that is scaled."""

    policy: Policy
    memory: Memory
    seen: Observation


def decide_all(
    roles: Mapping[RoleName, Role], grant: Grant, now: float
) -> dict[RoleName, tuple[Decision, Memory]]:
    """The next numbers of workers. Roles that are not scaled are not among them."""
    made = {name: decide(role.policy, role.memory, role.seen, now) for name, role in roles.items()}
    if "prefill" in roles and "decode" in roles:
        prefill, decode = roles["prefill"], roles["decode"]
        if _is_full(decode) and made["prefill"][0].replicas > prefill.seen.replicas:
            why = "Decode is full: more prompts would only wait there."
            capped = replace(prefill.seen, capped=why)
            made["prefill"] = decide(prefill.policy, prefill.memory, capped, now)
        made["decode"] = _paired(made["prefill"][0], decode, *made["decode"])
    allowed = grant({name: decision for name, (decision, _) in made.items()})
    return {
        name: (_within(decision, roles[name].seen.replicas, allowed[name]), memory)
        for name, (decision, memory) in made.items()
    }


def _is_full(role: Role) -> bool:
    return used(role.policy, role.memory, role.seen).above(FULL)


def _paired(prefill: Decision, decode: Role, decision: Decision, memory: Memory) -> tuple[Decision, Memory]:
    """Whoever computes prompts needs somebody who takes them over."""
    if not prefill.replicas or decision.replicas or not decode.policy.most:
        return decision, memory
    return replace(decision, replicas=1, reason="PairedFloor", message="There are prefill workers."), memory


def _within(decision: Decision, there: int, allowed: int) -> Decision:
    if allowed >= decision.replicas:
        return decision
    message = f"{decision.message} The GPUs that it may have are enough for {allowed}."
    return replace(
        decision, replicas=max(allowed, there), reason="GpuBudget", message=message, limited="GpuBudget"
    )
