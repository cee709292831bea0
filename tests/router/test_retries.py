"""The budget of retries that refusals and slowness may cause."""

from __future__ import annotations

import random

import pytest

from baton_router.proxy.timeouts import CRASH_S, REFILL_PER_S, RESERVE, RetryBudget


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("seed", range(20))
def test_law_retries_stay_within_ratio_reserve_and_time(seed: int) -> None:
    rng = random.Random(seed)
    clock = Clock()
    ratio = rng.choice([0.0, 0.05, 0.1, 0.5])
    budget = RetryBudget(ratio, clock)
    requests = retries = 0
    pace = rng.choice([0.0, 0.01, 0.1])
    for _ in range(5000):
        clock.now += rng.uniform(0.0, pace)
        if rng.random() < 0.5:
            budget.earn()
            requests += 1
        else:
            retries += budget.spend()
        assert retries <= requests * ratio + RESERVE + REFILL_PER_S * (clock.now - 100.0) + 1e-6
    assert (retries > 0) == (ratio > 0)


def test_idle_router_can_retry_at_once() -> None:
    assert RetryBudget(0.1, Clock()).spend()


def test_budget_refills_with_time() -> None:
    clock = Clock()
    budget = RetryBudget(0.1, clock)
    while budget.spend():
        pass
    clock.now += 0.9 / REFILL_PER_S
    assert not budget.spend()
    clock.now += 0.2 / REFILL_PER_S
    assert budget.spend()
    assert not budget.spend()


def test_crash_costs_one_retry_for_all_its_requests() -> None:
    clock = Clock()
    budget = RetryBudget(0.1, clock)
    assert all(budget.spend_after_crash("a") for _ in range(1000))
    others = sum(budget.spend_after_crash(f"w{number}") for number in range(1000))
    assert others == RESERVE - 1
    assert budget.spend_after_crash("a"), "its crash was paid for"
    assert not budget.spend_after_crash("z")


def test_crash_after_a_while_is_another_one() -> None:
    clock = Clock()
    budget = RetryBudget(0.1, clock)
    assert budget.spend_after_crash("a")
    while budget.spend():
        pass
    assert budget.spend_after_crash("a")
    clock.now += min(CRASH_S, 0.9 / REFILL_PER_S)
    assert budget.spend_after_crash("a") == (CRASH_S > 0.9 / REFILL_PER_S)
    assert not RetryBudget(0.0, clock).spend_after_crash("a"), "without a budget there is none"
