"""
A service under loads of all shapes, in virtual time: violations and reversals of scaling.

The mean of the replicas has a limit too, since a service with enough workers never violates its objective.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.operator.scaling.fluid import HOUR, POLICY, Load, Run, constant, run, sine, square, step

SEEDS = range(2)

# load, hours, seconds in violation, reversals, most replicas, mean of the replicas
LOADS: dict[str, tuple[Load, float, float, int, int, float]] = {
    "constant 3.0k": (constant(3000), 4, 495, 1, 6, 4.5),
    "constant 3.4k, at the edge of four": (constant(3400), 4, 495, 1, 9, 5.0),
    "square 1k/6k every two minutes": (square(1000, 6000, 120), 4, 420, 1, 12, 8.5),
    "step 1k to 8k": (step(1000, 8000, 1800), 2, 780, 1, 20, 9.5),
    "sine 1k to 9k, an hour": (sine(1000, 9000, HOUR), 4, 2715, 8, 12, 7.5),
    "sine 1k to 9k, two hours": (sine(1000, 9000, 2 * HOUR), 4, 660, 6, 12, 6.8),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("load", "hours", "violating", "reversals", "most", "mean"), LOADS.values(), ids=LOADS
)
def test_scaling_load_keeps_objective_and_mean_replicas(
    load: Load, hours: float, violating: float, reversals: int, most: int, mean: float, seed: int
) -> None:
    came = run(load, hours * HOUR, seed=seed)
    assert came.violating_s <= violating
    assert came.reversals <= reversals
    assert max(came.replicas) <= most
    assert came.mean <= mean


@pytest.mark.parametrize(("period", "share"), [(HOUR, 0.64), (2 * HOUR, 0.3)])
def test_scaling_lookahead_over_worker_start_saves_violations(period: float, share: float) -> None:
    load = sine(1000, 9000, period)
    ahead, blind = (_sum(load, ahead=ahead) for ahead in (True, False))
    assert ahead <= share * blind


def _sum(load: Load, *, ahead: bool) -> float:
    return sum(run(load, 4 * HOUR, seed=seed, ahead=ahead).violating_s for seed in SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_without_prometheus_for_half_an_hour_nothing_changes(seed: int) -> None:
    dark = (HOUR, 1.5 * HOUR)
    came = run(constant(5000), 3 * HOUR, policy=replace(POLICY, fallback=3), seed=seed, dark=dark)
    assert came.violating_s <= 540
    during = _between(came, *dark)
    assert len({replicas for replicas, _ in during}) == 1
    assert [reason for _, reason in during[:60]] == ["MetricsHeld"] * 60
    assert {reason for _, reason in during[61:]} == {"MetricsFallback"}


@pytest.mark.parametrize("seed", SEEDS)
def test_scaling_restart_after_a_fall_delays_shrinking(seed: int) -> None:
    fall = HOUR
    came = run(step(5000, 1000, fall), 3 * HOUR, restart=fall + 120, seed=seed)
    assert came.violating_s <= 540
    assert came.first_shrink_after(fall + 120) >= 270
    assert (came.reversals, came.replicas[-1]) == (1, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_without_any_request_it_goes_to_zero_and_comes_back(seed: int) -> None:
    policy = replace(POLICY, least=0)

    def load(now: float) -> float:
        return 2500 if now < HOUR or now >= 2 * HOUR else 0

    came = run(load, 3 * HOUR, policy=policy, seed=seed)
    assert came.replicas[int(1.99 * HOUR / 15)] == 0
    woken = _between(came, 2 * HOUR, 2 * HOUR + 60)
    assert woken[1] == (1, "FromZero") or woken[0] == (1, "FromZero")
    assert came.replicas[-1] in (3, 4)


def test_noise_alone_moves_nothing() -> None:
    for seed in SEEDS:
        came = run(constant(3000), 8 * HOUR, seed=seed)
        assert len(set(came.replicas[int(HOUR / 15) :])) == 1


def _between(came: Run, start: float, end: float) -> list[tuple[int, str]]:
    return [
        (replicas, reason)
        for time, replicas, reason in zip(came.times, came.replicas, came.reasons, strict=True)
        if start <= time < end
    ]
