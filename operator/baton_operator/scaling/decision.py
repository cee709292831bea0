"""
The desired number of workers of one role: a pure function of policy, memory, sample and time.

Three inputs count: the need of the demand forecast for the time when a new worker is ready, present
overload, and whether one worker less would suffice. Full workers or late responses are overload. A rise has
to last for half a minute and a fall for five minutes. Without data a role never shrinks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from baton_operator.kinds.role_scaler import Bound
from baton_operator.kinds.worker_role import ScaleDown, ScaleUp
from baton_operator.scaling.history import TREND_S, forecast
from baton_operator.scaling.sample import (
    Measurement,
    RoleMemory,
    RoleSample,
    ScalingDecision,
    ScalingPolicy,
    unknown,
)

HEADROOM = 0.85
"""Target utilization of the capacity of a worker."""

HIGH = 0.8
"""Utilization above which a worker is overloaded."""

SHRINK = 0.7
"""Maximum utilization of the remaining workers after one is removed."""

LATENCY_SHRINK = 0.8
"""Maximum share of the latency objective after one worker is removed."""

AT_WORK = 0.5
"""Share of the workers that the demand needs above which slow tokens mean too few workers."""

TOLERANCE = 0.1
"""Relative excess of the need that counts as noise."""

BACKLOG_DRAIN_S = 300.0
"""Seconds in which the backlog should be drained."""

SETTLED_S = 60.0
"""Seconds after a worker became ready until measurements include its effect."""

PENDING_S = 900.0
"""
Seconds after which an unschedulable pod stops further growth. A node autoscaler needs several minutes for a
GPU node; the Kubernetes cluster autoscaler gives up after 15 minutes.
"""

MOST_DOSE = 2.0
"""Maximum growth factor by overload alone, if the need is unknown."""

DecisionAndMemory = tuple[ScalingDecision, RoleMemory]


@dataclass(frozen=True, slots=True)
class _Case:
    """What a decision is about. The memory includes the sample."""

    policy: ScalingPolicy
    memory: RoleMemory
    sample: RoleSample
    now: float

    def recommending(self, raw: int, blind_since: float | None) -> _Case:
        """Return the case with `raw` workers in its windows."""
        up_s, down_s = (one.stabilization_window.seconds for one in (self.policy.up, self.policy.down))
        windows = self.memory.windows.with_one(self.now, raw, up_s, down_s)
        return replace(self, memory=replace(self.memory, windows=windows, blind_since=blind_since))

    def decided(self, decision: ScalingDecision) -> DecisionAndMemory:
        """Return the decision and the memory that includes it, whether or not it is written."""
        grown, shrunk, change = (
            self.memory.grown,
            self.memory.shrunk,
            decision.replicas - self.sample.replicas,
        )
        if change > 0:
            grown = (*grown, (self.now, change))[-64:]
        elif change < 0:
            shrunk = (*shrunk, (self.now, -change))[-64:]
        return decision, replace(self.memory, grown=grown, shrunk=shrunk, idle_since=self.idle_since)

    def stays(self, raw: int, reason: str, message: str, limited: str = "") -> ScalingDecision:
        return ScalingDecision(self.sample.replicas, raw, reason, message, limited=limited)

    @property
    def idle_since(self) -> float | None:
        sample = self.sample
        measured = (sample.demand, sample.backlog, sample.requests, sample.held, sample.queued)
        if sample.silent or not all(one.zero for one in measured):
            return None
        return self.now if self.memory.idle_since is None else self.memory.idle_since


def decide(policy: ScalingPolicy, memory: RoleMemory, sample: RoleSample, now: float) -> DecisionAndMemory:
    """Return the decision and the new memory. `now`: seconds of any steady clock."""
    case = _Case(policy, _with_sample(memory, sample, now), sample, now)
    if sample.replicas == 0 and policy.most and sample.held.above(0):
        return _from_zero(case)
    if not any(one.has_value for one in (sample.demand, sample.backlog, sample.utilisation, sample.latency)):
        return _without_metrics(case)
    need = _need(case.memory, sample)
    raw, reason, message = _recommendation(case, need)
    case = case.recommending(raw, blind_since=None)
    bounded = _bounded(policy, raw)
    if bounded > sample.replicas:
        decision = _growth(case, bounded, reason, message)
    elif bounded < sample.replicas:
        decision = _shrinkage(case, reason, message)
    else:
        at = "AtMinimum" if raw < bounded else "AtMaximum" if raw > bounded else reason
        decision = ScalingDecision(bounded, raw, at, message)
    return case.decided(
        replace(
            decision,
            replicas=_bounded(policy, decision.replicas),
            raw=raw,
            limited=decision.limited or ("AtMaximum" if raw > policy.most else ""),
            bound=_bound(policy, sample, reason),
            pressure=(need if need is not None else float(raw)) / max(1, sample.ready),
        )
    )


def utilisation(policy: ScalingPolicy, memory: RoleMemory, sample: RoleSample) -> Measurement:
    """Return the utilization of the workers, above 1 with a backlog."""
    if policy.queue_s is None:
        return sample.utilisation
    worker = capacity(memory, sample)
    if not sample.backlog.has_value or not sample.ready:
        return unknown("the backlog is unknown" if sample.ready else "no worker is ready")
    if sample.backlog.zero:
        return sample.backlog
    if worker is None:
        return unknown("the capacity of a worker is unknown")
    assert sample.backlog.value is not None
    return Measurement.of(sample.backlog.value / (worker * policy.queue_s * sample.ready))


def capacity(memory: RoleMemory, sample: RoleSample) -> float | None:
    """Return tokens per second of one worker, by a profile or learned; None if unknown."""
    return sample.size.tokens_per_s if sample.size and sample.size.tokens_per_s else memory.capacity.value


def longest_wait(policy: ScalingPolicy, sample: RoleSample) -> tuple[Measurement, float]:
    """Return the latency that is worst against its objective, and that objective, in seconds."""
    if policy.first_token_s is None or not sample.first_token.has_value:
        return sample.latency, policy.objective_s
    first = sample.first_token, policy.first_token_s
    if not sample.latency.has_value:
        return first
    token = sample.latency, policy.objective_s
    return max(token, first, key=lambda one: (one[0].value or 0.0) / one[1])


def _with_sample(memory: RoleMemory, sample: RoleSample, now: float) -> RoleMemory:
    """Return the memory with this sample."""
    capacity = memory.capacity.learned(sample.rate.value)
    demand = tuple(sample for sample in memory.demand if sample[0] > now - TREND_S)
    if sample.demand.value is not None:
        demand = (*demand, (now, sample.demand.value))
    grown = memory.ready is not None and sample.ready > memory.ready
    since = now if grown else memory.ready_since
    return replace(memory, capacity=capacity, demand=demand, ready=sample.ready, ready_since=since)


def _need(memory: RoleMemory, sample: RoleSample) -> float | None:
    """Return the (fractional) workers that the demand needs; None if demand or capacity is unknown."""
    worker = capacity(memory, sample)
    if sample.demand.value is None:
        return None
    waiting = (sample.backlog.value or 0.0) / BACKLOG_DRAIN_S
    if not sample.demand.value and not waiting:
        return 0.0
    if worker is None:
        return None
    ahead = forecast(memory.demand, sample.demand.value, memory.startup_s)
    return (ahead + waiting) / (HEADROOM * worker)


def _recommendation(case: _Case, need: float | None) -> tuple[int, str, str]:
    """Return the recommendation of this sample alone: workers, reason and message."""
    policy, memory, sample = case.policy, case.memory, case.sample
    replicas = sample.replicas
    full = utilisation(policy, memory, sample)
    up, up_reason, up_message = _overload(case, full, need)
    # Overload is never noise.
    enough = replicas if full.above(HIGH) else replicas * (1 + TOLERANCE)
    if need is not None and need > enough and math.ceil(need) >= up:
        return math.ceil(need), "Demand", f"The demand needs {need:.1f} workers{_by_profile(sample)}."
    if up > replicas:
        return up, up_reason, up_message
    asleep = not (replicas or sample.demand.above(0) or sample.backlog.above(0))
    if asleep or _idle(case):
        return 0, "Idle", "No requests arrived for the configured time."
    target = max(1, replicas - 1 if need is None else min(replicas, math.ceil(need)))
    if target >= replicas:
        return max(replicas, 1), "Steady", "The number of workers is sufficient."
    blocking = _shrink_obstacle(policy, sample, full, replicas)
    if blocking:
        return replicas, "Steady", f"Cannot remove a worker: {blocking}."
    return target, "Spare", f"{target} would suffice."


def _by_profile(sample: RoleSample) -> str:
    if sample.size is None or not sample.size.tokens_per_s:
        return ""
    return f" of {sample.size.tokens_per_s:.0f} tokens/s each ({sample.size.bound})"


def _bound(policy: ScalingPolicy, sample: RoleSample, reason: str) -> Bound | None:
    """Return the first limit of one worker: as measured now, or by a profile."""
    if reason == "Saturated":
        return sample.tightest
    if reason == "LatencyHigh":
        first_token = policy.queue_s is not None or longest_wait(policy, sample)[0] is sample.first_token
        return "TimeToFirstToken" if first_token else "InterTokenLatency"
    return sample.size.bound if sample.size else None


def _overload(case: _Case, full: Measurement, need: float | None) -> tuple[int, str, str]:
    """Return the recommendation from overload: workers, reason and message; 0 without overload."""
    policy, sample = case.policy, case.sample
    settling = case.now - case.memory.ready_since < SETTLED_S
    starting = sample.ready < sample.replicas
    if not sample.replicas or settling or (starting and need is not None):
        return 0, "", ""
    if full.above(HIGH):
        assert full.value is not None
        message = (
            f"The workers are {full.value:.0%} full{f' ({sample.tightest})' if sample.tightest else ''}."
        )
        if need is not None:  # the need counts; overload only corrects it
            return sample.replicas + 1, "Saturated", message
        # Starting workers count: the load of the ready ones gives the total need.
        target = math.ceil(sample.ready * min(full.value / HIGH, MOST_DOSE))
        return (target if starting else max(target, sample.replicas + 1)), "Saturated", message
    if starting:
        return 0, "", ""
    # Without a backlog, long prompts are slow by themselves, or the queue is already served: another worker
    # would not help.
    least = HIGH if policy.queue_s is not None else AT_WORK
    working = full.above(0.1) or (need is not None and need > least * sample.replicas) or not full.has_value
    wait, objective_s = longest_wait(policy, sample)
    if wait.above(objective_s) and working:
        message = f"The latency is {wait.value:.3g} s; the objective is {objective_s:.3g} s."
        return sample.replicas + 1, "LatencyHigh", message
    return 0, "", ""


def _shrink_obstacle(policy: ScalingPolicy, sample: RoleSample, full: Measurement, replicas: int) -> str:
    """Return why one worker less might not suffice; empty if it certainly would."""
    for name, reading in (
        ("the demand", sample.demand),
        ("the backlog", sample.backlog),
        ("the utilization", full),
    ):
        if not reading.has_value:
            return f"{name} is unknown ({reading.why})"
    waits = (sample.latency,) if policy.first_token_s is None else (sample.latency, sample.first_token)
    for one in waits:
        if not one.has_value and not sample.requests.zero:
            return f"the latency is unknown ({one.why})"
    if sample.silent:
        return f"{sample.silent} workers or routers report no metrics"
    if replicas == 1:
        return ""
    more = replicas / (replicas - 1)
    if not full.below(SHRINK / more):
        return "the other workers would be overloaded"
    wait, objective_s = longest_wait(policy, sample)
    if wait.has_value and not wait.below(LATENCY_SHRINK * objective_s / more):
        return "the latency would be too high"
    return ""


def _idle(case: _Case) -> bool:
    """Return whether there were no requests for so long that no worker is needed."""
    since, policy = case.idle_since, case.policy
    return policy.least == 0 and since is not None and case.now - since >= policy.zero_after_s


def _from_zero(case: _Case) -> DecisionAndMemory:
    """Scale from zero immediately: requests wait."""
    replicas = _bounded(case.policy, max(1, case.policy.least))
    message = f"{case.sample.held.value:.0f} requests wait for a worker."
    decision = ScalingDecision(replicas, replicas, "FromZero", message, pressure=math.inf)
    return case.recommending(replicas, case.memory.blind_since).decided(decision)


def _without_metrics(case: _Case) -> DecisionAndMemory:
    """Without metrics, keep the replicas; after a while use the fallback of the spec."""
    policy, replicas, why = case.policy, case.sample.replicas, case.sample.demand.why
    since = case.now if case.memory.blind_since is None else case.memory.blind_since
    # Recorded as need of the current replicas, so no worker is removed for a whole window after it.
    case = case.recommending(replicas, since)
    blind_s, fallback = case.now - since, policy.fallback
    if blind_s > policy.loss.hold_duration.seconds and fallback is not None and policy.loss.policy != "Hold":
        target = fallback if policy.loss.policy == "Fallback" else max(replicas, fallback)
        message = f"No metrics for {blind_s:.0f} s: {why}."
        decision = ScalingDecision(_bounded(policy, target), target, "MetricsFallback", message, "Fallback")
    else:
        message = f"No metrics, so the replicas stay: {why}."
        decision = ScalingDecision(_bounded(policy, replicas), replicas, "MetricsHeld", message, "Held")
    return case.decided(replace(decision, pressure=1.0))


def _growth(case: _Case, target: int, reason: str, message: str) -> ScalingDecision:
    policy, memory, sample, replicas = case.policy, case.memory, case.sample, case.sample.replicas
    if sample.pending_s > PENDING_S:
        waited = f"A worker has been unschedulable for {sample.pending_s:.0f} s."
        return case.stays(target, "CapacityExhausted", waited, limited="CapacityExhausted")
    if sample.capped:
        return case.stays(target, "OtherRole", sample.capped, limited="OtherRole")
    wait, objective_s = longest_wait(policy, sample)
    if sample.rolling and not wait.above(objective_s):
        rolling = "A rollout is in progress, and the latency meets its objective."
        return case.stays(target, "RollingOut", rolling)
    lasting = memory.windows.lasting_rise
    if lasting <= replicas:
        return case.stays(target, "Stabilizing", _lasting(message, policy.up))
    # The minimum recommendation of the whole window.
    step_left = policy.up.max_step - _moved(memory.grown, case.now, policy.up.period.seconds)
    target = min(target, lasting, replicas + max(0, step_left))
    if target <= replicas:
        return case.stays(target, "Stepping", f"{message} The maximum step is {policy.up.max_step}.")
    return ScalingDecision(target, target, reason, message)


def _shrinkage(case: _Case, reason: str, message: str) -> ScalingDecision:
    policy, memory, sample, replicas = case.policy, case.memory, case.sample, case.sample.replicas
    if replicas > policy.most:
        return ScalingDecision(policy.most, policy.most, "AtMaximum", "The replicas exceed the maximum.")
    if sample.rolling:
        return case.stays(replicas, "RollingOut", "A rollout is in progress.")
    if reason == "Idle":
        # No requests for a whole window. Routers hold the next request until a worker is ready.
        return ScalingDecision(policy.least, policy.least, reason, message)
    lasting = memory.windows.lasting_fall(case.now, policy.down.stabilization_window.seconds)
    if lasting is None or lasting >= replicas:
        return case.stays(replicas, "Stabilizing", _lasting(message, policy.down))
    # Checked at the time of the change only: over a whole window some request always queues.
    if not sample.queued.zero:
        queued = sample.queued
        what = queued.why if queued.value is None else f"{queued.value:.0f} requests are queued"
        return case.stays(replicas, "Queued", f"Cannot remove a worker: {what}.")
    step_left = policy.down.max_step - _moved(memory.shrunk, case.now, policy.down.period.seconds)
    target = max(lasting, policy.least, replicas - max(0, step_left))
    if target >= replicas:
        return case.stays(replicas, "Stepping", f"{message} The maximum step is {policy.down.max_step}.")
    return ScalingDecision(target, target, reason, message)


def _lasting(message: str, limits: ScaleUp | ScaleDown) -> str:
    return f"{message} That must last for {limits.stabilization_window.seconds:g} s."


def _moved(moves: tuple[tuple[float, int], ...], now: float, period_s: float) -> int:
    return sum(count for time, count in moves if time > now - period_s)


def _bounded(policy: ScalingPolicy, replicas: int) -> int:
    return max(policy.least, min(replicas, policy.most))
