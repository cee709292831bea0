"""Waiting limits of requests, and immediate rejections."""

from __future__ import annotations

import math
import random

import pytest

from baton_router.scheduling.admission import (
    MAX_CORRECTION,
    MAX_FACTOR,
    MIN_CORRECTION,
    MIN_FACTOR,
    DeadlineFactor,
    WaitBias,
    WaitLimits,
    too_late,
    wait_limits,
)

TERMS = {
    "interactive, its own": ("interactive", 2.0, WaitLimits(2.0, 3.0)),
    "interactive": ("interactive", None, WaitLimits(10.0, 15.0)),
    "default": ("default", None, WaitLimits(math.inf, 300.0)),
    "default with a deadline": ("default", 2.0, WaitLimits(2.0, 2.0)),
    "critical": ("critical", None, WaitLimits(math.inf, 300.0)),
    "batch": ("batch", None, WaitLimits(math.inf, math.inf)),
    "batch has no deadline": ("batch", 2.0, WaitLimits(math.inf, math.inf)),
}


@pytest.mark.parametrize("name", TERMS)
def test_wait_limits_follow_class_and_settings(name: str) -> None:
    kind, wanted, expected = TERMS[name]
    assert wait_limits(kind, wanted, interactive_s=10.0, wait_s=300.0) == expected


LATE = {
    "interactive in time": ("interactive", 15.0, 0.0, False),
    "interactive too late": ("interactive", 15.1, 0.0, True),
    "default waits all the same": ("default", 1e4, 0.0, False),
    "default, but nobody will have room": ("default", 1e4, 301.0, True),
    "critical waits all the same": ("critical", 1e4, 0.0, False),
    "batch waits for room too": ("batch", 1e9, 1e9, False),
}


@pytest.mark.parametrize("name", LATE)
def test_too_late_compares_prediction_and_objective(name: str) -> None:
    kind, predicted, capacity, late = LATE[name]
    assert too_late(kind, wait_limits(kind, None, 10.0, 300.0), predicted, capacity, 1.5) is late


def test_deadline_factor_falls_with_late_requests_and_recovers() -> None:
    deadline_factor = DeadlineFactor()
    assert deadline_factor.value == MAX_FACTOR
    for _ in range(100):
        deadline_factor.waited(in_vain=True)
    assert deadline_factor.value == MIN_FACTOR
    for _ in range(1000):
        deadline_factor.waited(in_vain=False)
    assert deadline_factor.value == MAX_FACTOR


@pytest.mark.parametrize("seed", range(5))
def test_deadline_factor_settles_at_a_twentieth_of_late_requests(seed: int) -> None:
    """If a higher factor makes more requests late, it settles where few are late."""
    rng = random.Random(seed)
    deadline_factor, vain = DeadlineFactor(), 0
    for number in range(20_000):
        in_vain = rng.random() < max(0.0, deadline_factor.value - 0.9)
        deadline_factor.waited(in_vain=in_vain)
        vain += in_vain and number >= 10_000
    assert vain / 10_000 == pytest.approx(0.05, abs=0.02)


def test_wait_correction_learns_the_ratio() -> None:
    bias = WaitBias()
    for _ in range(500):
        bias.learn(10.0, 2.0)
    assert bias.corrected(10.0) == pytest.approx(2.0)


@pytest.mark.parametrize("seed", range(5))
def test_wait_correction_stays_between_its_bounds(seed: int) -> None:
    rng = random.Random(seed)
    bias = WaitBias()
    for _ in range(500):
        bias.learn(rng.uniform(-1, 1), rng.uniform(0, 100))
        assert MIN_CORRECTION <= bias.ratio <= MAX_CORRECTION
