"""Expected against actual: who is judged, when, and for how long."""

from __future__ import annotations

import pytest

from baton_router.workers.worker_state import ACCURACY_REQUESTS, MIN_EXPECTED_TOKENS, CacheAccuracy


def learn(accuracy: CacheAccuracy, share: float, times: int) -> int:
    """How many times the judgement changed."""
    return sum(accuracy.learn(1000, 1000 * share) for _ in range(times))


@pytest.mark.parametrize(("share", "broken"), [(0.0, True), (0.4, True), (0.6, False), (1.0, False)])
def test_accuracy_compares_expected_and_actual_cached_tokens(share: float, broken: bool) -> None:
    accuracy = CacheAccuracy()
    assert learn(accuracy, share, ACCURACY_REQUESTS) == broken
    assert accuracy.broken is broken


def test_few_requests_do_not_decide() -> None:
    accuracy = CacheAccuracy()
    assert learn(accuracy, 0.0, ACCURACY_REQUESTS - 1) == 0
    assert learn(accuracy, 0.0, 1) == 1


def test_short_prompts_do_not_decide() -> None:
    accuracy = CacheAccuracy()
    assert not any(accuracy.learn(MIN_EXPECTED_TOKENS - 1, 0) for _ in range(2 * ACCURACY_REQUESTS))


def test_excess_cached_tokens_do_not_compensate_misses() -> None:
    accuracy = CacheAccuracy()
    for _ in range(ACCURACY_REQUESTS):
        accuracy.learn(100, 100_000)
        accuracy.learn(100, 0)
        accuracy.learn(100, 0)
    assert accuracy.broken


def test_ignored_worker_recovers_with_hysteresis() -> None:
    accuracy = CacheAccuracy()
    learn(accuracy, 0.0, 3 * ACCURACY_REQUESTS)
    assert learn(accuracy, 0.55, 20 * ACCURACY_REQUESTS) == 0 and accuracy.broken
    assert learn(accuracy, 1.0, ACCURACY_REQUESTS) == 1 and not accuracy.broken
    assert accuracy.ratio > 0.6
