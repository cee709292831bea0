"""Turns of tenants: single cases, then fairness under random load."""

from __future__ import annotations

import random

import pytest

from baton_router.scheduling.fair_share import DeficitRoundRobin


def served(shares: DeficitRoundRobin, costs: dict[str, float], times: int) -> list[str]:
    """Return the served tenants if all always wait, each with its own cost."""
    order = []
    for _ in range(times):
        tenant = shares.next()
        assert tenant is not None
        shares.charge(tenant, costs[tenant])
        order.append(tenant)
    return order


def waiting(*tenants: str, quantum: float = 10) -> DeficitRoundRobin:
    shares = DeficitRoundRobin(quantum)
    for tenant in tenants:
        shares.join(tenant)
    return shares


def test_equal_tenants_alternate() -> None:
    assert served(waiting("a", "b"), {"a": 10, "b": 10}, 6) == ["a", "b"] * 3


def test_tenant_with_triple_cost_gets_a_third_of_the_turns() -> None:
    order = served(waiting("a", "b"), {"a": 30, "b": 10}, 400)
    assert order.count("a") == pytest.approx(100, abs=2)


def test_expensive_request_delays_only_its_own_tenant() -> None:
    shares = waiting("a", "b")
    shares.charge("a", 1000)
    assert served(shares, {"a": 10, "b": 10}, 99) == ["b"] * 99


def test_skipped_tenant_saves_one_round_at_most() -> None:
    shares = waiting("blocked", "b")
    for _ in range(100):
        assert shares.next({"blocked"}) == "b"
        shares.charge("b", 10)
    assert served(shares, {"blocked": 10, "b": 10}, 6).count("blocked") <= 4


def test_next_without_charge_changes_nothing() -> None:
    shares = waiting("a", "b")
    shares.charge("a", 1000)
    shares.charge("b", 10)
    for _ in range(1000):
        shares.next({"b"})
    assert served(shares, {"a": 10, "b": 10}, 90) == ["b"] * 90


def test_debt_survives_a_pause() -> None:
    shares = waiting("a", "b")
    shares.charge("a", 1000)
    shares.leave("a")
    shares.join("a")
    assert served(shares, {"a": 10, "b": 10}, 50) == ["b"] * 50


def test_debts_end_when_no_tenant_waits() -> None:
    shares = waiting("a", "b")
    shares.charge("a", 1000)
    shares.leave("a")
    shares.leave("b")
    shares.join("a")
    shares.join("b")
    assert served(shares, {"a": 10, "b": 10}, 4).count("a") == 2


def test_next_without_waiting_tenants_is_none() -> None:
    assert DeficitRoundRobin().next() is None
    assert waiting("a").next({"a"}) is None


@pytest.mark.parametrize("seed", range(20))
def test_law_waiting_tenants_get_equal_service(seed: int) -> None:
    rng = random.Random(seed)
    quantum, dearest = rng.choice([1, 100, 4096]), rng.choice([10, 1000, 50_000])
    always = [f"always{number}" for number in range(rng.randint(2, 6))]
    shares = DeficitRoundRobin(quantum)
    for tenant in always:
        shares.join(tenant)
    used = dict.fromkeys(always, 0.0)
    for step in range(2000):
        if rng.random() < 0.1:
            other = f"other{rng.randrange(5)}"
            if other in shares:
                shares.leave(other)
            else:
                shares.join(other)
        tenant = shares.next() or ""
        # Those that are called first are the dear ones: fairness is in what is used, not in how often.
        cost = rng.uniform(0, dearest / (1 + 5 * (tenant in always[1:])))
        shares.charge(tenant, cost)
        if tenant in used:
            used[tenant] += cost
        assert max(used.values()) - min(used.values()) <= 2 * (quantum + dearest), step
