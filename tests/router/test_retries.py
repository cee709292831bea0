"""The budget of retries that refusals may cause."""

from __future__ import annotations

import random

import pytest

from baton_router.retries import RESERVE, RetryBudget


@pytest.mark.parametrize("seed", range(20))
def test_retries_never_exceed_their_share_and_the_reserve(seed: int) -> None:
    rng = random.Random(seed)
    ratio = rng.choice([0.0, 0.05, 0.1, 0.5])
    budget = RetryBudget(ratio)
    requests = retries = 0
    for _ in range(5000):
        if rng.random() < 0.5:
            budget.earn()
            requests += 1
        else:
            retries += budget.spend()
        assert retries <= requests * ratio + RESERVE
    assert (retries > 0) == (ratio > 0)


def test_a_quiet_router_can_retry_at_once() -> None:
    assert RetryBudget(0.1).spend()
