"""
A service as a fluid: demand flows in, replicas drain it, new ones take their time to start. Time is virtual.

One role with a capacity that the scaler does not know, noise on all that it is shown, Prometheus that may be
away, and an operator that may forget everything.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from baton_operator.scaling.decision import decide
from baton_operator.scaling.sample import Measurement, RoleMemory, RoleSample, ScalingPolicy, unknown

TICK_S = 15.0
CAPACITY = 1000.0
STARTUP_S = 240.0
NOISE = 0.05
OBJECTIVE_S = 2.0

Load = Callable[[float], float]
"""Tokens a second at a time."""

POLICY = ScalingPolicy(least=1, most=20, objective_s=OBJECTIVE_S, queue_s=OBJECTIVE_S)


@dataclass
class Run:
    """Result of one load."""

    violating_s: float = 0.0
    replicas: list[int] = field(default_factory=list)
    """At each tick."""
    times: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def reversals(self) -> int:
        """How often growing became shrinking, or the other way round."""
        moves = [b - a for a, b in pairwise(self.replicas) if a != b]
        return sum((a > 0) != (b > 0) for a, b in pairwise(moves))

    @property
    def mean(self) -> float:
        return sum(self.replicas) / len(self.replicas)

    def first_shrink_after(self, time: float) -> float:
        """Seconds from `time` to the first tick with fewer replicas than the one before."""
        for at, before, after in zip(self.times[1:], self.replicas, self.replicas[1:], strict=False):
            if at >= time and after < before:
                return at - time
        return math.inf


def run(
    load: Load,
    duration_s: float,
    *,
    policy: ScalingPolicy = POLICY,
    seed: int = 0,
    dark: tuple[float, float] = (math.inf, math.inf),
    restart: float = math.inf,
    ahead: bool = True,
    warm: int = 1,
) -> Run:
    """`dark`: from when to when nothing is measured. `restart`: when the operator forgets its windows."""
    rng = random.Random(seed)
    result = Run()
    startup_s = STARTUP_S if ahead else 0.0
    memory = RoleMemory.new(0.0, startup_s=startup_s)
    replicas, ready, backlog = warm, warm, 0.0
    starting: list[float] = []
    now = 0.0
    while now < duration_s:
        ready += sum(at <= now for at in starting)
        starting = [at for at in starting if at > now]
        demand = load(now)
        served = min(demand + backlog / TICK_S, ready * CAPACITY)
        backlog = max(0.0, backlog + (demand - served) * TICK_S)
        wait = backlog / (ready * CAPACITY) if ready else (math.inf if backlog else 0.0)
        result.violating_s += TICK_S if wait > OBJECTIVE_S else 0.0

        def noisy(value: float) -> Measurement:
            return Measurement.of(value * (1 + rng.uniform(-NOISE, NOISE)))

        sample = RoleSample(
            replicas=replicas,
            ready=ready,
            demand=noisy(demand),
            backlog=noisy(backlog),
            latency=noisy(wait) if math.isfinite(wait) else unknown("no worker"),
            utilisation=unknown("unused"),
            rate=noisy(CAPACITY) if served else unknown("idle"),
            requests=Measurement.of(demand),
            held=Measurement.of(math.ceil(backlog) if not ready else 0),
        )
        if dark[0] <= now < dark[1]:
            lost = unknown("Prometheus does not answer")
            sample = replace(
                sample, demand=lost, backlog=lost, latency=lost, rate=lost, requests=lost, held=lost
            )
        if restart <= now < restart + TICK_S:
            memory = RoleMemory.new(now, memory.capacity.value, startup_s)
        decision, memory = decide(policy, memory, sample, now)
        if decision.replicas > replicas:
            starting += [now + STARTUP_S] * (decision.replicas - replicas)
        for _ in range(replicas - decision.replicas):  # those that start are the first to go
            if starting:
                starting.pop()
            else:
                ready -= 1
        replicas = decision.replicas
        result.replicas.append(replicas)
        result.times.append(now)
        result.reasons.append(decision.reason)
        now += TICK_S
    return result


def constant(rate: float) -> Load:
    return lambda now: rate


def step(before: float, after: float, at: float) -> Load:
    return lambda now: before if now < at else after


def square(low: float, high: float, half_s: float) -> Load:
    return lambda now: high if int(now / half_s) % 2 else low


def sine(low: float, high: float, period_s: float) -> Load:
    middle, swing = (low + high) / 2, (high - low) / 2
    return lambda now: middle - swing * math.cos(2 * math.pi * now / period_s)


HOUR = 3600.0
