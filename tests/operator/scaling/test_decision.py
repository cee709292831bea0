"""One role's decision: a table of named cases, then what always holds."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from baton_operator.kinds.part import Duration
from baton_operator.kinds.service_policies import MetricsLoss
from baton_operator.kinds.worker_role import ScaleUp
from baton_operator.scaling.decision import MOST_DOSE, decide, longest_wait, utilisation
from baton_operator.scaling.history import forecast
from baton_operator.scaling.sample import (
    ZERO,
    Measurement,
    RoleMemory,
    RoleSample,
    ScalingDecision,
    ScalingPolicy,
    WorkerSize,
    unknown,
)

LOST = unknown("Prometheus does not answer")
PREFILL = ScalingPolicy(least=1, most=8, objective_s=2.0, queue_s=2.0)
DECODE = ScalingPolicy(least=1, most=8, objective_s=0.05)
DECODE_ONLY = replace(DECODE, first_token_s=2.0)
"""Decode workers that compute prompts themselves."""
TO_ZERO = replace(PREFILL, least=0, zero_after_s=60.0)

NOW = 100_000.0
CALM: dict[str, Any] = {
    "requests": Measurement.of(5.0),
    "latency": Measurement.of(0.02),
    "utilisation": Measurement.of(0.5),
}


def observation(replicas: int = 4, **changes: Any) -> RoleSample:
    """A role that is used as it should be, unless a test sets other signals."""
    fitting: dict[str, Any] = {
        "replicas": replicas,
        "ready": replicas,
        "demand": Measurement.of(3000.0),
        "backlog": ZERO,
        "rate": Measurement.of(1000.0),
        **CALM,
    }
    return RoleSample(**{**fitting, **changes})


def memory(**changes: Any) -> RoleMemory:
    return replace(RoleMemory.new(NOW - 10_000, capacity=1000.0, startup_s=60.0), **changes)


def settled(
    policy: ScalingPolicy, sample: RoleSample, remembered: RoleMemory | None = None, seconds: float = 360
) -> ScalingDecision:
    """The first decision that changes something while the same is seen for so long, or the last one."""
    remembered = memory() if remembered is None else remembered
    for tick in range(int(seconds // 15) + 1):
        decision, remembered = decide(policy, remembered, sample, NOW + 15 * tick)
        if decision.replicas != sample.replicas:
            break
    return decision


ALL_LOST: dict[str, Any] = {
    "demand": LOST,
    "backlog": LOST,
    "latency": LOST,
    "utilisation": LOST,
    "rate": LOST,
}
NOTHING: dict[str, Any] = {
    "demand": ZERO,
    "requests": ZERO,
    "latency": unknown("no request"),
    "utilisation": ZERO,
}

CASES: dict[str, tuple[ScalingPolicy, RoleSample, int, str]] = {
    "what is needed is there": (PREFILL, observation(), 4, "Steady"),
    "the demand needs more": (PREFILL, observation(demand=Measurement.of(5000.0)), 6, "Demand"),
    "it grows by four at a time": (
        PREFILL, observation(1, demand=Measurement.of(6500.0)), 5, "Demand",
    ),
    "never above its maximum": (PREFILL, observation(7, demand=Measurement.of(99_000.0)), 8, "Demand"),
    "alone, it answers for first tokens too": (
        DECODE_ONLY, observation(first_token=Measurement.of(3.0)), 5, "LatencyHigh",
    ),
    "beside prefill workers it does not": (DECODE, observation(first_token=Measurement.of(3.0)), 4, "Steady"),
    "alone, no worker goes that first tokens need": (
        DECODE_ONLY, observation(demand=Measurement.of(2000.0), first_token=Measurement.of(1.5)), 4, "Steady",
    ),
    "alone, one worker goes where first tokens come soon": (
        DECODE_ONLY, observation(demand=Measurement.of(2000.0), first_token=Measurement.of(0.5)), 3, "Spare",
    ),
    "alone, no worker goes while first tokens are not seen": (
        DECODE_ONLY, observation(demand=Measurement.of(2000.0), first_token=LOST), 4, "Steady",
    ),
    "never below its minimum": (replace(PREFILL, least=3), observation(3, **NOTHING), 3, "AtMinimum"),
    "noise is no need": (PREFILL, observation(demand=Measurement.of(3550.0)), 4, "Steady"),
    "one worker less would do": (PREFILL, observation(demand=Measurement.of(2000.0)), 3, "Spare"),
    "what waits is worked off": (PREFILL, observation(backlog=Measurement.of(400_000.0)), 6, "Demand"),
    "KV blocks are short": (DECODE, observation(utilisation=Measurement.of(0.9)), 5, "Saturated"),
    "KV blocks would be short without one": (
        DECODE, observation(demand=Measurement.of(1000.0), utilisation=Measurement.of(0.6)), 4, "Steady",
    ),
    "clients wait for too long": (DECODE, observation(latency=Measurement.of(0.08)), 5, "LatencyHigh"),
    "long prompts are slow, and nothing waits": (
        PREFILL, observation(demand=Measurement.of(800.0), latency=Measurement.of(9.0)), 4, "Steady",
    ),
    "clients waited for long, and nothing waits any more": (
        PREFILL, observation(demand=Measurement.of(2500.0), latency=Measurement.of(9.0)), 4, "Steady",
    ),
    "clients wait for long, and the workers have hardly any room": (
        PREFILL, observation(demand=Measurement.of(3000.0), latency=Measurement.of(9.0)), 5, "LatencyHigh",
    ),
    "the latency would be too high without one": (
        DECODE, observation(demand=Measurement.of(1000.0), latency=Measurement.of(0.045)), 4, "Steady",
    ),
    "nothing is known": (PREFILL, observation(**ALL_LOST), 4, "MetricsHeld"),
    "the demand is not known": (PREFILL, observation(demand=LOST), 4, "Steady"),
    "the latency is not known": (
        PREFILL, observation(demand=Measurement.of(1000.0), latency=LOST), 4, "Steady",
    ),
    "nothing is heard of one worker": (
        PREFILL, observation(demand=Measurement.of(1000.0), silent=1), 4, "Steady",
    ),
    "the backlog is not known, and the demand needs more": (
        PREFILL, observation(backlog=LOST, demand=Measurement.of(5000.0)), 6, "Demand",
    ),
    "a rollout is under way": (
        PREFILL, observation(demand=Measurement.of(1000.0), rolling=True), 4, "RollingOut",
    ),
    "a rollout is under way and the demand rises": (
        PREFILL, observation(demand=Measurement.of(5000.0), rolling=True), 4, "RollingOut",
    ),
    "a rollout is under way and clients wait": (
        PREFILL,
        observation(demand=Measurement.of(5000.0), latency=Measurement.of(3.0), rolling=True),
        6,
        "Demand",
    ),
    "the cluster has no place": (
        PREFILL, observation(demand=Measurement.of(5000.0), pending_s=1000.0), 4, "CapacityExhausted",
    ),
    "a node is on its way": (
        PREFILL, observation(demand=Measurement.of(5000.0), pending_s=600.0), 6, "Demand"
    ),
    "nobody asks, and it may not go to zero": (PREFILL, observation(1, **NOTHING), 1, "Steady"),
    "nobody asks": (TO_ZERO, observation(1, **NOTHING), 0, "Idle"),
    "nobody seems to ask": (TO_ZERO, observation(1, **{**NOTHING, "requests": LOST}), 1, "Steady"),
    "nobody asks, and one worker reports nothing": (
        TO_ZERO, observation(2, **NOTHING, silent=1), 2, "Steady",
    ),
    "nobody asks, and something is queued": (
        TO_ZERO, observation(1, **NOTHING, queued=Measurement.of(1.0)), 1, "Steady",
    ),
    "one worker less would do, and something is queued": (
        PREFILL, observation(demand=Measurement.of(2000.0), queued=Measurement.of(1.0)), 4, "Queued",
    ),
    "one worker less would do, and the queue is not known": (
        PREFILL, observation(demand=Measurement.of(2000.0), queued=LOST), 4, "Queued",
    ),
    "somebody is still served": (
        TO_ZERO, observation(1, **{**NOTHING, "requests": Measurement.of(1.0)}), 1, "Steady",
    ),
    "at zero, and nobody asks": (TO_ZERO, observation(0, **NOTHING), 0, "Idle"),
    "at zero, and nothing is known": (TO_ZERO, observation(0, **ALL_LOST), 0, "MetricsHeld"),
    "at zero, and somebody waits": (
        TO_ZERO, observation(0, **{**ALL_LOST, "held": Measurement.of(2.0)}), 1, "FromZero",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "sample", "replicas", "reason"), CASES.values(), ids=CASES)
def test_decide_case_gives_replicas_and_reason(
    policy: ScalingPolicy, sample: RoleSample, replicas: int, reason: str
) -> None:
    decision = settled(policy, sample)
    assert (decision.replicas, decision.reason) == (replicas, reason), decision.message
    assert decision.message


def test_decide_rise_waits_half_a_minute() -> None:
    calm, busy = observation(), observation(demand=Measurement.of(5000.0))
    _, remembered = decide(PREFILL, memory(), calm, NOW)
    sample = []
    for tick in range(1, 4):
        decision, remembered = decide(PREFILL, remembered, busy, NOW + 15 * tick)
        sample.append((decision.replicas, decision.reason))
    assert sample == [(4, "Stabilizing"), (6, "Demand"), (6, "Demand")]


def test_decide_fall_waits_five_minutes_and_goes_one_by_one() -> None:
    _, remembered = decide(PREFILL, memory(), observation(), NOW)
    replicas, moves = 4, []
    for tick in range(1, 40):
        sample = observation(replicas, demand=Measurement.of(500.0))
        decision, remembered = decide(PREFILL, remembered, sample, NOW + 15 * tick)
        if decision.replicas != replicas:
            moves.append(15 * tick)
        replicas = decision.replicas
    assert replicas == 1
    assert moves == [300, 360, 420]


def test_decide_new_memory_shrinks_nothing_for_a_window() -> None:
    assert _first_shrink(RoleMemory.new(NOW, capacity=1000.0), 0) >= 270


def test_decide_metrics_return_first_shrink_is_a_window_later() -> None:
    _, remembered = decide(PREFILL, memory(), observation(4, **ALL_LOST), NOW)
    assert _first_shrink(remembered, 15) == 300


def _first_shrink(remembered: RoleMemory, after: float) -> float:
    """Seconds until a worker goes that is not needed."""
    sample, time = observation(demand=Measurement.of(500.0)), after
    while True:
        decision, remembered = decide(PREFILL, remembered, sample, NOW + time)
        if decision.replicas < sample.replicas:
            return time
        time += 15


@pytest.mark.parametrize(
    ("then", "fallback", "replicas", "reason"),
    [
        ("Hold", 6, 4, "MetricsHeld"),
        ("Fallback", 2, 2, "MetricsFallback"),
        ("FallbackIfHigher", 2, 4, "MetricsFallback"),
        ("FallbackIfHigher", 6, 6, "MetricsFallback"),
        ("Fallback", None, 4, "MetricsHeld"),
    ],
)
def test_decide_long_metrics_loss_follows_policy(
    then: Any, fallback: int | None, replicas: int, reason: str
) -> None:
    policy = replace(PREFILL, fallback=fallback, loss=MetricsLoss(hold_duration=Duration("5m"), policy=then))
    sample = observation(4, **ALL_LOST)
    assert settled(policy, sample, seconds=300).reason == "MetricsHeld"
    decision = settled(policy, sample, seconds=330)
    assert (decision.replicas, decision.reason) == (replicas, reason)
    assert decision.source == ("Held" if reason == "MetricsHeld" else "Fallback")


def test_decide_long_idle_scales_to_zero_at_once() -> None:
    decision = settled(TO_ZERO, observation(4, **NOTHING), RoleMemory.new(NOW, capacity=1000.0), 75)
    assert (decision.replicas, decision.reason) == (0, "Idle")


def test_decide_full_workers_wait_for_starting_workers() -> None:
    full = {"utilisation": Measurement.of(0.95), "demand": Measurement.of(3000.0)}
    starting = observation(5, ready=4, **full)
    _, remembered = decide(DECODE, memory(), observation(4), NOW)
    assert settled(DECODE, starting, remembered, 60).replicas == 5
    ready = replace(starting, ready=5)
    decision, remembered = decide(DECODE, remembered, ready, NOW + 75)
    assert decision.replicas == 5, "it has only just become ready"
    assert settled(DECODE, ready, remembered, 180).replicas == 6


def test_decide_new_role_learns_capacity_while_busy() -> None:
    remembered = RoleMemory.new(NOW)
    busy = observation(1, demand=Measurement.of(3000.0), rate=unknown("no worker was busy"))
    decision, remembered = decide(PREFILL, remembered, busy, NOW)
    assert decision.replicas == 1 and remembered.capacity.value is None
    decision, remembered = decide(PREFILL, remembered, replace(busy, rate=Measurement.of(1000.0)), NOW + 15)
    assert decision.raw == 4


# --- What the status says ---

of = Measurement.of

UNLEARNT = RoleMemory.new(NOW - 10_000)
"""Of a role whose workers' capacity is not known."""

STATUS: dict[str, tuple[ScalingPolicy, RoleSample, RoleMemory, ScalingDecision]] = {
    "what is needed is there": (
        PREFILL, observation(), memory(),
        ScalingDecision(4, 4, "Steady", "The number of workers is sufficient.", pressure=0.882),
    ),
    "a profile says what a worker does": (
        PREFILL, observation(size=WorkerSize(500.0, "KVBlocks")), memory(),
        ScalingDecision(8, 8, "Demand", "The demand needs 7.1 workers of 500 tokens/s each (KVBlocks).",
                 bound="KVBlocks", pressure=1.765),
    ),
    "by its profile no worker keeps the objectives": (
        PREFILL, observation(demand=of(5000.0), size=WorkerSize(0.0, "InterTokenLatency")), memory(),
        ScalingDecision(6, 6, "Demand", "The demand needs 5.9 workers.", bound="InterTokenLatency",
                        pressure=1.471),
    ),
    "it needs more than its maximum": (
        PREFILL, observation(8, demand=of(99_000.0)), memory(),
        ScalingDecision(8, 117, "AtMaximum", "The demand needs 116.5 workers.", limited="AtMaximum",
                 pressure=14.559),
    ),
    "it needs its maximum": (
        PREFILL, observation(8, demand=of(6500.0)), memory(),
        ScalingDecision(8, 8, "Steady", "The number of workers is sufficient.", pressure=0.956),
    ),
    "it has more than its maximum": (
        PREFILL, observation(9), memory(),
        ScalingDecision(8, 4, "AtMaximum", "The replicas exceed the maximum.", pressure=0.392),
    ),
    "it has its maximum, and one less would do": (
        replace(PREFILL, most=4), observation(demand=of(2000.0)), memory(),
        ScalingDecision(3, 3, "Spare", "3 would suffice.", pressure=0.588),
    ),
    "it is below its minimum, and a pod finds no place": (
        replace(PREFILL, least=3), observation(1, pending_s=901.0), memory(),
        ScalingDecision(3, 4, "CapacityExhausted", "A worker has been unschedulable for 901 s.",
                 limited="CapacityExhausted", pressure=3.529),
    ),
    "a pod may find a place for a quarter of an hour": (
        PREFILL, observation(demand=of(5000.0), pending_s=900.0), memory(),
        ScalingDecision(6, 6, "Demand", "The demand needs 5.9 workers.", pressure=1.471),
    ),
    "another role has to grow first": (
        PREFILL, observation(demand=of(5000.0), capped="Decode workers are full."), memory(),
        ScalingDecision(4, 6, "OtherRole", "Decode workers are full.", limited="OtherRole", pressure=1.471),
    ),
    "a rollout stops growth while clients do not wait": (
        PREFILL, observation(demand=of(5000.0), rolling=True), memory(),
        ScalingDecision(4, 6, "RollingOut", "A rollout is in progress, and the latency meets its objective.",
                        pressure=1.471),
    ),
    "a rollout stops shrinking": (
        PREFILL, observation(demand=of(1000.0), rolling=True), memory(),
        ScalingDecision(4, 2, "RollingOut", "A rollout is in progress.", pressure=0.294),
    ),
    "the KV blocks are used": (
        DECODE, observation(utilisation=of(0.9), tightest="KVBlocks"), memory(),
        ScalingDecision(5, 5, "Saturated", "The workers are 90% full (KVBlocks).", bound="KVBlocks",
                        pressure=0.882),
    ),
    "too much waits before prefill workers": (
        PREFILL, observation(backlog=of(7200.0)), memory(),
        ScalingDecision(5, 5, "Saturated", "The workers are 90% full.", pressure=0.889),
    ),
    "too much waits, and the demand needs as many": (
        PREFILL, observation(demand=of(3400.0), backlog=of(7200.0)), memory(),
        ScalingDecision(5, 5, "Demand", "The demand needs 4.0 workers.", pressure=1.007),
    ),
    "workers are full, and the need is not known": (
        DECODE, observation(demand=LOST, rate=LOST, utilisation=of(1.2)), UNLEARNT,
        ScalingDecision(6, 6, "Saturated", "The workers are 120% full.", pressure=1.5),
    ),
    "tokens are slow, and half of the workers are needed": (
        DECODE,
        observation(demand=of(2000.0), utilisation=of(0.05), latency=of(0.08)),
        memory(),
        ScalingDecision(5, 5, "LatencyHigh", "The latency is 0.08 s; the objective is 0.05 s.",
                 bound="InterTokenLatency", pressure=0.588),
    ),
    "tokens are slow, and the workers are half full": (
        DECODE, observation(demand=of(1000.0), latency=of(0.08)), memory(),
        ScalingDecision(5, 5, "LatencyHigh", "The latency is 0.08 s; the objective is 0.05 s.",
                 bound="InterTokenLatency", pressure=0.294),
    ),
    "prompts wait for too long": (
        PREFILL, observation(demand=of(3000.0), latency=of(9.0)), memory(),
        ScalingDecision(5, 5, "LatencyHigh", "The latency is 9 s; the objective is 2 s.",
                 bound="TimeToFirstToken", pressure=0.882),
    ),
    "first tokens of workers without prefill are late": (
        DECODE_ONLY, observation(first_token=of(3.0)), memory(),
        ScalingDecision(5, 5, "LatencyHigh", "The latency is 3 s; the objective is 2 s.",
                 bound="TimeToFirstToken", pressure=0.882),
    ),
    "the need is not known, and the workers are idle": (
        DECODE, observation(rate=LOST, utilisation=of(0.1), latency=of(0.01)), UNLEARNT,
        ScalingDecision(3, 3, "Spare", "3 would suffice.", pressure=0.75),
    ),
    "nothing is asked for, and the capacity is not known": (
        PREFILL, observation(rate=LOST, **NOTHING), UNLEARNT,
        ScalingDecision(3, 1, "Spare", "1 would suffice.", pressure=0.0),
    ),
    "nothing is asked for any more, and much still waits": (
        PREFILL, observation(1, demand=ZERO, backlog=of(400_000.0)), memory(),
        ScalingDecision(2, 2, "Demand", "The demand needs 1.6 workers.", pressure=1.569),
    ),
    "one of two workers could not do it alone": (
        DECODE, observation(2, demand=of(600.0), utilisation=of(0.6)), memory(),
        ScalingDecision(2, 2, "Steady",
                        "Cannot remove a worker: the other workers would be overloaded.", pressure=0.353),
    ),
    "the others would let clients wait": (
        DECODE, observation(demand=of(1000.0), latency=of(0.045)), memory(),
        ScalingDecision(4, 4, "Steady",
                        "Cannot remove a worker: the latency would be too high.", pressure=0.294),
    ),
    "beside prefill workers first tokens do not matter": (
        DECODE, observation(demand=of(2000.0), first_token=LOST), memory(),
        ScalingDecision(3, 3, "Spare", "3 would suffice.", pressure=0.588),
    ),
    "no demand is known": (
        PREFILL, observation(demand=LOST), memory(),
        ScalingDecision(4, 4, "Steady",
                        f"Cannot remove a worker: the demand is unknown ({LOST.why}).", pressure=1.0),
    ),
    "no backlog is known": (
        PREFILL, observation(demand=of(1000.0), backlog=LOST), memory(),
        ScalingDecision(4, 4, "Steady", f"Cannot remove a worker: the backlog is unknown ({LOST.why}).",
                        pressure=0.294),
    ),
    "no worker is ready": (
        PREFILL, observation(demand=of(1000.0), ready=0), memory(),
        ScalingDecision(4, 4, "Steady",
                        "Cannot remove a worker: the utilization is unknown (no worker is ready).",
                 pressure=1.176),
    ),
    "requests are queued": (
        PREFILL, observation(demand=of(2000.0), queued=of(3.0)), memory(),
        ScalingDecision(4, 3, "Queued", "Cannot remove a worker: 3 requests are queued.", pressure=0.588),
    ),
    "nobody knows what is queued": (
        PREFILL, observation(demand=of(2000.0), queued=LOST), memory(),
        ScalingDecision(4, 3, "Queued", f"Cannot remove a worker: {LOST.why}.", pressure=0.588),
    ),
    "nobody asks": (
        TO_ZERO, observation(1, **NOTHING), memory(),
        ScalingDecision(0, 0, "Idle", "No requests arrived for the configured time.", pressure=0.0),
    ),
    "at zero, something is asked for": (
        TO_ZERO, observation(0, **{**NOTHING, "demand": of(0.5), "rate": LOST}), UNLEARNT,
        ScalingDecision(1, 1, "Steady", "The number of workers is sufficient.", pressure=1.0),
    ),
    "at zero, one request waits": (
        TO_ZERO, observation(0, **{**ALL_LOST, "held": of(1.0)}), memory(),
        ScalingDecision(1, 1, "FromZero", "1 requests wait for a worker.", pressure=math.inf),
    ),
    "nothing is measured": (
        PREFILL, observation(**ALL_LOST), memory(),
        ScalingDecision(4, 4, "MetricsHeld", f"No metrics, so the replicas stay: {LOST.why}.",
                        "Held",
                 pressure=1.0),
    ),
    "nothing has been measured for long": (
        replace(PREFILL, fallback=6), observation(**ALL_LOST), memory(),
        ScalingDecision(6, 6, "MetricsFallback", f"No metrics for 915 s: {LOST.why}.", "Fallback",
                 pressure=1.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "sample", "remembered", "expected"), STATUS.values(), ids=STATUS)
def test_decide_status_says_all_of_it(
    policy: ScalingPolicy, sample: RoleSample, remembered: RoleMemory, expected: ScalingDecision
) -> None:
    decision = settled(policy, sample, remembered, 1000.0)
    assert replace(decision, pressure=expected.pressure) == expected
    assert decision.pressure == pytest.approx(expected.pressure, abs=0.001)


@pytest.mark.parametrize("name", ["demand", "backlog", "utilisation", "latency"])
def test_decide_one_known_reading_is_not_blind(name: str) -> None:
    remembered = {**ALL_LOST, name: of(0.5)}
    assert settled(DECODE, observation(**remembered), seconds=0).reason != "MetricsHeld"


# --- Sequences ---

STEPS: dict[str, tuple[ScalingPolicy, list[RoleSample], list[tuple[int, int, str]]]] = {
    "a rise has to last": (
        PREFILL,
        [observation(), *[observation(demand=of(5000.0))] * 2],
        [(0, 4, "Steady: The number of workers is sufficient."),
         (15, 4, "Stabilizing: The demand needs 5.9 workers. That must last for 30 s."),
         (30, 6, "Demand: The demand needs 5.9 workers.")],
    ),
    "it grows by what was needed all the time": (
        PREFILL,
        [observation(), observation(demand=of(4000.0)), observation(demand=of(6500.0))],
        [(0, 4, "Steady: The number of workers is sufficient."),
         (15, 4, "Stabilizing: The demand needs 4.7 workers. That must last for 30 s."),
         (30, 5, "Demand: The demand needs 7.6 workers.")],
    ),
    "it grows by four in a minute": (
        PREFILL,
        [observation(1, demand=of(6500.0)), *[observation(5, demand=of(6500.0))] * 4],
        [(0, 5, "Demand: The demand needs 7.6 workers."),
         (15, 5, "Stepping: The demand needs 7.6 workers. The maximum step is 4."),
         (30, 5, "Stepping: The demand needs 7.6 workers. The maximum step is 4."),
         (45, 5, "Stepping: The demand needs 7.6 workers. The maximum step is 4."),
         (60, 8, "Demand: The demand needs 7.6 workers.")],
    ),
    "whom it woke counts as what was needed": (
        TO_ZERO,
        [observation(0, **{**ALL_LOST, "held": of(2.0)}), observation(1, demand=of(5000.0))],
        [(0, 1, "FromZero: 2 requests wait for a worker."),
         (15, 1, "Stabilizing: The demand needs 5.9 workers. That must last for 30 s.")],
    ),
    "it is idle after a minute": (
        TO_ZERO,
        [observation(1, **NOTHING)] * 5,
        [*[(time, 1, "Steady: The number of workers is sufficient.") for time in (0, 15, 30, 45)],
         (60, 0, "Idle: No requests arrived for the configured time.")],
    ),
    "it may be idle at once": (
        replace(TO_ZERO, zero_after_s=0.0),
        [observation(1, **NOTHING)],
        [(0, 0, "Idle: No requests arrived for the configured time.")],
    ),
}  # fmt: skip
"""(policy, what is seen every 15 s, and after so many seconds: replicas, reason and message)"""


@pytest.mark.parametrize(("policy", "sample", "expected"), STEPS.values(), ids=STEPS)
def test_decide_looks_one_after_the_other(
    policy: ScalingPolicy, sample: list[RoleSample], expected: list[tuple[int, int, str]]
) -> None:
    remembered, steps = memory(), []
    for tick, one in enumerate(sample):
        decision, remembered = decide(policy, remembered, one, NOW + 15 * tick)
        steps.append((15 * tick, decision.replicas, f"{decision.reason}: {decision.message}"))
    assert steps == expected


def test_decide_fall_goes_by_steps_and_never_below_its_window() -> None:
    """Three workers a minute at most; after the first fall, as many stay as the window has needed."""
    policy = replace(PREFILL, down=PREFILL.down.model_copy(update={"max_step": 3}))
    demands = [3000.0, *[1600.0] * 21, *[100.0] * 22]
    remembered, replicas, moves = memory(), 4, []
    messages: dict[str, int] = {}
    for tick, demand in enumerate(demands):
        sample = observation(replicas, demand=of(demand))
        decision, remembered = decide(policy, remembered, sample, NOW + 15 * tick)
        messages.setdefault(f"{decision.reason}: {decision.message}", 15 * tick)
        if decision.replicas != replicas:
            moves.append((15 * tick, decision.replicas))
        replicas = decision.replicas
    assert moves == [(300, 2), (615, 1)]
    assert messages["Stabilizing: 2 would suffice. That must last for 300 s."] == 15


def test_decide_fall_within_a_period_is_one_step() -> None:
    remembered = memory()
    messages: list[str] = []
    for replicas in (4, 3, 3):
        sample = observation(replicas, demand=of(500.0))
        decision, remembered = decide(PREFILL, remembered, sample, NOW + 15 * len(messages))
        messages.append(f"{decision.reason}: {decision.message}")
    assert messages == ["Spare: 1 would suffice.", *["Stepping: 1 would suffice. The maximum step is 1."] * 2]


def test_decide_falls_of_one_period_add_up() -> None:
    """Of three that may go in a minute one has gone, so that two may follow."""
    policy = replace(PREFILL, down=PREFILL.down.model_copy(update={"max_step": 3}))
    remembered = memory(shrunk=((NOW - 15, 1),))
    decision, remembered = decide(policy, remembered, observation(8, demand=of(500.0)), NOW)
    assert decision.replicas == 6
    decision, _ = decide(policy, remembered, observation(6, demand=of(500.0)), NOW + 50)
    assert decision.replicas == 5


def test_decide_metrics_lost_again_are_held_again() -> None:
    policy, blind = replace(PREFILL, fallback=6), observation(**ALL_LOST)
    decision, remembered = decide(policy, memory(), blind, NOW)
    decision, remembered = decide(policy, remembered, observation(), NOW + 800)
    for time, reason in ((1000, "MetricsHeld"), (1900, "MetricsHeld"), (1901, "MetricsFallback")):
        decision, remembered = decide(policy, remembered, blind, NOW + time)
        assert decision.reason == reason
    busy = observation(6, demand=of(9000.0))
    decision, _ = decide(replace(policy, most=20), remembered, busy, NOW + 1931)
    assert decision.replicas == 8, "the fallback's two count among the four of a minute"


def test_decide_worker_ready_for_a_minute_is_settled() -> None:
    full = observation(utilisation=of(0.9))
    for since, raw in ((59.0, 4), (60.0, 5)):
        decision, _ = decide(DECODE, memory(ready=4, ready_since=NOW - since), full, NOW)
        assert decision.raw == raw


def test_decide_rising_demand_is_forecast_from_five_minutes() -> None:
    """The forecast forgets demand that is older than five minutes, however it compares with the clock."""
    remembered, samples = memory(startup_s=60.0), []
    for tick in range(40):
        demand = 300_000.0 if tick < 19 else 3000.0 + 15.0 * (tick - 19)
        samples.append((NOW + 15 * tick, demand))
        decision, remembered = decide(PREFILL, remembered, observation(demand=of(demand)), NOW + 15 * tick)
    ahead = forecast(samples[-20:], samples[-1][1], 60.0)
    assert ahead == pytest.approx(samples[-1][1] + 60.0)
    assert decision.pressure == pytest.approx(ahead / 0.85 / 1000.0 / 4)


FULLNESS: dict[str, tuple[ScalingPolicy, RoleSample, RoleMemory, Measurement]] = {
    "by their room": (DECODE, observation(utilisation=of(0.3)), memory(), of(0.3)),
    "by what waits": (PREFILL, observation(backlog=of(2000.0)), memory(), of(0.25)),
    "by a profile": (
        PREFILL, observation(backlog=of(2000.0), size=WorkerSize(500.0, "KVBlocks")), memory(),
        of(0.5),
    ),
    "nothing waits": (PREFILL, observation(), UNLEARNT, ZERO),
    "not known": (PREFILL, observation(backlog=LOST), memory(), unknown("the backlog is unknown")),
    "none ready": (PREFILL, observation(ready=0, backlog=LOST), memory(), unknown("no worker is ready")),
    "nothing learned": (
        PREFILL, observation(backlog=of(2000.0)), UNLEARNT,
        unknown("the capacity of a worker is unknown"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "sample", "remembered", "expected"), FULLNESS.values(), ids=FULLNESS)
def test_utilisation_says_how_full_workers_are(
    policy: ScalingPolicy, sample: RoleSample, remembered: RoleMemory, expected: Measurement
) -> None:
    assert utilisation(policy, remembered, sample) == expected


@pytest.mark.parametrize(
    ("token", "first", "expected"),
    [
        (of(0.08), of(2.4), (of(0.08), 0.05)),
        (of(0.04), of(2.4), (of(2.4), 2.0)),
        (ZERO, of(0.5), (of(0.5), 2.0)),
        (LOST, of(0.5), (of(0.5), 2.0)),
        (of(0.04), LOST, (of(0.04), 0.05)),
    ],
)
def test_longest_wait_is_relative_to_its_objective(
    token: Measurement, first: Measurement, expected: tuple[Measurement, float]
) -> None:
    assert longest_wait(DECODE_ONLY, observation(latency=token, first_token=first)) == expected


# --- Laws ---


def any_reading(rng: random.Random, most: float) -> Measurement:
    kind = rng.random()
    return LOST if kind < 0.2 else ZERO if kind < 0.4 else Measurement.of(rng.uniform(0, most))


def any_observation(rng: random.Random, replicas: int) -> RoleSample:
    return RoleSample(
        replicas=replicas,
        ready=rng.randint(0, replicas),
        demand=any_reading(rng, 12_000),
        backlog=any_reading(rng, 500_000),
        latency=any_reading(rng, 5),
        utilisation=any_reading(rng, 1.2),
        rate=any_reading(rng, 2000),
        requests=any_reading(rng, 50),
        held=any_reading(rng, 5),
        queued=any_reading(rng, 20),
        silent=rng.choice((0, 0, 0, 1)),
        pending_s=rng.choice((0.0, 0.0, 1200.0)),
        rolling=rng.random() < 0.1,
    )


def any_policy(rng: random.Random) -> ScalingPolicy:
    least = rng.randint(0, 3)
    policy = rng.choice((PREFILL, DECODE))
    up = ScaleUp(stabilization_window=Duration(rng.choice((0, 30))), max_step=rng.randint(1, 5))
    return replace(policy, least=least, most=least + rng.randint(1, 8), up=up, zero_after_s=60.0)


@pytest.mark.parametrize("seed", range(20))
def test_decide_random_samples_keep_bounds_unknown_never_shrinks(seed: int) -> None:
    rng = random.Random(seed)
    policy, remembered = any_policy(rng), RoleMemory.new(0.0)
    replicas = policy.least
    for tick in range(300):
        sample = any_observation(rng, replicas)
        decision, remembered = decide(policy, remembered, sample, 15.0 * tick)
        assert policy.least <= decision.replicas <= policy.most
        needed = (sample.demand, sample.backlog)
        if sample.replicas > decision.replicas:
            assert all(one.has_value for one in needed), decision
            assert sample.queued.zero and not sample.silent, decision
        assert decision.replicas - replicas <= policy.up.max_step or sample.replicas == 0
        assert replicas - decision.replicas <= 1 or decision.reason == "Idle"
        replicas = decision.replicas


@pytest.mark.parametrize("seed", range(50))
def test_growth_need_unknown_counts_starting_workers(seed: int) -> None:
    """However full the ready workers are, those that start for ten minutes are not asked for again."""
    rng = random.Random(seed)
    ready = rng.randint(1, 6)
    remembered, replicas = RoleMemory.new(NOW - 10_000), ready
    for tick in range(40):
        full = {
            "utilisation": Measurement.of(rng.uniform(0.5, 4)),
            "latency": Measurement.of(rng.uniform(0, 0.3)),
        }
        sample = observation(replicas, ready=ready, demand=LOST, rate=LOST, **full)
        decision, remembered = decide(replace(DECODE, most=100), remembered, sample, NOW + 15 * tick)
        assert replicas <= decision.replicas <= max(ready + 1, MOST_DOSE * ready)
        replicas = decision.replicas
    assert replicas > ready


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("signal", ["demand", "backlog", "latency", "utilisation"])
def test_more_load_never_asks_for_less(seed: int, signal: str) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        policy = any_policy(rng)
        replicas = rng.randint(policy.least, policy.most)
        remembered = replace(
            memory(), ready=rng.randint(0, replicas), ready_since=NOW - rng.choice((10, 600))
        )
        sample = replace(any_observation(rng, replicas), rate=unknown("not asked"))
        measured: Measurement = getattr(sample, signal)
        if measured.value is None:
            continue
        more = Measurement.of(measured.value * rng.uniform(1, 4) + rng.random())
        changed: dict[str, Any] = {signal: more}
        lower, _ = decide(policy, remembered, sample, NOW)
        higher, _ = decide(policy, remembered, replace(sample, **changed), NOW)
        assert higher.raw >= lower.raw, (sample, more)
