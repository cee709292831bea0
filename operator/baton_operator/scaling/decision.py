"""
The desired number of workers of one role: a pure function of policy, memory, sample and time.

Three inputs count: the need of the demand forecast for the time when a new worker is ready, present
overload, and whether one worker less would suffice. Full workers or late responses are overload. A rise has
to last for half a minute and a fall for five minutes. Without data a role never shrinks.
"""

from __future__ import annotations

import math
from dataclasses import replace

from baton_operator.kinds.role_scaler import Bound
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


def decide(policy: ScalingPolicy, memory: RoleMemory, sample: RoleSample, now: float) -> DecisionAndMemory:
    """Return the decision and the new memory. `now`: seconds of any steady clock."""
    memory = _with_sample(memory, sample, now)
    if sample.replicas == 0 and policy.most and sample.held.above(0):
        return _from_zero(policy, memory, sample, now)
    if not (
        sample.demand.has_value
        or sample.backlog.has_value
        or sample.utilisation.has_value
        or sample.latency.has_value
    ):
        return _without_metrics(policy, memory, sample, now)
    memory = replace(memory, blind_since=None)
    need = _need(memory, sample)
    raw, reason, message = _recommendation(policy, memory, sample, need, now)
    windows = memory.windows.with_one(
        now, raw, policy.up.stabilization_window.seconds, policy.down.stabilization_window.seconds
    )
    memory = replace(memory, windows=windows)
    pressure = (need if need is not None else float(raw)) / max(1, sample.ready)
    bounded = _bounded(policy, raw)
    if bounded > sample.replicas:
        decision = _growth(policy, memory, sample, now, bounded, reason, message)
    elif bounded < sample.replicas:
        decision = _shrinkage(policy, memory, sample, now, reason, message)
    else:
        at = "AtMinimum" if raw < bounded else "AtMaximum" if raw > bounded else reason
        decision = ScalingDecision(bounded, raw, at, message)
    limited = decision.limited or ("AtMaximum" if raw > policy.most else "")
    bound = _bound(policy, sample, reason)
    decision = replace(
        decision, replicas=_bounded(policy, decision.replicas), raw=raw, limited=limited, bound=bound
    )
    return _with_decision(memory, sample, replace(decision, pressure=pressure), now)


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


def _recommendation(
    policy: ScalingPolicy, memory: RoleMemory, sample: RoleSample, need: float | None, now: float
) -> tuple[int, str, str]:
    """Return the recommendation of this sample alone: workers, reason and message."""
    replicas = sample.replicas
    full = utilisation(policy, memory, sample)
    up, up_reason, up_message = _overload(policy, memory, sample, full, need, now)
    # Overload is never noise.
    enough = replicas if full.above(HIGH) else replicas * (1 + TOLERANCE)
    if need is not None and need > enough and math.ceil(need) >= up:
        return math.ceil(need), "Demand", f"The demand needs {need:.1f} workers{_by_profile(sample)}."
    if up > replicas:
        return up, up_reason, up_message
    asleep = not (replicas or sample.demand.above(0) or sample.backlog.above(0))
    if asleep or _idle(policy, memory, sample, now):
        return 0, "Idle", "No requests arrived for the configured time."
    if need is None:
        target = replicas - 1
    elif need > replicas:
        target = replicas
    else:
        target = math.ceil(need)
    target = max(target, 1)
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


def _overload(
    policy: ScalingPolicy,
    memory: RoleMemory,
    sample: RoleSample,
    full: Measurement,
    need: float | None,
    now: float,
) -> tuple[int, str, str]:
    """Return the recommendation from overload: workers, reason and message; 0 without overload."""
    starting = sample.ready < sample.replicas
    if not sample.replicas or now - memory.ready_since < SETTLED_S or (starting and need is not None):
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


def _idle(policy: ScalingPolicy, memory: RoleMemory, sample: RoleSample, now: float) -> bool:
    """Return whether there were no requests for so long that no worker is needed."""
    since = _idle_since(memory, sample, now)
    return policy.least == 0 and since is not None and now - since >= policy.zero_after_s


def _idle_since(memory: RoleMemory, sample: RoleSample, now: float) -> float | None:
    nothing = all(
        one.zero for one in (sample.demand, sample.backlog, sample.requests, sample.held, sample.queued)
    )
    if not nothing or sample.silent:
        return None
    return now if memory.idle_since is None else memory.idle_since


def _from_zero(
    policy: ScalingPolicy, memory: RoleMemory, sample: RoleSample, now: float
) -> DecisionAndMemory:
    """Scale from zero immediately: requests wait."""
    replicas = _bounded(policy, max(1, policy.least))
    message = f"{sample.held.value:.0f} requests wait for a worker."
    decision = ScalingDecision(replicas, replicas, "FromZero", message, pressure=math.inf)
    windows = memory.windows.with_one(
        now, replicas, policy.up.stabilization_window.seconds, policy.down.stabilization_window.seconds
    )
    return _with_decision(replace(memory, windows=windows), sample, decision, now)


def _without_metrics(
    policy: ScalingPolicy, memory: RoleMemory, sample: RoleSample, now: float
) -> DecisionAndMemory:
    """Without metrics, keep the replicas; after a while use the fallback of the spec."""
    since = now if memory.blind_since is None else memory.blind_since
    # Recorded as need of the current replicas, so no worker is removed for a whole window after it.
    windows = memory.windows.with_one(
        now, sample.replicas, policy.up.stabilization_window.seconds, policy.down.stabilization_window.seconds
    )
    memory = replace(memory, windows=windows, blind_since=since)
    target, fallback = sample.replicas, policy.fallback
    long = now - since > policy.loss.hold_duration.seconds and fallback is not None
    if long and fallback is not None and policy.loss.policy != "Hold":
        target = fallback if policy.loss.policy == "Fallback" else max(target, fallback)
        message = f"No metrics for {now - since:.0f} s: {sample.demand.why}."
        decision = ScalingDecision(_bounded(policy, target), target, "MetricsFallback", message, "Fallback")
    else:
        message = f"No metrics, so the replicas stay: {sample.demand.why}."
        decision = ScalingDecision(_bounded(policy, target), target, "MetricsHeld", message, "Held")
    return _with_decision(memory, sample, replace(decision, pressure=1.0), now)


def _growth(
    policy: ScalingPolicy,
    memory: RoleMemory,
    sample: RoleSample,
    now: float,
    target: int,
    reason: str,
    message: str,
) -> ScalingDecision:
    replicas = sample.replicas
    if sample.pending_s > PENDING_S:
        waited = f"A worker has been unschedulable for {sample.pending_s:.0f} s."
        return ScalingDecision(replicas, target, "CapacityExhausted", waited, limited="CapacityExhausted")
    if sample.capped:
        return ScalingDecision(replicas, target, "OtherRole", sample.capped, limited="OtherRole")
    wait, objective_s = longest_wait(policy, sample)
    if sample.rolling and not wait.above(objective_s):
        return ScalingDecision(
            replicas, target, "RollingOut", "A rollout is in progress, and the latency meets its objective."
        )
    window = policy.up.stabilization_window.seconds
    lasting = memory.windows.lasting_rise
    if lasting <= replicas:
        return ScalingDecision(replicas, target, "Stabilizing", f"{message} That must last for {window:g} s.")
    # The minimum recommendation of the whole window.
    step_left = policy.up.max_step - _moved(memory.grown, now, policy.up.period.seconds)
    target = min(target, lasting, replicas + max(0, step_left))
    if target <= replicas:
        return ScalingDecision(
            replicas, target, "Stepping", f"{message} The maximum step is {policy.up.max_step}."
        )
    return ScalingDecision(target, target, reason, message)


def _shrinkage(
    policy: ScalingPolicy, memory: RoleMemory, sample: RoleSample, now: float, reason: str, message: str
) -> ScalingDecision:
    replicas = sample.replicas
    if sample.replicas > policy.most:
        return ScalingDecision(policy.most, policy.most, "AtMaximum", "The replicas exceed the maximum.")
    if sample.rolling:
        return ScalingDecision(replicas, replicas, "RollingOut", "A rollout is in progress.")
    if reason == "Idle":
        # No requests for a whole window. Routers hold the next request until a worker is ready.
        return ScalingDecision(policy.least, policy.least, reason, message)
    window = policy.down.stabilization_window.seconds
    lasting = memory.windows.lasting_fall(now, window)
    if lasting is None or lasting >= replicas:
        return ScalingDecision(
            replicas, replicas, "Stabilizing", f"{message} That must last for {window:g} s."
        )
    # Checked at the time of the change only: over a whole window some request always queues.
    if not sample.queued.zero:
        what = (
            sample.queued.why
            if sample.queued.value is None
            else f"{sample.queued.value:.0f} requests are queued"
        )
        return ScalingDecision(replicas, replicas, "Queued", f"Cannot remove a worker: {what}.")
    step_left = policy.down.max_step - _moved(memory.shrunk, now, policy.down.period.seconds)
    target = max(lasting, policy.least, replicas - max(0, step_left))
    if target >= replicas:
        return ScalingDecision(
            replicas, replicas, "Stepping", f"{message} The maximum step is {policy.down.max_step}."
        )
    return ScalingDecision(target, target, reason, message)


def _with_decision(
    memory: RoleMemory, sample: RoleSample, decision: ScalingDecision, now: float
) -> DecisionAndMemory:
    """Return the decision and the memory that includes it, whether or not it is written."""
    grown, shrunk = memory.grown, memory.shrunk
    if decision.replicas > sample.replicas:
        grown = (*grown, (now, decision.replicas - sample.replicas))[-64:]
    elif decision.replicas < sample.replicas:
        shrunk = (*shrunk, (now, sample.replicas - decision.replicas))[-64:]
    idle = _idle_since(memory, sample, now)
    return decision, replace(memory, grown=grown, shrunk=shrunk, idle_since=idle)


def _moved(moves: tuple[tuple[float, int], ...], now: float, period_s: float) -> int:
    return sum(count for time, count in moves if time > now - period_s)


def _bounded(policy: ScalingPolicy, replicas: int) -> int:
    return max(policy.least, min(replicas, policy.most))
