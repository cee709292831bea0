"""
How one generation of workers takes over from another: who has how many workers, and how many requests.

A generation serves as far as both of its roles do: one ready prefill worker of two and all decode workers
make half a generation. The new one gets requests by that share; the old one gives up workers for it, and
never more than the new one has taken over. So the two roles of a generation come and go together.

A generation that makes no progress, whose workers crash, or against which its requests speak, has failed;
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
"""Restarts of one worker of a new generation after which the generation has failed."""

HEALTH_CHECK_S = 5.0
"""Seconds after which to look again at what becomes of requests."""

ALL = 100
"""The sum of the weights."""

PLAIN = Rollout(auto_rollback=False)
"""Of generations that have served before: they replace one another without steps and are not judged again."""

EPSILON = 1e-9
"""A third of three is one."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """The workers of one role of one generation."""

    replicas: int = 0
    """Asked for."""
    ready: int = 0
    pods: int = 0
    """There, also those that end."""


@dataclass(frozen=True, slots=True)
class RevisionState:
    """One generation as it is. Times are Unix seconds."""

    revision: str
    created: float
    roles: Mapping[RoleName, RoleState]
    weight: int = 0
    failed: bool = False
    progressed: float = 0.0
    """When one more of its workers got ready, or it began to wait for one."""
    restarts: int = 0
    """Of that worker which has most."""
    tried: RolloutHealth = field(default_factory=RolloutHealth)
    step: int = 0
    step_since: float | None = None

    @property
    def there(self) -> bool:
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
    """What is to become of a generation."""

    revision: str
    phase: RevisionPhase
    replicas: Mapping[RoleName, int]
    weight: int = 0
    step: int = 0
    step_since: float | None = None
    reason: str = ""
    """Why it failed."""


def decide(wanted: RolloutTarget, seen: Sequence[RevisionState], now: float) -> dict[str, RevisionPlan]:
    """
    The next state of each generation, by revision. `seen` has the wanted one too.

    To be asked again whenever something has changed, and at `next_look`.
    """
    if wanted.suspended:
        return {one.revision: _gone(one) for one in seen}
    new = next(one for one in seen if one.revision == wanted.revision)
    old = [one for one in seen if one is not new and not one.failed and one.there]
    if wanted.held:
        return _held(wanted, seen, new, old, now)
    failure = _failure(wanted, new, old, now) if old and not new.failed else ""
    if (new.failed or failure) and old and wanted.policy.auto_rollback:
        return _rolled_back(wanted, seen, new, old, failure, now)
    if wanted.policy.paused and old:
        return {one.revision: _as_it_is(one) for one in seen}
    fates = {one.revision: _gone(one) for one in seen}
    if wanted.policy.strategy == "Recreate" and old:
        fates[new.revision] = RevisionPlan(new.revision, "Warming", dict.fromkeys(new.roles, 0))
        return fates
    serving = [one for one in old if one.share(wanted.targets) > 0]
    steps = wanted.policy.canary.steps if wanted.policy.canary else []
    if serving and new.step < len(steps):
        new = _on_step(wanted, new, now)
        if new.step < len(steps):
            return _canary(wanted, seen, new, old, now)
    fates |= _kept(wanted, new, old)
    fates[new.revision] = _grown(wanted, new, old, fates)
    return fates | _weighted(wanted, [new, *serving], fates)


def seconds_until_change(wanted: RolloutTarget, seen: Sequence[RevisionState], now: float) -> float | None:
    """Seconds after which a decision may change although nothing else does; None if it cannot."""
    new = next(one for one in seen if one.revision == wanted.revision)
    looks = []
    if not new.failed and new.waiting and new.share(wanted.targets) < 1:
        looks.append(new.progressed + wanted.policy.progress_deadline_seconds - now)
    if new.weight and not new.failed and any(one.there for one in seen if one is not new):
        looks.append(HEALTH_CHECK_S)
    steps = wanted.policy.canary.steps if wanted.policy.canary else []
    if new.step_since is not None and new.step < len(steps):
        looks.append(new.step_since + steps[new.step].pause_seconds - now)
    # A moment that has passed has been decided on: whoever looks again at once finds the same.
    return min((one for one in looks if one >= 0), default=None)


def _failure(wanted: RolloutTarget, new: RevisionState, old: Sequence[RevisionState], now: float) -> str:
    """Why the new generation has failed; empty if it has not."""
    if new.restarts >= CRASHES:
        return f"a worker of it was started {new.restarts + 1} times"
    limit = wanted.policy.progress_deadline_seconds
    if new.waiting and new.share(wanted.targets) < 1 and now - new.progressed > limit:
        return f"it made no progress for {limit} s"
    return health_failure(wanted.policy, new.tried, [one.tried for one in old])


def _rolled_back(
    wanted: RolloutTarget,
    seen: Sequence[RevisionState],
    failed: RevisionState,
    old: Sequence[RevisionState],
    reason: str,
    now: float,
) -> dict[str, RevisionPlan]:
    """Everything back to the generation that serves most."""
    gone = replace(_gone(failed), phase="Failed", reason=reason)
    return {**_without(wanted, seen, failed, old, now), failed.revision: gone}


def _held(
    wanted: RolloutTarget,
    seen: Sequence[RevisionState],
    new: RevisionState,
    old: Sequence[RevisionState],
    now: float,
) -> dict[str, RevisionPlan]:
    """No worker of the wanted generation; those before it go on as if it had not been asked for."""
    if wanted.policy.paused:
        return {one.revision: _as_it_is(one) for one in seen}
    if not old:
        now_there = _as_it_is(new)
        fates = {one.revision: _gone(one) for one in seen}
        return {**fates, new.revision: now_there if new.there else replace(now_there, phase="Waiting")}
    phase: RevisionPhase = "Failed" if new.failed else "Waiting"
    waits = RevisionPlan(new.revision, phase, dict.fromkeys(new.roles, 0))
    return {**_without(wanted, seen, new, old, now), new.revision: waits}


def _without(
    wanted: RolloutTarget,
    seen: Sequence[RevisionState],
    new: RevisionState,
    old: Sequence[RevisionState],
    now: float,
) -> dict[str, RevisionPlan]:
    """What becomes of the others if the new one had not been asked for: the one that serves most is whole."""
    last = _serving_most(wanted, old)
    # A role that the spec has no more is what the generation that serves still needs.
    kept = {name: role.replicas for name, role in last.roles.items() if name not in new.roles}
    targets = {**wanted.targets, **kept}
    before = replace(wanted, revision=last.revision, targets=targets, policy=PLAIN, held=False)
    return decide(before, [one for one in seen if one.revision != new.revision], now)


def _serving_most(wanted: RolloutTarget, generations: Sequence[RevisionState]) -> RevisionState:
    return max(generations, key=lambda one: (one.weight, one.share(wanted.targets), one.created))


def _on_step(wanted: RolloutTarget, new: RevisionState, now: float) -> RevisionState:
    """The same generation, a step further if it has stood on this one long enough."""
    assert wanted.policy.canary is not None
    step = wanted.policy.canary.steps[new.step]
    if any(role.ready < _part(wanted, name, step.weight) for name, role in new.roles.items()):
        return replace(new, step_since=None)
    if new.step_since is None:
        return replace(new, step_since=now)
    if now - new.step_since < step.pause_seconds:
        return new
    return replace(new, step=new.step + 1, step_since=None)


def _canary(
    wanted: RolloutTarget,
    seen: Sequence[RevisionState],
    new: RevisionState,
    old: Sequence[RevisionState],
    now: float,
) -> dict[str, RevisionPlan]:
    """The old ones whole, and beside them as much of the new one as the step says."""
    assert wanted.policy.canary is not None
    steps = wanted.policy.canary.steps
    before = steps[new.step - 1].weight if new.step else 0
    weight = steps[new.step].weight if new.step_since is not None else before
    replicas = {name: _part(wanted, name, steps[new.step].weight) for name in new.roles}
    carried = sum(one.share(wanted.targets) for one in old)
    if carried < 1 - EPSILON and any(role.ready > replicas[name] for name, role in new.roles.items()):
        # It has grown further while no other one could serve: it goes back as they become whole.
        weight = max(weight, round(ALL * (1 - carried)))
        there = {name: min(role.replicas, wanted.targets[name]) for name, role in new.roles.items()}
        replicas = {name: max(part, there[name]) for name, part in replicas.items()}
    fates = _without(wanted, seen, new, old, now)
    weights = {name: fate.weight * (ALL - weight) // ALL for name, fate in fates.items()}
    weights[max(weights, key=lambda one: weights[one])] += ALL - weight - sum(weights.values())
    fates = {name: replace(fate, weight=weights[name]) for name, fate in fates.items()}
    return {
        **fates, new.revision: RevisionPlan(new.revision, "Warming", replicas, weight, new.step, new.step_since)
    }  # fmt: skip


def _part(wanted: RolloutTarget, name: RoleName, weight: int) -> int:
    """Workers that carry so many of a hundred requests."""
    target = wanted.targets[name]
    return min(target, max(1, math.ceil(target * weight / ALL)))


def _kept(wanted: RolloutTarget, new: RevisionState, old: Sequence[RevisionState]) -> dict[str, RevisionPlan]:
    """What the old generations keep: as much of the service as the new one has not taken over yet."""
    share = new.share(wanted.targets)
    bare = [_needed(wanted, name, 0.0) / target for name, target in wanted.targets.items() if target]
    missing = max(0.0, max(bare, default=0.0) - share)
    if missing > sum(one.share(wanted.targets) for one in old) + EPSILON:
        old = [_recovered(one) for one in old]  # who is not ready now is needed, and may be again
    parts: dict[str, float] = {}
    for one in sorted(old, key=lambda one: (one.weight, one.created), reverse=True):
        parts[one.revision] = min(missing, one.share(wanted.targets))
        missing -= parts[one.revision]
    carried = share + sum(parts.values())
    return {one.revision: _part_kept(wanted, one, parts[one.revision], carried) for one in old}


def _part_kept(wanted: RolloutTarget, one: RevisionState, part: float, carried: float) -> RevisionPlan:
    """A generation that is to carry `part` of a service of which all together carry `carried`."""
    replicas: dict[RoleName, int] = {}
    for name, role in one.roles.items():
        carrying = min(role.ready, math.ceil(part * wanted.targets[name] - EPSILON))
        replicas[name] = min(carrying, _needed(wanted, name, carried - part))
    return RevisionPlan(one.revision, "Draining", replicas)


def _recovered(one: RevisionState) -> RevisionState:
    """The same generation if all of its workers were ready."""
    roles = {name: replace(role, ready=max(role.ready, role.replicas)) for name, role in one.roles.items()}
    return replace(one, roles=roles)


def _needed(wanted: RolloutTarget, name: RoleName, share: float) -> int:
    """Workers of a role that are needed beside others that carry this share of the service."""
    target = wanted.targets[name]
    return max(0, target - wanted.bounds[name].unavailable - math.floor(share * target + EPSILON))


def _grown(
    wanted: RolloutTarget, new: RevisionState, old: Sequence[RevisionState], fates: Mapping[str, RevisionPlan]
) -> RevisionPlan:
    """How far the new generation has grown: no role further than the other, and both within their bounds."""
    share = new.share(wanted.targets)
    replicas: dict[RoleName, int] = {}
    for name, role in new.roles.items():
        target, bounds = wanted.targets[name], wanted.bounds[name]
        kept = sum(fates[one.revision].replicas.get(name, 0) for one in old)
        ahead = math.floor(share * target + EPSILON) + max(1, bounds.surge + bounds.unavailable)
        grown = min(target + bounds.surge - kept, ahead) if old else target
        # Shares of several generations are rounded up several times: then it takes one more than the surge.
        least = math.floor(share * target + EPSILON) + 1 if len(old) > 1 else 1
        replicas[name] = min(target, max(role.replicas, grown, least))
    phase: RevisionPhase = "Serving" if share >= 1 or not old else "Warming"
    return RevisionPlan(new.revision, phase, replicas, 0, new.step)


def _weighted(
    wanted: RolloutTarget, generations: Sequence[RevisionState], fates: Mapping[str, RevisionPlan]
) -> dict[str, RevisionPlan]:
    """The same with weights: the first one's by its share, the others' by what they carry of the rest."""
    new, *old = generations
    share = new.share(wanted.targets)
    carried = {one.revision: one.share(wanted.targets) for one in old}
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
    phase: RevisionPhase = "Failed" if one.failed else "Draining" if one.there else "Retired"
    return RevisionPlan(one.revision, phase, dict.fromkeys(one.roles, 0))


def _as_it_is(one: RevisionState) -> RevisionPlan:
    phase: RevisionPhase = (
        "Failed" if one.failed else "Serving" if one.weight else "Warming" if one.there else "Retired"
    )
    replicas = {name: role.replicas for name, role in one.roles.items()}
    return RevisionPlan(one.revision, phase, replicas, one.weight, one.step, one.step_since)
