"""Whose turn it is: a few stories, then fairness under chance."""

from __future__ import annotations

import random

import pytest

from baton_router.scheduling.fair_share import DeficitRoundRobin


def served(turns: DeficitRoundRobin, costs: dict[str, float], times: int) -> list[str]:
    """Who is served when everybody always wants something of the same cost."""
    order = []
    for _ in range(times):
        tenant = turns.next()
        assert tenant is not None
        turns.charge(tenant, costs[tenant])
        order.append(tenant)
    return order


def waiting(*tenants: str, quantum: float = 10) -> DeficitRoundRobin:
    turns = DeficitRoundRobin(quantum)
    for tenant in tenants:
        turns.join(tenant)
    return turns


def test_equal_tenants_alternate() -> None:
    assert served(waiting("a", "b"), {"a": 10, "b": 10}, 6) == ["a", "b"] * 3


def test_who_costs_three_times_as_much_is_served_a_third_as_often() -> None:
    order = served(waiting("a", "b"), {"a": 30, "b": 10}, 400)
    assert order.count("a") == pytest.approx(100, abs=2)


def test_a_dear_request_delays_its_own_tenant_only() -> None:
    turns = waiting("a", "b")
    turns.charge("a", 1000)
    assert served(turns, {"a": 10, "b": 10}, 99) == ["b"] * 99


def test_who_is_passed_over_saves_one_round_at_most() -> None:
    turns = waiting("blocked", "b")
    for _ in range(100):
        assert turns.next({"blocked"}) == "b"
        turns.charge("b", 10)
    assert served(turns, {"blocked": 10, "b": 10}, 6).count("blocked") <= 4


def test_to_ask_whose_turn_it_is_changes_nothing() -> None:
    turns = waiting("a", "b")
    turns.charge("a", 1000)
    turns.charge("b", 10)
    for _ in range(1000):
        turns.next({"b"})
    assert served(turns, {"a": 10, "b": 10}, 90) == ["b"] * 90


def test_a_debt_is_still_there_after_a_pause() -> None:
    turns = waiting("a", "b")
    turns.charge("a", 1000)
    turns.leave("a")
    turns.join("a")
    assert served(turns, {"a": 10, "b": 10}, 50) == ["b"] * 50


def test_debts_end_when_nobody_waits() -> None:
    turns = waiting("a", "b")
    turns.charge("a", 1000)
    turns.leave("a")
    turns.leave("b")
    turns.join("a")
    turns.join("b")
    assert served(turns, {"a": 10, "b": 10}, 4).count("a") == 2


def test_nobody_waits() -> None:
    assert DeficitRoundRobin().next() is None
    assert waiting("a").next({"a"}) is None


@pytest.mark.parametrize("seed", range(20))
def test_of_two_who_always_wait_none_gets_much_more(seed: int) -> None:
    rng = random.Random(seed)
    quantum, dearest = rng.choice([1, 100, 4096]), rng.choice([10, 1000, 50_000])
    always = [f"always{number}" for number in range(rng.randint(2, 6))]
    turns = DeficitRoundRobin(quantum)
    for tenant in always:
        turns.join(tenant)
    used = dict.fromkeys(always, 0.0)
    for step in range(2000):
        if rng.random() < 0.1:
            other = f"other{rng.randrange(5)}"
            if other in turns:
                turns.leave(other)
            else:
                turns.join(other)
        tenant = turns.next() or ""
        # Those that are called first are the dear ones: fairness is in what is used, not in how often.
        cost = rng.uniform(0, dearest / (1 + 5 * (tenant in always[1:])))
        turns.charge(tenant, cost)
        if tenant in used:
            used[tenant] += cost
        assert max(used.values()) - min(used.values()) <= 2 * (quantum + dearest), step
