"""
How many workers one role is to have: a pure function of policy, memory, observation and time.

Three answers are weighed. What the demand needs, forecast over the time that a worker takes to start. What
the present says: workers that are too full, or clients that wait for too long. And whether one worker less
would still do. A rise has to last for half a minute and a fall for five, and whatever is not known never
makes fewer: who cannot see shrinks nothing.
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
"""Of its capacity that a worker is to be used at."""

HIGH = 0.8
"""Of a worker's room, above which it is too full."""

SHRINK = 0.7
"""Of the others' room, below which it must stay when one worker goes."""

LATENCY_SHRINK = 0.8
"""Of the objective, likewise."""

AT_WORK = 0.5
"""Of the workers that the demand needs, from which on slow tokens are the fault of their number."""

TOLERANCE = 0.1
"""By which the need may exceed what is there: noise is no need."""

BACKLOG_DRAIN_S = 300.0
"""In which what waits is to be worked off."""

SETTLED_S = 60.0
"""After a worker became ready, before what one sees is what it does: one dose at a time."""

PENDING_S = 900.0
"""
A pod that stays unschedulable for longer stops further growth. A node autoscaler needs several minutes for
a node with accelerators; the Kubernetes cluster autoscaler itself gives up on a node after 15 minutes.
"""

MOST_DOSE = 2.0
"""Times the ready workers that overload alone may ask for, where the need is unknown."""

DecisionAndMemory = tuple[ScalingDecision, RoleMemory]


def decide(policy: ScalingPolicy, memory: RoleMemory, sample: RoleSample, now: float) -> DecisionAndMemory:
    """The next number of workers, and what is to be remembered. `now`: seconds of any steady clock."""
    memory = _noted(memory, sample, now)
    if sample.replicas == 0 and policy.most and sample.held.above(0):
        return _woken(policy, memory, sample, now)
    if not (sample.demand.known or sample.backlog.known or sample.utilisation.known or sample.latency.known):
        return _blind(policy, memory, sample, now)
    memory = replace(memory, blind_since=None)
    need = _need(memory, sample)
    raw, reason, message = _raw(policy, memory, sample, need, now)
    windows = memory.windows.with_one(
        now, raw, policy.up.stabilization_window.seconds, policy.down.stabilization_window.seconds
    )
    memory = replace(memory, windows=windows)
    pressure = (need if need is not None else float(raw)) / max(1, sample.ready)
    bounded = _bounded(policy, raw)
    if bounded > sample.replicas:
        made = _growth(policy, memory, sample, now, bounded, reason, message)
    elif bounded < sample.replicas:
        made = _shrinkage(policy, memory, sample, now, reason, message)
    else:
        at = "AtMinimum" if raw < bounded else "AtMaximum" if raw > bounded else reason
        made = ScalingDecision(bounded, raw, at, message)
    limited = made.limited or ("AtMaximum" if raw > policy.most else "")
    bound = _bound(policy, sample, reason)
    made = replace(made, replicas=_bounded(policy, made.replicas), raw=raw, limited=limited, bound=bound)
    return _remembered(memory, sample, replace(made, pressure=pressure), now)


def utilisation(policy: ScalingPolicy, memory: RoleMemory, sample: RoleSample) -> Measurement:
    """How full the workers are, 0 to 1 and more: by their room, or by what waits before them."""
    if policy.queue_s is None:
        return sample.utilisation
    worker = capacity(memory, sample)
    if not sample.backlog.known or not sample.ready:
        return unknown("nothing is known of what waits" if sample.ready else "no worker is ready")
    if sample.backlog.zero:
        return sample.backlog
    if worker is None:
        return unknown("nothing is known of what a worker can do")
    assert sample.backlog.value is not None
    return Measurement.of(sample.backlog.value / (worker * policy.queue_s * sample.ready))


def capacity(memory: RoleMemory, sample: RoleSample) -> float | None:
    """Tokens a second of one worker: by a profile, or as far as was learned."""
    return sample.size.tokens_per_s if sample.size and sample.size.tokens_per_s else memory.capacity.value


def longest_wait(policy: ScalingPolicy, sample: RoleSample) -> tuple[Measurement, float]:
    """What clients wait for the longest against its objective: the wait, and the objective, in seconds."""
    if policy.first_token_s is None or not sample.first_token.known:
        return sample.latency, policy.objective_s
    first = sample.first_token, policy.first_token_s
    if not sample.latency.known:
        return first
    token = sample.latency, policy.objective_s
    return max(token, first, key=lambda one: (one[0].value or 0.0) / one[1])


def _noted(memory: RoleMemory, sample: RoleSample, now: float) -> RoleMemory:
    """What is learned from this look."""
    capacity = memory.capacity.learned(sample.rate.value)
    demand = tuple(sample for sample in memory.demand if sample[0] > now - TREND_S)
    if sample.demand.value is not None:
        demand = (*demand, (now, sample.demand.value))
    grown = memory.ready is not None and sample.ready > memory.ready
    since = now if grown else memory.ready_since
    return replace(memory, capacity=capacity, demand=demand, ready=sample.ready, ready_since=since)


def _need(memory: RoleMemory, sample: RoleSample) -> float | None:
    """Workers that the demand needs, as a fraction; None if demand or capacity are not known."""
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


def _raw(
    policy: ScalingPolicy, memory: RoleMemory, sample: RoleSample, need: float | None, now: float
) -> tuple[int, str, str]:
    """What this moment asks for, whatever was before: number, word and sentence."""
    there = sample.replicas
    full = utilisation(policy, memory, sample)
    up, up_reason, up_message = _overload(policy, memory, sample, full, need, now)
    # What waits for too long is no noise.
    enough = there if full.above(HIGH) else there * (1 + TOLERANCE)
    if need is not None and need > enough and math.ceil(need) >= up:
        return math.ceil(need), "Demand", f"The demand needs {need:.1f} workers{_by_profile(sample)}."
    if up > there:
        return up, up_reason, up_message
    asleep = not (there or sample.demand.above(0) or sample.backlog.above(0))
    if asleep or _idle(policy, memory, sample, now):
        return 0, "Idle", "No request has come for long enough."
    if need is None:
        wished = there - 1
    elif need > there:
        wished = there
    else:
        wished = math.ceil(need)
    wished = max(wished, 1)
    if wished >= there:
        return max(there, 1), "Steady", "There are as many as are needed."
    blocking = _in_the_way(policy, sample, full, there)
    if blocking:
        return there, "Steady", f"No worker goes: {blocking}."
    return wished, "Spare", f"{wished} would do."


def _by_profile(sample: RoleSample) -> str:
    if sample.size is None or not sample.size.tokens_per_s:
        return ""
    return f" of {sample.size.tokens_per_s:.0f} tokens/s each ({sample.size.bound})"


def _bound(policy: ScalingPolicy, sample: RoleSample, reason: str) -> Bound | None:
    """What one worker meets first: as it was seen now, or as a profile has it."""
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
    """What too full workers or too long waits ask for; 0 if nothing does."""
    starting = sample.ready < sample.replicas
    if not sample.replicas or now - memory.ready_since < SETTLED_S or (starting and need is not None):
        return 0, "", ""
    if full.above(HIGH):
        assert full.value is not None
        message = (
            f"The workers are {full.value:.0%} full{f' ({sample.tightest})' if sample.tightest else ''}."
        )
        if need is not None:  # which this only corrects
            return sample.replicas + 1, "Saturated", message
        # Starting workers count: the ready ones say how many are needed in all.
        wished = math.ceil(sample.ready * min(full.value / HIGH, MOST_DOSE))
        return (wished if starting else max(wished, sample.replicas + 1)), "Saturated", message
    if starting:
        return 0, "", ""
    # Where nothing waits, long prompts are slow by themselves, or those who waited have been served since:
    # another worker would make none of them faster.
    least = HIGH if policy.queue_s is not None else AT_WORK
    working = full.above(0.1) or (need is not None and need > least * sample.replicas) or not full.known
    wait, objective_s = longest_wait(policy, sample)
    if wait.above(objective_s) and working:
        message = f"Clients wait for {wait.value:.3g} s; {objective_s:.3g} s is wished for."
        return sample.replicas + 1, "LatencyHigh", message
    return 0, "", ""


def _in_the_way(policy: ScalingPolicy, sample: RoleSample, full: Measurement, there: int) -> str:
    """Why one worker less might not do; empty if it surely would."""
    for name, reading in (
        ("the demand", sample.demand),
        ("the backlog", sample.backlog),
        ("how full they are", full),
    ):
        if not reading.known:
            return f"{name} is unknown ({reading.why})"
    waits = (sample.latency,) if policy.first_token_s is None else (sample.latency, sample.first_token)
    for one in waits:
        if not one.known and not sample.requests.zero:
            return f"the latency is unknown ({one.why})"
    if sample.silent:
        return f"{sample.silent} workers or routers report no metrics"
    if there == 1:
        return ""
    more = there / (there - 1)
    if not full.below(SHRINK / more):
        return "the others would be too full"
    wait, objective_s = longest_wait(policy, sample)
    if wait.known and not wait.below(LATENCY_SHRINK * objective_s / more):
        return "clients would wait for too long"
    return ""


def _idle(policy: ScalingPolicy, memory: RoleMemory, sample: RoleSample, now: float) -> bool:
    """Whether nobody has asked for anything for so long that no worker is needed."""
    since = _idle_since(memory, sample, now)
    return policy.least == 0 and since is not None and now - since >= policy.zero_after_s


def _idle_since(memory: RoleMemory, sample: RoleSample, now: float) -> float | None:
    nothing = all(
        one.zero for one in (sample.demand, sample.backlog, sample.requests, sample.held, sample.queued)
    )
    if not nothing or sample.silent:
        return None
    return now if memory.idle_since is None else memory.idle_since


def _woken(policy: ScalingPolicy, memory: RoleMemory, sample: RoleSample, now: float) -> DecisionAndMemory:
    """From zero, at once: somebody waits."""
    replicas = _bounded(policy, max(1, policy.least))
    message = f"{sample.held.value:.0f} requests wait for a worker."
    made = ScalingDecision(replicas, replicas, "FromZero", message, pressure=math.inf)
    windows = memory.windows.with_one(
        now, replicas, policy.up.stabilization_window.seconds, policy.down.stabilization_window.seconds
    )
    return _remembered(replace(memory, windows=windows), sample, made, now)


def _blind(policy: ScalingPolicy, memory: RoleMemory, sample: RoleSample, now: float) -> DecisionAndMemory:
    """Nothing is known: all stays, and after a while the number that somebody has set for this case."""
    since = now if memory.blind_since is None else memory.blind_since
    # In the windows it counts as needing what is there: after it, no worker goes for a whole window.
    windows = memory.windows.with_one(
        now, sample.replicas, policy.up.stabilization_window.seconds, policy.down.stabilization_window.seconds
    )
    memory = replace(memory, windows=windows, blind_since=since)
    wished, fallback = sample.replicas, policy.fallback
    long = now - since > policy.loss.hold_duration.seconds and fallback is not None
    if long and fallback is not None and policy.loss.policy != "Hold":
        wished = fallback if policy.loss.policy == "Fallback" else max(wished, fallback)
        message = f"Nothing was measured for {now - since:.0f} s: {sample.demand.why}."
        made = ScalingDecision(_bounded(policy, wished), wished, "MetricsFallback", message, "Fallback")
    else:
        message = f"Nothing is measured, so that nothing changes: {sample.demand.why}."
        made = ScalingDecision(_bounded(policy, wished), wished, "MetricsHeld", message, "Held")
    return _remembered(memory, sample, replace(made, pressure=1.0), now)


def _growth(
    policy: ScalingPolicy,
    memory: RoleMemory,
    sample: RoleSample,
    now: float,
    wished: int,
    reason: str,
    message: str,
) -> ScalingDecision:
    there = sample.replicas
    if sample.pending_s > PENDING_S:
        waited = f"A worker has found no place in the cluster for {sample.pending_s:.0f} s."
        return ScalingDecision(there, wished, "CapacityExhausted", waited, limited="CapacityExhausted")
    if sample.capped:
        return ScalingDecision(there, wished, "OtherRole", sample.capped, limited="OtherRole")
    wait, objective_s = longest_wait(policy, sample)
    if sample.rolling and not wait.above(objective_s):
        return ScalingDecision(
            there, wished, "RollingOut", "A rollout is under way; clients do not wait for long."
        )
    window = policy.up.stabilization_window.seconds
    lasting = memory.windows.lasting_rise
    if lasting <= there:
        return ScalingDecision(there, wished, "Stabilizing", f"{message} That has to last for {window} s.")
    # As many as were needed at the least in all of the window.
    room = policy.up.max_step - _moved(memory.grown, now, policy.up.period.seconds)
    wished = min(wished, lasting, there + max(0, room))
    if wished <= there:
        return ScalingDecision(
            there, wished, "Stepping", f"{message} It grows by {policy.up.max_step} at a time."
        )
    return ScalingDecision(wished, wished, reason, message)


def _shrinkage(
    policy: ScalingPolicy, memory: RoleMemory, sample: RoleSample, now: float, reason: str, message: str
) -> ScalingDecision:
    there = sample.replicas
    if sample.replicas > policy.most:
        return ScalingDecision(policy.most, policy.most, "AtMaximum", "It has more than its maximum.")
    if sample.rolling:
        return ScalingDecision(there, there, "RollingOut", "A rollout is under way.")
    if reason == "Idle":
        # Nobody has asked for a whole window, and who comes next is held until he is served.
        return ScalingDecision(policy.least, policy.least, reason, message)
    window = policy.down.stabilization_window.seconds
    lasting = memory.windows.lasting_fall(now, window)
    if lasting is None or lasting >= there:
        return ScalingDecision(there, there, "Stabilizing", f"{message} That has to last for {window} s.")
    # Checked at the moment of the change and not over the window, in which some request always queues.
    if not sample.queued.zero:
        what = (
            sample.queued.why
            if sample.queued.value is None
            else f"{sample.queued.value:.0f} requests are queued"
        )
        return ScalingDecision(there, there, "Queued", f"No worker goes: {what}.")
    room = policy.down.max_step - _moved(memory.shrunk, now, policy.down.period.seconds)
    wished = max(lasting, policy.least, there - max(0, room))
    if wished >= there:
        return ScalingDecision(
            there, there, "Stepping", f"{message} It shrinks by {policy.down.max_step} at a time."
        )
    return ScalingDecision(wished, wished, reason, message)


def _remembered(
    memory: RoleMemory, sample: RoleSample, made: ScalingDecision, now: float
) -> DecisionAndMemory:
    """What was decided is in the memory from here on, whether or not somebody carries it out."""
    grown, shrunk = memory.grown, memory.shrunk
    if made.replicas > sample.replicas:
        grown = (*grown, (now, made.replicas - sample.replicas))[-64:]
    elif made.replicas < sample.replicas:
        shrunk = (*shrunk, (now, sample.replicas - made.replicas))[-64:]
    idle = _idle_since(memory, sample, now)
    return made, replace(memory, grown=grown, shrunk=shrunk, idle_since=idle)


def _moved(moves: tuple[tuple[float, int], ...], now: float, period_s: float) -> int:
    return sum(count for time, count in moves if time > now - period_s)


def _bounded(policy: ScalingPolicy, replicas: int) -> int:
    return max(policy.least, min(replicas, policy.most))
