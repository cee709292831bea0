"""Quotas: a table of what is refused, then conservation under chance."""

from __future__ import annotations

import random

import pytest

from baton_router.scheduling.quotas import MINUTE_S, TenantQuota, TokenBucket
from baton_router.tenants.tenants import TenantLimits


def refused(quota: TenantQuota, tokens: int, now: float) -> str | None:
    refusal = quota.admit(tokens, 1, now)
    return refusal.limit if refusal else None


def test_bucket_allows_a_minute_at_once_then_refills() -> None:
    quota = TenantQuota(TenantLimits(requests_per_minute=60), 0.0)
    assert [refused(quota, 1, 0.0) for _ in range(61)] == [None] * 60 + ["requests"]
    refusal = quota.admit(1, 1, 0.25)
    assert refusal is not None and refusal.wait_s == pytest.approx(0.75) and refusal.most == 60
    assert refused(quota, 1, 1.0) is None


def test_tokens_are_reserved_and_given_back() -> None:
    quota = TenantQuota(TenantLimits(tokens_per_minute=1000), 0.0)
    assert refused(quota, 600, 0.0) is None
    refusal = quota.admit(600, 1, 0.0)
    assert refusal is not None and refusal.limit == "tokens" and refusal.wait_s == pytest.approx(12)
    quota.settle(600, 100, 1, 0.0)
    assert refused(quota, 600, 0.0) is None


def test_overuse_is_paid_back() -> None:
    quota = TenantQuota(TenantLimits(tokens_per_minute=1000), 0.0)
    assert refused(quota, 100, 0.0) is None
    quota.settle(100, 3000, 1, 0.0)
    assert refused(quota, 1, 119.0) == "tokens"
    assert refused(quota, 1, 121.0) is None


def test_oversized_request_passes_when_the_bucket_is_full() -> None:
    quota = TenantQuota(TenantLimits(tokens_per_minute=1000), 0.0)
    assert refused(quota, 1, 0.0) is None
    assert refused(quota, 5000, 0.0) == "tokens"
    assert refused(quota, 5000, 1.0) is None
    assert refused(quota, 1, 200.0) == "tokens"


def test_open_requests_are_counted() -> None:
    quota = TenantQuota(TenantLimits(streams=2), 0.0)
    assert [refused(quota, 1, 0.0) for _ in range(3)] == [None, None, "streams"]
    quota.settle(1, 1, 1, 0.0)
    assert refused(quota, 1, 0.0) is None


def test_rejection_by_one_limit_charges_no_other() -> None:
    quota = TenantQuota(TenantLimits(requests_per_minute=10, tokens_per_minute=100, streams=10), 0.0)
    assert refused(quota, 100, 0.0) is None
    for _ in range(50):
        assert refused(quota, 100, 0.0) == "tokens"
    assert quota.open == 1
    quota.settle(100, 0, 1, 0.0)
    assert [refused(quota, 1, 0.0) for _ in range(10)] == [None] * 9 + ["requests"]


def test_cancelled_reservation_is_not_charged() -> None:
    quota = TenantQuota(TenantLimits(requests_per_minute=1, tokens_per_minute=10, streams=1), 0.0)
    for _ in range(20):
        assert refused(quota, 10, 0.0) is None
        quota.cancel(10, 1, 0.0)


def test_resumed_request_bypasses_the_limits() -> None:
    quota = TenantQuota(TenantLimits(requests_per_minute=1, tokens_per_minute=10, streams=1), 0.0)
    assert refused(quota, 10, 0.0) is None
    quota.reopen(10, 1, 0.0)
    assert quota.open == 2
    quota.settle(10, 10, 1, 0.0)
    quota.settle(10, 0, 1, 0.0)
    assert quota.open == 0


def test_tenant_without_limits_is_never_rejected() -> None:
    quota = TenantQuota(TenantLimits(), 0.0)
    assert [refused(quota, 10**9, 0.0) for _ in range(1000)] == [None] * 1000


def test_new_limits_keep_the_usage() -> None:
    quota = TenantQuota(TenantLimits(tokens_per_minute=1000), 0.0)
    assert refused(quota, 900, 0.0) is None
    quota.limited(TenantLimits(tokens_per_minute=2000, streams=1), 0.0)
    assert refused(quota, 1, 0.0) == "streams"
    quota.settle(900, 900, 1, 0.0)
    assert refused(quota, 1200, 0.0) == "tokens"
    assert refused(quota, 1100, 0.0) is None


def test_clock_that_goes_back_adds_no_tokens() -> None:
    bucket = TokenBucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.level(50.0) == 0
    assert bucket.level(100.0) == 0
    assert bucket.level(101.0) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(20))
def test_law_no_window_exceeds_a_minute_plus_refill(seed: int) -> None:
    rng = random.Random(seed)
    most = rng.choice([10, 1000, 100_000])
    quota = TenantQuota(TenantLimits(requests_per_minute=rng.choice([None, 50]), tokens_per_minute=most), 0.0)
    now, used, reserved = 0.0, 0.0, list[tuple[int, int]]()
    largest = max(1, most // 5)
    for _ in range(2000):
        now += rng.expovariate(5)
        if rng.random() < 0.6:
            tokens = rng.randint(1, largest)
            if quota.admit(tokens, 1, now) is None:
                reserved.append((tokens, rng.randint(0, tokens)))
        elif reserved:
            held, actual = reserved.pop(rng.randrange(len(reserved)))
            quota.settle(held, actual, 1, now)
            used += actual
        assert quota.open == len(reserved)
        open_tokens = sum(held for held, _ in reserved)
        assert used + open_tokens <= most + now * most / MINUTE_S + 1e-6
    for held, _ in reserved:
        quota.settle(held, 0, 1, now)
    assert quota.open == 0
