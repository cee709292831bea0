"""
How one revision of workers takes over from another: who has how many workers, and how many requests.

A revision serves as far as both of its roles do: one ready prefill worker of two and all decode workers
make half a revision. The new one gets requests by that share; the old one gives up workers for it, and
never more than the new one has taken over. So the two roles of a revision come and go together.

A revision that makes no progress, whose workers crash, or against which its requests speak, has failed;
then the one that served before is brought back, and the failed one is not tried again until the spec asks
for something else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from baton_operator.kinds.service_policies import Rollout
from baton_operator.rollout.rollout_health import RolloutHealth, health_failure

RoleName = Literal["prefill", "decode"]
RevisionPhase = Literal["Waiting", "Warming", "Serving", "Draining", "Retired", "Failed"]

CRASHES = 3
"""Restarts of one worker of a new revision after which the revision has failed."""

HEALTH_CHECK_S = 5.0
"""Seconds after which to look again at what becomes of requests."""

ALL = 100
"""The sum of the weights."""

PLAIN = Rollout(auto_rollback=False)
"""Of revisions that have served before: they replace one another without steps and are not judged again."""

EPSILON = 1e-9
"""A third of three is one."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """The workers of one role of one revision."""

    replicas: int = 0
    """Asked for."""
    ready: int = 0
    pods: int = 0
    """There, also those that end."""


@dataclass(frozen=True, slots=True)
class RevisionState:
    """One revision as it is. Times are Unix seconds."""

    revision: str
    created: float
    roles: Mapping[RoleName, RoleState]
    weight: int = 0
    failed: bool = False
    progressed: float = 0.0
    """When one more of its workers got ready, or it began to wait for one."""
    restarts: int = 0
    """Of that worker which has most."""
    health: RolloutHealth = field(default_factory=RolloutHealth)
    step: int = 0
    step_since: float | None = None

    @property
    def exists(self) -> bool:
        """Whether anything of it is left."""
        return any(role.replicas or role.pods for role in self.roles.values())

    @property
    def waiting(self) -> bool:
        """Whether workers of it that were asked for are not ready."""
        return any(role.ready < role.replicas for role in self.roles.values())

    def share(self, targets: Mapping[RoleName, int]) -> float:
        """How much of the service it could carry, from 0 to 1."""
        parts = [min(1.0, role.ready / targets[name]) for name, role in self.roles.items() if targets[name]]
        return min(parts, default=1.0)


@dataclass(frozen=True, slots=True)
class RolloutBounds:
    """How far a role may go over and under its target."""

    surge: int = 1
    unavailable: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTarget:
    """What there is to be."""

    revision: str
    targets: Mapping[RoleName, int]
    bounds: Mapping[RoleName, RolloutBounds]
    policy: Rollout = field(default_factory=Rollout)
    suspended: bool = False
    held: bool = False
    """Whether workers of `revision` would find no model yet."""


@dataclass(frozen=True, slots=True)
class RevisionPlan:
    """What is to become of a revision."""

    revision: str
    phase: RevisionPhase
    replicas: Mapping[RoleName, int]
    weight: int = 0
    step: int = 0
    step_since: float | None = None
    reason: str = ""
    """Why it failed."""


def decide(target: RolloutTarget, revisions: Sequence[RevisionState], now: float) -> dict[str, RevisionPlan]:
    """
    The next state of each revision, by revision. `seen` has the wanted one too.

    To be asked again whenever something has changed, and at `next_look`.
    """
    if target.suspended:
        return {one.revision: _gone(one) for one in revisions}
    new = next(one for one in revisions if one.revision == target.revision)
    old = [one for one in revisions if one is not new and not one.failed and one.exists]
    if target.held:
        return _held(target, revisions, new, old, now)
    failure = _failure(target, new, old, now) if old and not new.failed else ""
    if (new.failed or failure) and old and target.policy.auto_rollback:
        return _rolled_back(target, revisions, new, old, failure, now)
    if target.policy.paused and old:
        return {one.revision: _as_it_is(one) for one in revisions}
    fates = {one.revision: _gone(one) for one in revisions}
    if target.policy.strategy == "Recreate" and old:
        fates[new.revision] = RevisionPlan(new.revision, "Warming", dict.fromkeys(new.roles, 0))
        return fates
    serving = [one for one in old if one.share(target.targets) > 0]
    steps = target.policy.canary.steps if target.policy.canary else []
    if serving and new.step < len(steps):
        new = _on_step(target, new, now)
        if new.step < len(steps):
            return _canary(target, revisions, new, old, now)
    fates |= _kept(target, new, old)
    fates[new.revision] = _grown(target, new, old, fates)
    return fates | _weighted(target, [new, *serving], fates)


def seconds_until_change(
    target: RolloutTarget, revisions: Sequence[RevisionState], now: float
) -> float | None:
    """Seconds after which a decision may change although nothing else does; None if it cannot."""
    new = next(one for one in revisions if one.revision == target.revision)
    looks = []
    if not new.failed and new.waiting and new.share(target.targets) < 1:
        looks.append(new.progressed + target.policy.progress_deadline.seconds - now)
    if new.weight and not new.failed and any(one.exists for one in revisions if one is not new):
        looks.append(HEALTH_CHECK_S)
    steps = target.policy.canary.steps if target.policy.canary else []
    if new.step_since is not None and new.step < len(steps):
        looks.append(new.step_since + steps[new.step].pause.seconds - now)
    # A moment that has passed has been decided on: whoever looks again at once finds the same.
    return min((one for one in looks if one >= 0), default=None)


def _failure(target: RolloutTarget, new: RevisionState, old: Sequence[RevisionState], now: float) -> str:
    """Why the new revision has failed; empty if it has not."""
    if new.restarts >= CRASHES:
        return f"a worker of it was started {new.restarts + 1} times"
    limit = target.policy.progress_deadline
    if new.waiting and new.share(target.targets) < 1 and now - new.progressed > limit.seconds:
        return f"it made no progress for {limit}"
    return health_failure(target.policy, new.health, [one.health for one in old])


def _rolled_back(
    target: RolloutTarget,
    revisions: Sequence[RevisionState],
    failed: RevisionState,
    old: Sequence[RevisionState],
    reason: str,
    now: float,
) -> dict[str, RevisionPlan]:
    """Everything back to the revision that serves most."""
    gone = replace(_gone(failed), phase="Failed", reason=reason)
    return {**_without(target, revisions, failed, old, now), failed.revision: gone}


def _held(
    target: RolloutTarget,
    revisions: Sequence[RevisionState],
    new: RevisionState,
    old: Sequence[RevisionState],
    now: float,
) -> dict[str, RevisionPlan]:
    """No worker of the wanted revision; those before it go on as if it had not been asked for."""
    if target.policy.paused:
        return {one.revision: _as_it_is(one) for one in revisions}
    if not old:
        now_there = _as_it_is(new)
        fates = {one.revision: _gone(one) for one in revisions}
        return {**fates, new.revision: now_there if new.exists else replace(now_there, phase="Waiting")}
    phase: RevisionPhase = "Failed" if new.failed else "Waiting"
    waits = RevisionPlan(new.revision, phase, dict.fromkeys(new.roles, 0))
    return {**_without(target, revisions, new, old, now), new.revision: waits}


def _without(
    target: RolloutTarget,
    revisions: Sequence[RevisionState],
    new: RevisionState,
    old: Sequence[RevisionState],
    now: float,
) -> dict[str, RevisionPlan]:
    """What becomes of the others if the new one had not been asked for: the one that serves most is whole."""
    last = _serving_most(target, old)
    # A role that the spec has no more is what the revision that serves still needs.
    kept = {name: role.replicas for name, role in last.roles.items() if name not in new.roles}
    targets = {**target.targets, **kept}
    before = replace(target, revision=last.revision, targets=targets, policy=PLAIN, held=False)
    return decide(before, [one for one in revisions if one.revision != new.revision], now)


def _serving_most(target: RolloutTarget, revisions: Sequence[RevisionState]) -> RevisionState:
    return max(revisions, key=lambda one: (one.weight, one.share(target.targets), one.created))


def _on_step(target: RolloutTarget, new: RevisionState, now: float) -> RevisionState:
    """The same revision, a step further if it has stood on this one long enough."""
    assert target.policy.canary is not None
    step = target.policy.canary.steps[new.step]
    if any(role.ready < _part(target, name, step.weight) for name, role in new.roles.items()):
        return replace(new, step_since=None)
    if new.step_since is None:
        return replace(new, step_since=now)
    if now - new.step_since < step.pause.seconds:
        return new
    return replace(new, step=new.step + 1, step_since=None)


def _canary(
    target: RolloutTarget,
    revisions: Sequence[RevisionState],
    new: RevisionState,
    old: Sequence[RevisionState],
    now: float,
) -> dict[str, RevisionPlan]:
    """The old ones whole, and beside them as much of the new one as the step says."""
    assert target.policy.canary is not None
    steps = target.policy.canary.steps
    before = steps[new.step - 1].weight if new.step else 0
    weight = steps[new.step].weight if new.step_since is not None else before
    replicas = {name: _part(target, name, steps[new.step].weight) for name in new.roles}
    carried = sum(one.share(target.targets) for one in old)
    if carried < 1 - EPSILON and any(role.ready > replicas[name] for name, role in new.roles.items()):
        # It has grown further while no other one could serve: it goes back as they become whole.
        weight = max(weight, round(ALL * (1 - carried)))
        there = {name: min(role.replicas, target.targets[name]) for name, role in new.roles.items()}
        replicas = {name: max(part, there[name]) for name, part in replicas.items()}
    fates = _without(target, revisions, new, old, now)
    weights = {name: fate.weight * (ALL - weight) // ALL for name, fate in fates.items()}
    weights[max(weights, key=lambda one: weights[one])] += ALL - weight - sum(weights.values())
    fates = {name: replace(fate, weight=weights[name]) for name, fate in fates.items()}
    warming = RevisionPlan(new.revision, "Warming", replicas, weight, new.step, new.step_since)
    return {**fates, new.revision: warming}


def _part(target: RolloutTarget, name: RoleName, weight: int) -> int:
    """Workers that carry so many of a hundred requests."""
    replicas = target.targets[name]
    return min(replicas, max(1, math.ceil(replicas * weight / ALL)))


def _kept(target: RolloutTarget, new: RevisionState, old: Sequence[RevisionState]) -> dict[str, RevisionPlan]:
    """What the old revisions keep: as much of the service as the new one has not taken over yet."""
    share = new.share(target.targets)
    bare = [_needed(target, name, 0.0) / count for name, count in target.targets.items() if count]
    missing = max(0.0, max(bare, default=0.0) - share)
    if missing > sum(one.share(target.targets) for one in old) + EPSILON:
        old = [_recovered(one) for one in old]  # who is not ready now is needed, and may be again
    parts: dict[str, float] = {}
    for one in sorted(old, key=lambda one: (one.weight, one.created), reverse=True):
        parts[one.revision] = min(missing, one.share(target.targets))
        missing -= parts[one.revision]
    carried = share + sum(parts.values())
    return {one.revision: _part_kept(target, one, parts[one.revision], carried) for one in old}


def _part_kept(target: RolloutTarget, one: RevisionState, part: float, carried: float) -> RevisionPlan:
    """A revision that is to carry `part` of a service of which all together carry `carried`."""
    replicas: dict[RoleName, int] = {}
    for name, role in one.roles.items():
        carrying = min(role.ready, math.ceil(part * target.targets[name] - EPSILON))
        replicas[name] = min(carrying, _needed(target, name, carried - part))
    return RevisionPlan(one.revision, "Draining", replicas)


def _recovered(one: RevisionState) -> RevisionState:
    """The same revision if all of its workers were ready."""
    roles = {name: replace(role, ready=max(role.ready, role.replicas)) for name, role in one.roles.items()}
    return replace(one, roles=roles)


def _needed(target: RolloutTarget, name: RoleName, share: float) -> int:
    """Workers of a role that are needed beside others that carry this share of the service."""
    replicas = target.targets[name]
    return max(0, replicas - target.bounds[name].unavailable - math.floor(share * replicas + EPSILON))


def _grown(
    target: RolloutTarget, new: RevisionState, old: Sequence[RevisionState], fates: Mapping[str, RevisionPlan]
) -> RevisionPlan:
    """How far the new revision has grown: no role further than the other, and both within their bounds."""
    share = new.share(target.targets)
    replicas: dict[RoleName, int] = {}
    for name, role in new.roles.items():
        whole, bounds = target.targets[name], target.bounds[name]
        kept = sum(fates[one.revision].replicas.get(name, 0) for one in old)
        ahead = math.floor(share * whole + EPSILON) + max(1, bounds.surge + bounds.unavailable)
        grown = min(whole + bounds.surge - kept, ahead) if old else whole
        # Shares of several revisions are rounded up several times: then it takes one more than the surge.
        least = math.floor(share * whole + EPSILON) + 1 if len(old) > 1 else 1
        replicas[name] = min(whole, max(role.replicas, grown, least))
    phase: RevisionPhase = "Serving" if share >= 1 or not old else "Warming"
    return RevisionPlan(new.revision, phase, replicas, 0, new.step)


def _weighted(
    target: RolloutTarget, revisions: Sequence[RevisionState], fates: Mapping[str, RevisionPlan]
) -> dict[str, RevisionPlan]:
    """The same with weights: the first one's by its share, the others' by what they carry of the rest."""
    new, *old = revisions
    share = new.share(target.targets)
    carried = {one.revision: one.share(target.targets) for one in old}
    whole = sum(carried.values())
    weight = round(ALL * share) if whole else ALL
    weights = {new.revision: weight}
    left = ALL - weight
    for revision, part in carried.items():
        weights[revision] = round((ALL - weight) * part / whole)
        left -= weights[revision]
    if carried:
        weights[max(carried, key=lambda one: carried[one])] += left
    return {revision: replace(fates[revision], weight=one) for revision, one in weights.items()}


def _gone(one: RevisionState) -> RevisionPlan:
    phase: RevisionPhase = "Failed" if one.failed else "Draining" if one.exists else "Retired"
    return RevisionPlan(one.revision, phase, dict.fromkeys(one.roles, 0))


def _as_it_is(one: RevisionState) -> RevisionPlan:
    phase: RevisionPhase = (
        "Failed" if one.failed else "Serving" if one.weight else "Warming" if one.exists else "Retired"
    )
    replicas = {name: role.replicas for name, role in one.roles.items()}
    return RevisionPlan(one.revision, phase, replicas, one.weight, one.step, one.step_since)
