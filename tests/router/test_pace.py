"""The pace of a client that sends or reads."""

from __future__ import annotations

import random

import pytest

from baton_http.flow import MINIMUM_RATE, Pace
from tests.seeds import seeds

GRACE_S = 60.0

CASES: dict[str, tuple[list[tuple[float, int]], float, bool]] = {
    # name: bytes at times, the time of the check, whether it is late
    "nothing, within the time": ([], 59.9, False),
    "nothing, after the time": ([], 60.0, True),
    "one byte a second before the end buys no second": ([(59.0, 1)], 60.1, True),
    "a burst buys the full time again, and no more": ([(30.0, 2**30)], 89.9, False),
    "after the burst it is late": ([(30.0, 2**30)], 90.0, True),
    "one byte a minute": ([(59.0, 1), (60.0002, 1)], 61.0, True),
}


@pytest.mark.parametrize(("moves", "now", "late"), CASES.values(), ids=CASES.keys())
def test_pace_of_a_client(moves: list[tuple[float, int]], now: float, late: bool) -> None:
    pace = Pace(0.0, GRACE_S)
    for at, size in moves:
        pace.moved(size, at)
    assert pace.late(now) is late


def test_time_in_which_the_client_had_to_wait_does_not_count() -> None:
    pace = Pace(0.0, GRACE_S)
    pace.wait(100.0)
    assert not pace.late(159.0)
    assert pace.late(160.0)


@pytest.mark.parametrize("seed", seeds(20, quick=5))
@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_law_slower_clients_are_late_in_time_and_faster_ones_never(seed: int, factor: float) -> None:
    random_numbers = random.Random(seed)
    pace, now, sent = Pace(0.0, GRACE_S), 0.0, 0
    while not pace.late(now) and now < 3600:
        step_s = random_numbers.uniform(0.1, GRACE_S / 4)
        now += step_s
        if pace.late(now):
            break
        size = int(factor * MINIMUM_RATE * step_s) + 1
        sent += size
        pace.moved(size, now)
    assert (now < 3600) == (factor < 1)
    if factor < 1:
        assert now <= GRACE_S * 1.25 + sent / MINIMUM_RATE
