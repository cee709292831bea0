"""Expected against actual: who is judged, when, and for how long."""

from __future__ import annotations

import pytest

from baton_router.workers.worker_state import ACCURACY_REQUESTS, MIN_EXPECTED_TOKENS, CacheAccuracy


def learn(parity: CacheAccuracy, share: float, times: int) -> int:
    """How many times the judgement changed."""
    return sum(parity.learn(1000, 1000 * share) for _ in range(times))


@pytest.mark.parametrize(("share", "broken"), [(0.0, True), (0.4, True), (0.6, False), (1.0, False)])
def test_a_worker_is_judged_by_what_it_had(share: float, broken: bool) -> None:
    parity = CacheAccuracy()
    assert learn(parity, share, ACCURACY_REQUESTS) == broken
    assert parity.broken is broken


def test_fewer_requests_judge_nobody() -> None:
    parity = CacheAccuracy()
    assert learn(parity, 0.0, ACCURACY_REQUESTS - 1) == 0
    assert learn(parity, 0.0, 1) == 1


def test_short_prompts_judge_nobody() -> None:
    parity = CacheAccuracy()
    assert not any(parity.learn(MIN_EXPECTED_TOKENS - 1, 0) for _ in range(2 * ACCURACY_REQUESTS))


def test_more_than_was_expected_makes_up_for_nothing() -> None:
    parity = CacheAccuracy()
    for _ in range(ACCURACY_REQUESTS):
        parity.learn(100, 100_000)
        parity.learn(100, 0)
        parity.learn(100, 0)
    assert parity.broken


def test_it_is_forgiven_when_it_is_right_again_and_not_at_the_edge() -> None:
    parity = CacheAccuracy()
    learn(parity, 0.0, 3 * ACCURACY_REQUESTS)
    assert learn(parity, 0.55, 20 * ACCURACY_REQUESTS) == 0 and parity.broken
    assert learn(parity, 1.0, ACCURACY_REQUESTS) == 1 and not parity.broken
    assert parity.ratio > 0.6
