"""
The rollout: workers and request weight of each revision, a pure decision.

The share of a revision is that of its weaker role: one of two prefill workers and all decode workers are
half a revision. The new revision gets requests by its share. The old one gives up workers only as far as
the new one replaced them, so both roles of a revision grow and shrink together.

A new revision fails if it makes no progress, its workers crash, or its health is bad. Then the operator
rolls back to the previous revision and does not retry the failed one until the spec changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from baton_operator.cluster.rollout_health import RolloutHealth, health_failure
from baton_operator.kinds.service_policies import Rollout

RoleName = Literal["prefill", "decode"]
RevisionPhase = Literal["Waiting", "Warming", "Serving", "Draining", "Retired", "Failed"]

CRASHES = 3
"""Restarts of one worker after which a new revision has failed."""

HEALTH_CHECK_S = 5.0
"""Seconds between two checks of the rollout health."""

ALL = 100
"""The sum of the weights."""

PLAIN = Rollout(auto_rollback=False)
"""Policy among revisions that have served before: no canary steps and no rollback."""

EPSILON = 1e-9
"""Tolerance for sums of fractions such as 1/3."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """Workers of one role of one revision."""

    replicas: int = 0
    """Desired workers."""
    ready: int = 0
    pods: int = 0
    """Existing pods, including terminating ones."""


@dataclass(frozen=True, slots=True)
class RevisionState:
    """State of one revision. Times are Unix seconds."""

    revision: str
    created: float
    roles: Mapping[RoleName, RoleState]
    weight: int = 0
    failed: bool = False
    failure: str = ""
    """Cause, if it has failed."""
    progressed: float = 0.0
    """Time of the last progress: one more ready worker, or the start of waiting for one."""
    restarts: int = 0
    """Highest restart count of its workers."""
    health: RolloutHealth = field(default_factory=RolloutHealth)
    step: int = 0
    step_since: float | None = None

    @property
    def exists(self) -> bool:
        """Whether it has replicas or pods."""
        return any(role.replicas or role.pods for role in self.roles.values())

    @property
    def waiting(self) -> bool:
        """Whether desired workers are not ready."""
        return any(role.ready < role.replicas for role in self.roles.values())

    def share(self, targets: Mapping[RoleName, int]) -> float:
        """Return the share of the service that it can serve, 0 to 1."""
        parts = [min(1.0, role.ready / targets[name]) for name, role in self.roles.items() if targets[name]]
        return min(parts, default=1.0)


@dataclass(frozen=True, slots=True)
class RolloutBounds:
    """Maximum workers of a role above and below its target."""

    surge: int = 1
    unavailable: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTarget:
    """The goal of a rollout."""

    revision: str
    targets: Mapping[RoleName, int]
    bounds: Mapping[RoleName, RolloutBounds]
    policy: Rollout = field(default_factory=Rollout)
    suspended: bool = False
    held: bool = False
    """Whether the model files of `revision` are not present yet."""


@dataclass(frozen=True, slots=True)
class RevisionPlan:
    """Next state of a revision."""

    revision: str
    phase: RevisionPhase
    replicas: Mapping[RoleName, int]
    weight: int = 0
    step: int = 0
    step_since: float | None = None
    failure: str = ""
    """Cause of the phase Failed."""


@dataclass(frozen=True, slots=True)
class _Case:
    """What a decision is about."""

    target: RolloutTarget
    revisions: Sequence[RevisionState]
    new: RevisionState
    """The target revision."""
    old: Sequence[RevisionState]
    """Existing revisions that have not failed, without the new one."""
    now: float


def decide(target: RolloutTarget, revisions: Sequence[RevisionState], now: float) -> dict[str, RevisionPlan]:
    """Return the next state of each revision. `revisions` includes the target. Call it again after each
    change, and after `seconds_until_change`.
    """
    if target.suspended:
        return {revision.revision: _gone(revision) for revision in revisions}
    new = next(revision for revision in revisions if revision.revision == target.revision)
    old = [
        revision for revision in revisions if revision is not new and not revision.failed and revision.exists
    ]
    case = _Case(target, revisions, new, old, now)
    if target.held:
        return _held(case)
    if old and target.policy.auto_rollback:
        if not new.failed and (failure := _failure(case)):
            new = replace(new, failed=True, failure=failure)
        if new.failed:
            return {**_without(case), new.revision: _gone(new)}
    if target.policy.paused and old:
        return {revision.revision: _as_it_is(revision) for revision in revisions}
    plans = {revision.revision: _gone(revision) for revision in revisions}
    if target.policy.strategy == "Recreate" and old:
        plans[new.revision] = RevisionPlan(new.revision, "Warming", dict.fromkeys(new.roles, 0))
        return plans
    serving = [former for former in old if former.share(target.targets) > 0]
    steps = target.policy.canary.steps if target.policy.canary else []
    if serving and new.step < len(steps):
        new = _on_step(target, new, now)
        if new.step < len(steps):
            return _canary(replace(case, new=new))
    plans |= _kept(target, new, old)
    plans[new.revision] = _grown(target, new, old, plans)
    return plans | _weighted(target, [new, *serving], plans)


def seconds_until_change(
    target: RolloutTarget, revisions: Sequence[RevisionState], now: float
) -> float | None:
    """Return the seconds after which a decision may change without an event; None if it cannot."""
    new = next(revision for revision in revisions if revision.revision == target.revision)
    looks = []
    if not new.failed and new.waiting and new.share(target.targets) < 1:
        looks.append(new.progressed + target.policy.progress_deadline.seconds - now)
    if (
        new.weight
        and not new.failed
        and any(revision.exists for revision in revisions if revision is not new)
    ):
        looks.append(HEALTH_CHECK_S)
    steps = target.policy.canary.steps if target.policy.canary else []
    if new.step_since is not None and new.step < len(steps):
        looks.append(new.step_since + steps[new.step].pause.seconds - now)
    # Times in the past are decided already.
    return min((look for look in looks if look >= 0), default=None)


def _failure(case: _Case) -> str:
    """Return why the new revision has failed; empty if it has not."""
    new, policy = case.new, case.target.policy
    if new.restarts >= CRASHES:
        return f"a worker started {new.restarts + 1} times"
    limit = policy.progress_deadline
    if new.waiting and new.share(case.target.targets) < 1 and case.now - new.progressed > limit.seconds:
        return f"no progress for {limit}"
    return health_failure(policy, new.health, [former.health for former in case.old])


def _held(case: _Case) -> dict[str, RevisionPlan]:
    """Hold the target revision without workers; the others continue as if it did not exist."""
    new = case.new
    if case.target.policy.paused:
        return {revision.revision: _as_it_is(revision) for revision in case.revisions}
    if not case.old:
        now_there = _as_it_is(new)
        plans = {revision.revision: _gone(revision) for revision in case.revisions}
        return {
            **plans,
            new.revision: now_there if new.exists else replace(now_there, phase="Waiting", failure=""),
        }
    plan = _gone(new) if new.failed else RevisionPlan(new.revision, "Waiting", dict.fromkeys(new.roles, 0))
    return {**_without(case), new.revision: plan}


def _without(case: _Case) -> dict[str, RevisionPlan]:
    """Plan the other revisions as if the new one did not exist: the one that serves most gets all workers."""
    target, new = case.target, case.new
    last = max(case.old, key=lambda former: (former.weight, former.share(target.targets), former.created))
    # The serving revision may still need a role that the spec no longer has.
    kept = {name: role.replicas for name, role in last.roles.items() if name not in new.roles}
    targets = {**target.targets, **kept}
    before = replace(target, revision=last.revision, targets=targets, policy=PLAIN, held=False)
    return decide(
        before, [revision for revision in case.revisions if revision.revision != new.revision], case.now
    )


def _on_step(target: RolloutTarget, new: RevisionState, now: float) -> RevisionState:
    """Return the revision, advanced to the next canary step after its pause."""
    assert target.policy.canary is not None
    step = target.policy.canary.steps[new.step]
    if any(role.ready < _part(target, name, step.weight) for name, role in new.roles.items()):
        return replace(new, step_since=None)
    if new.step_since is None:
        return replace(new, step_since=now)
    if now - new.step_since < step.pause.seconds:
        return new
    return replace(new, step=new.step + 1, step_since=None)


def _canary(case: _Case) -> dict[str, RevisionPlan]:
    """Plan a canary step: the old revisions complete, and beside them a part of the new one."""
    target, new = case.target, case.new
    assert target.policy.canary is not None
    steps = target.policy.canary.steps
    before = steps[new.step - 1].weight if new.step else 0
    weight = steps[new.step].weight if new.step_since is not None else before
    replicas = {name: _part(target, name, steps[new.step].weight) for name in new.roles}
    carried = sum(former.share(target.targets) for former in case.old)
    if carried < 1 - EPSILON and any(role.ready > replicas[name] for name, role in new.roles.items()):
        # It grew further while no other revision could serve. It shrinks as the others recover.
        weight = max(weight, round(ALL * (1 - carried)))
        existing = {name: min(role.replicas, target.targets[name]) for name, role in new.roles.items()}
        replicas = {name: max(part, existing[name]) for name, part in replicas.items()}
    plans = _without(case)
    weights = {name: plan.weight * (ALL - weight) // ALL for name, plan in plans.items()}
    weights[max(weights, key=lambda one: weights[one])] += ALL - weight - sum(weights.values())
    plans = {name: replace(plan, weight=weights[name]) for name, plan in plans.items()}
    warming = RevisionPlan(new.revision, "Warming", replicas, weight, new.step, new.step_since)
    return {**plans, new.revision: warming}


def _part(target: RolloutTarget, name: RoleName, weight: int) -> int:
    """Return the workers that serve `weight` percent of the requests."""
    replicas = target.targets[name]
    return min(replicas, max(1, math.ceil(replicas * weight / ALL)))


def _kept(target: RolloutTarget, new: RevisionState, old: Sequence[RevisionState]) -> dict[str, RevisionPlan]:
    """Plan the old revisions: they keep the share that the new one does not serve yet."""
    share = new.share(target.targets)
    bare = [_needed(target, name, 0.0) / count for name, count in target.targets.items() if count]
    missing = max(0.0, max(bare, default=0.0) - share)
    if missing > sum(former.share(target.targets) for former in old) + EPSILON:
        old = [_recovered(former) for former in old]  # workers that are not ready may recover and are needed
    parts: dict[str, float] = {}
    for former in sorted(old, key=lambda former: (former.weight, former.created), reverse=True):
        parts[former.revision] = min(missing, former.share(target.targets))
        missing -= parts[former.revision]
    carried = share + sum(parts.values())
    return {former.revision: _part_kept(target, former, parts[former.revision], carried) for former in old}


def _part_kept(target: RolloutTarget, one: RevisionState, part: float, carried: float) -> RevisionPlan:
    """Plan a revision that serves `part`, if all revisions together serve `carried`."""
    replicas: dict[RoleName, int] = {}
    for name, role in one.roles.items():
        carrying = min(role.ready, math.ceil(part * target.targets[name] - EPSILON))
        replicas[name] = min(carrying, _needed(target, name, carried - part))
    return RevisionPlan(one.revision, "Draining", replicas)


def _recovered(one: RevisionState) -> RevisionState:
    """Return the revision as if all its workers were ready."""
    roles = {name: replace(role, ready=max(role.ready, role.replicas)) for name, role in one.roles.items()}
    return replace(one, roles=roles)


def _needed(target: RolloutTarget, name: RoleName, share: float) -> int:
    """Return the needed workers of a role if other revisions serve this share."""
    replicas = target.targets[name]
    return max(0, replicas - target.bounds[name].unavailable - math.floor(share * replicas + EPSILON))


def _grown(
    target: RolloutTarget, new: RevisionState, old: Sequence[RevisionState], plans: Mapping[str, RevisionPlan]
) -> RevisionPlan:
    """Plan the new revision: both roles grow together, within their bounds."""
    share = new.share(target.targets)
    replicas: dict[RoleName, int] = {}
    for name, role in new.roles.items():
        whole, bounds = target.targets[name], target.bounds[name]
        kept = sum(plans[former.revision].replicas.get(name, 0) for former in old)
        ahead = math.floor(share * whole + EPSILON) + max(1, bounds.surge + bounds.unavailable)
        grown = min(whole + bounds.surge - kept, ahead) if old else whole
        # Each share of several old revisions is rounded up, so one worker more than the surge is necessary.
        least = math.floor(share * whole + EPSILON) + 1 if len(old) > 1 else 1
        replicas[name] = min(whole, max(role.replicas, grown, least))
    phase: RevisionPhase = "Serving" if share >= 1 or not old else "Warming"
    return RevisionPlan(new.revision, phase, replicas, 0, new.step)


def _weighted(
    target: RolloutTarget, revisions: Sequence[RevisionState], plans: Mapping[str, RevisionPlan]
) -> dict[str, RevisionPlan]:
    """Add weights: the new revision by its share, the others by their part of the rest."""
    new, *old = revisions
    share = new.share(target.targets)
    carried = {former.revision: former.share(target.targets) for former in old}
    whole = sum(carried.values())
    weight = round(ALL * share) if whole else ALL
    weights = {new.revision: weight}
    left = ALL - weight
    for revision, part in carried.items():
        weights[revision] = round((ALL - weight) * part / whole)
        left -= weights[revision]
    if carried:
        weights[max(carried, key=lambda one: carried[one])] += left
    return {revision: replace(plans[revision], weight=one) for revision, one in weights.items()}


def _gone(one: RevisionState) -> RevisionPlan:
    phase: RevisionPhase = "Failed" if one.failed else "Draining" if one.exists else "Retired"
    return RevisionPlan(one.revision, phase, dict.fromkeys(one.roles, 0), failure=one.failure)


def _as_it_is(one: RevisionState) -> RevisionPlan:
    phase: RevisionPhase = (
        "Failed" if one.failed else "Serving" if one.weight else "Warming" if one.exists else "Retired"
    )
    replicas = {name: role.replicas for name, role in one.roles.items()}
    return RevisionPlan(one.revision, phase, replicas, one.weight, one.step, one.step_since, one.failure)
