"""One tenant's order: shortest first with ageing, deadlines that can be met, and those that go before."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from baton_router.scheduling.sorted_list import SortedList
from baton_router.scheduling.tenant_queue import AGING, SHORT_S, QueueEntry, TenantQueue

_numbers = itertools.count()


def entry(best_s: float, arrived: float = 0.0, **fields: Any) -> QueueEntry:
    values: dict[str, Any] = {"tenant": "t", "level": 1, "cost": 1.0, "size": 1, **fields}
    return QueueEntry(number=next(_numbers), arrived=arrived, best_s=best_s, **values)


SHORT, LONG = 0.1, 10.0
STATES: list[dict[str, bool]] = [*[{}] * 8, {"retried": True}, {"starved": True}]

ORDERS: dict[str, tuple[float, list[QueueEntry]]] = {
    "the shortest first": (0, [entry(SHORT), entry(1), entry(LONG)]),
    "those that came first, of equals": (5, [entry(1, 0), entry(1, 2), entry(1, 4)]),
    "who has waited ten times the difference goes before": (101, [entry(LONG, 0), entry(SHORT, 99.5)]),
    "who came first, of short ones": (1, [entry(SHORT_S, 0), entry(0.5 * SHORT_S, 0.001), entry(0, 0.002)]),
    "and not before that": (98, [entry(SHORT, 97.5), entry(LONG, 0)]),
    "a deadline that is near": (7, [entry(2, 0, ttft_slo_s=10), entry(SHORT, 7)]),
    "a deadline that is not": (4, [entry(SHORT, 4), entry(2, 0, ttft_slo_s=10)]),
    "a deadline that cannot be met": (9, [entry(SHORT, 9), entry(50, 9), entry(2, 0, ttft_slo_s=10)]),
    "one that can be met in the last moment": (7.5, [entry(50, 7), entry(2, 0, ttft_slo_s=10)]),
    "the nearest deadline": (7, [entry(2, 0, ttft_slo_s=10), entry(1.9, 0.4, ttft_slo_s=10)]),
    "who was sent before": (1, [entry(LONG, 0, retried=True), entry(1, 0, ttft_slo_s=2.5), entry(SHORT)]),
    "who starves, the oldest first": (50, [entry(9, 1, starved=True), entry(1, 2, starved=True), entry(0)]),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_tenant_queue_has_the_expected_order(name: str) -> None:
    now, expected = ORDERS[name]
    for order in itertools.permutations(expected):
        line = TenantQueue()
        for one in order:
            line.add(one)
        assert list(line.ordered(now)) == expected


@pytest.mark.parametrize("fields", [{}, {"starved": True}, {"missed": True}, {"ttft_slo_s": 60.0}])
def test_repriced_entry_has_the_order_of_a_new_one(fields: dict[str, Any]) -> None:
    """A prompt whose prefix was cached meanwhile goes before shorter ones; deadlines and turns stay."""
    repriced, fresh = TenantQueue(), TenantQueue()
    others = [entry(SHORT), entry(1), entry(LONG, 0, ttft_slo_s=50)]
    moved = entry(LONG, 0, **fields)
    for one in (*others, moved):
        repriced.add(one)
    repriced.reprice(moved, 0.5)
    for one in (*others, moved):
        fresh.add(one)
    assert moved.best_s == 0.5
    assert list(repriced.ordered(0.0)) == list(fresh.ordered(0.0))
    assert repriced.seconds == pytest.approx(fresh.seconds)


def test_seconds_before_count_earlier_requests() -> None:
    line = TenantQueue()
    for one in (entry(1), entry(2), entry(4), entry(8, starved=True)):
        line.add(one)
    assert line.seconds == 15
    assert line.seconds_before(entry(3)) == 8 + 1 + 2
    assert line.seconds_before(entry(100)) == 15
    assert line.seconds_before(entry(1, 0, retried=True)) == 8
    assert line.seconds_before(entry(1, -1, retried=True)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_law_iteration_visits_all_once_while_requests_leave(seed: int) -> None:
    rng = random.Random(seed)
    line, waiting, now = TenantQueue(), dict[int, QueueEntry](), 0.0
    for _ in range(400):
        now += rng.random()
        action = rng.random()
        if action < 0.5:
            objective = rng.choice([math.inf, rng.uniform(0, 20)])
            one = entry(rng.uniform(0, 5), now, ttft_slo_s=objective, **rng.choice(STATES))
            waiting[one.number] = one
            line.add(one)
        elif action < 0.8 and waiting:
            line.remove(waiting.pop(rng.choice(list(waiting))))
        else:
            before, walked, gone = set(waiting), list[int](), set[int]()
            for one in line.ordered(now):
                walked.append(one.number)
                if rng.random() < 0.3:
                    line.remove(waiting.pop(one.number))
                elif rng.random() < 0.1:
                    other = waiting.pop(rng.choice(list(waiting)))
                    gone.add(other.number)
                    line.remove(other)
            assert len(walked) == len(set(walked))
            assert before - gone <= set(walked) <= before
        assert len(line) == len(waiting)
        assert line.seconds == pytest.approx(sum(one.best_s for one in waiting.values()))


@pytest.mark.parametrize("seed", range(10))
def test_law_no_request_is_passed_longer_than_its_bound(seed: int) -> None:
    rng = random.Random(seed)
    line = TenantQueue()
    longest = entry(5.0, 0.0)
    line.add(longest)
    now = 0.0
    while True:
        now += rng.uniform(0, 1)
        line.add(entry(rng.uniform(0, 5), now))
        first = next(line.ordered(now))
        if first is longest:
            break
        line.remove(first)
    assert now <= 5.0 / AGING


@pytest.mark.parametrize("seed", range(10))
def test_sorted_list_keeps_its_order(seed: int) -> None:
    rng = random.Random(seed)
    sorted_list, plain = SortedList[str](), list[tuple[float, int]]()
    for number in range(500):
        if rng.random() < 0.6:
            key = rng.choice([0.0, 1.5, -2.0, math.inf])
            plain.append((key, number))
            sorted_list.add(key, number, str(number))
        elif plain:
            one = plain.pop(rng.randrange(len(plain)))
            assert sorted_list.remove(*one)
            assert not sorted_list.remove(*one)
        plain.sort()
        assert list(sorted_list.ascending()) == [str(number) for _, number in plain]
        assert sorted_list.up_to(0.0) == [str(number) for key, number in plain if key <= 0]
        assert sorted_list.first == ((plain[0][0], str(plain[0][1])) if plain else None)
