"""One role's decision: a table of named cases, then what always holds."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from baton_operator.kinds.service_policies import MetricsLoss
from baton_operator.kinds.worker_role import ScaleUp
from baton_operator.scaling.decision import MOST_DOSE, decide
from baton_operator.scaling.sample import (
    ZERO,
    Measurement,
    RoleMemory,
    RoleSample,
    ScalingDecision,
    ScalingPolicy,
    unknown,
)

LOST = unknown("Prometheus does not answer")
PREFILL = ScalingPolicy(least=1, most=8, objective_s=2.0, queue_s=2.0)
DECODE = ScalingPolicy(least=1, most=8, objective_s=0.05)
ALONE = replace(DECODE, first_token_s=2.0)
"""Decode workers that compute prompts themselves."""
TO_ZERO = replace(PREFILL, least=0, zero_after_s=60.0)

NOW = 100_000.0
CALM: dict[str, Any] = {
    "requests": Measurement.of(5.0),
    "latency": Measurement.of(0.02),
    "utilisation": Measurement.of(0.5),
}


def observation(replicas: int = 4, **changes: Any) -> RoleSample:
    """A role that is used as it should be, where nothing else is said."""
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
    policy: ScalingPolicy, sample: RoleSample, known: RoleMemory | None = None, seconds: float = 360
) -> ScalingDecision:
    """The first decision that changes something while the same is seen for so long, or the last one."""
    known = memory() if known is None else known
    for tick in range(int(seconds // 15) + 1):
        decision, known = decide(policy, known, sample, NOW + 15 * tick)
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
        ALONE, observation(first_token=Measurement.of(3.0)), 5, "LatencyHigh",
    ),
    "beside prefill workers it does not": (DECODE, observation(first_token=Measurement.of(3.0)), 4, "Steady"),
    "alone, no worker goes that first tokens need": (
        ALONE, observation(demand=Measurement.of(2000.0), first_token=Measurement.of(1.5)), 4, "Steady",
    ),
    "alone, one worker goes where first tokens come soon": (
        ALONE, observation(demand=Measurement.of(2000.0), first_token=Measurement.of(0.5)), 3, "Spare",
    ),
    "alone, no worker goes while first tokens are not seen": (
        ALONE, observation(demand=Measurement.of(2000.0), first_token=LOST), 4, "Steady",
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
    "clients would wait for too long without one": (
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
def test_a_case(policy: ScalingPolicy, sample: RoleSample, replicas: int, reason: str) -> None:
    decision = settled(policy, sample)
    assert (decision.replicas, decision.reason) == (replicas, reason), decision.message
    assert decision.message


def test_a_rise_has_to_last_for_half_a_minute() -> None:
    calm, busy = observation(), observation(demand=Measurement.of(5000.0))
    _, known = decide(PREFILL, memory(), calm, NOW)
    sample = []
    for tick in range(1, 4):
        decision, known = decide(PREFILL, known, busy, NOW + 15 * tick)
        sample.append((decision.replicas, decision.reason))
    assert sample == [(4, "Stabilizing"), (6, "Demand"), (6, "Demand")]


def test_a_fall_has_to_last_for_five_minutes_and_goes_one_by_one() -> None:
    _, known = decide(PREFILL, memory(), observation(), NOW)
    replicas, moves = 4, []
    for tick in range(1, 40):
        sample = observation(replicas, demand=Measurement.of(500.0))
        decision, known = decide(PREFILL, known, sample, NOW + 15 * tick)
        if decision.replicas != replicas:
            moves.append(15 * tick)
        replicas = decision.replicas
    assert replicas == 1
    assert moves == [300, 360, 420]


def test_whoever_has_just_begun_to_look_shrinks_nothing_for_a_whole_window() -> None:
    assert _first_shrink(RoleMemory.new(NOW, capacity=1000.0), 0) >= 270


def test_after_metrics_came_back_the_first_worker_goes_a_whole_window_later() -> None:
    _, known = decide(PREFILL, memory(), observation(4, **ALL_LOST), NOW)
    assert _first_shrink(known, 15) == 300


def _first_shrink(known: RoleMemory, after: float) -> float:
    """Seconds until a worker goes that is not needed."""
    sample, time = observation(demand=Measurement.of(500.0)), after
    while True:
        decision, known = decide(PREFILL, known, sample, NOW + time)
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
def test_what_happens_when_nothing_is_measured_for_long(
    then: Any, fallback: int | None, replicas: int, reason: str
) -> None:
    policy = replace(PREFILL, fallback=fallback, loss=MetricsLoss(hold_seconds=300, then=then))
    sample = observation(4, **ALL_LOST)
    assert settled(policy, sample, seconds=300).reason == "MetricsHeld"
    decision = settled(policy, sample, seconds=330)
    assert (decision.replicas, decision.reason) == (replicas, reason)
    assert decision.source == ("Held" if reason == "MetricsHeld" else "Fallback")


def test_when_nobody_has_asked_for_long_enough_all_go_at_once() -> None:
    decision = settled(TO_ZERO, observation(4, **NOTHING), RoleMemory.new(NOW, capacity=1000.0), 75)
    assert (decision.replicas, decision.reason) == (0, "Idle")


def test_too_full_workers_count_only_once_those_that_were_asked_for_are_there() -> None:
    full = {"utilisation": Measurement.of(0.95), "demand": Measurement.of(3000.0)}
    starting = observation(5, ready=4, **full)
    _, known = decide(DECODE, memory(), observation(4), NOW)
    assert settled(DECODE, starting, known, 60).replicas == 5
    ready = replace(starting, ready=5)
    decision, known = decide(DECODE, known, ready, NOW + 75)
    assert decision.replicas == 5, "it has only just become ready"
    assert settled(DECODE, ready, known, 180).replicas == 6


def test_what_nobody_knows_of_a_new_role_is_learned_while_it_works() -> None:
    known = RoleMemory.new(NOW)
    busy = observation(1, demand=Measurement.of(3000.0), rate=unknown("no worker was busy"))
    decision, known = decide(PREFILL, known, busy, NOW)
    assert decision.replicas == 1 and known.capacity.value is None
    decision, known = decide(PREFILL, known, replace(busy, rate=Measurement.of(1000.0)), NOW + 15)
    assert decision.raw == 4


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
    up = ScaleUp(stabilization_window_seconds=rng.choice((0, 30)), max_step=rng.randint(1, 5))
    return replace(policy, least=least, most=least + rng.randint(1, 8), up=up, zero_after_s=60.0)


@pytest.mark.parametrize("seed", range(20))
def test_it_stays_within_its_bounds_and_unknown_lowers_nothing(seed: int) -> None:
    rng = random.Random(seed)
    policy, known = any_policy(rng), RoleMemory.new(0.0)
    replicas = policy.least
    for tick in range(300):
        sample = any_observation(rng, replicas)
        decision, known = decide(policy, known, sample, 15.0 * tick)
        assert policy.least <= decision.replicas <= policy.most
        needed = (sample.demand, sample.backlog)
        if sample.replicas > decision.replicas:
            assert all(one.known for one in needed), decision
            assert sample.queued.zero and not sample.silent, decision
        assert decision.replicas - replicas <= policy.up.max_step or sample.replicas == 0
        assert replicas - decision.replicas <= 1 or decision.reason == "Idle"
        replicas = decision.replicas


@pytest.mark.parametrize("seed", range(50))
def test_growth_need_unknown_counts_starting_workers(seed: int) -> None:
    """However full the ready workers are, those that start for ten minutes are not asked for again."""
    rng = random.Random(seed)
    ready = rng.randint(1, 6)
    known, replicas = RoleMemory.new(NOW - 10_000), ready
    for tick in range(40):
        full = {
            "utilisation": Measurement.of(rng.uniform(0.5, 4)),
            "latency": Measurement.of(rng.uniform(0, 0.3)),
        }
        sample = observation(replicas, ready=ready, demand=LOST, rate=LOST, **full)
        decision, known = decide(replace(DECODE, most=100), known, sample, NOW + 15 * tick)
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
        known = replace(memory(), ready=rng.randint(0, replicas), ready_since=NOW - rng.choice((10, 600)))
        sample = replace(any_observation(rng, replicas), rate=unknown("not asked"))
        there: Measurement = getattr(sample, signal)
        if there.value is None:
            continue
        more = Measurement.of(there.value * rng.uniform(1, 4) + rng.random())
        changed: dict[str, Any] = {signal: more}
        lower, _ = decide(policy, known, sample, NOW)
        higher, _ = decide(policy, known, replace(sample, **changed), NOW)
        assert higher.raw >= lower.raw, (sample, more)
