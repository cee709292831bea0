"""When a process that ended is started again."""

from __future__ import annotations

import random

import pytest

from baton_cli.supervisor import CALM_S, FIRST_DELAY_S, LONGEST_DELAY_S, History, end_order, threads_each


def test_history_process_never_ready_is_not_restarted() -> None:
    assert History().ended(5.0).delay_s is None


def test_history_first_crash_restarts_soon() -> None:
    assert History().ready(10.0).ended(11.0).delay_s == FIRST_DELAY_S


def test_crashes_in_a_row_are_answered_less_and_less_often() -> None:
    history = History().ready(0.0)
    delays = []
    for _ in range(10):
        history = history.ended(1.0)
        delays.append(history.delay_s)
    assert delays[:4] == [0.5, 1.0, 2.0, 4.0]
    assert delays[-1] == LONGEST_DELAY_S


def test_history_failed_restart_is_retried_later() -> None:
    assert History().ready(0.0).ended(1.0).ended(2.0).delay_s == 2 * FIRST_DELAY_S


def test_history_calm_time_resets_the_delay() -> None:
    history = History().ready(0.0).ended(1.0).ended(2.0).ended(3.0)
    assert history.ready(10.0).ended(10.0 + CALM_S).delay_s == FIRST_DELAY_S


def test_history_short_time_keeps_the_delay() -> None:
    history = History().ready(0.0).ended(1.0).ended(2.0)
    assert history.ready(10.0).ended(10.0 + CALM_S - 1).delay_s == 4 * FIRST_DELAY_S


def test_delays_stay_in_their_range_under_any_schedule() -> None:
    chance = random.Random(7)
    for _ in range(200):
        history, now = History().ready(0.0), 0.0
        for _ in range(chance.randrange(1, 60)):
            now += chance.expovariate(1 / 30)
            history = history.ready(now) if chance.random() < 0.4 else history.ended(now)
            if history.crashes:
                delay = history.delay_s
                assert delay is not None and FIRST_DELAY_S <= delay <= LONGEST_DELAY_S


@pytest.mark.parametrize(
    ("cores", "workers", "threads"), [(2, 2, 1), (1, 2, 1), (8, 2, 4), (7, 3, 2), (2, 9, 1), (4, 0, 4)]
)
def test_threads_fit_the_cores_and_nobody_gets_none(cores: int, workers: int, threads: int) -> None:
    assert threads_each(cores, workers) == threads


def test_end_order_router_first_and_prefill_workers_last() -> None:
    assert end_order(["prefill", "prefill", "decode", "router", "decode"]) == [[3], [2, 4], [0, 1]]


def test_end_order_without_a_router() -> None:
    assert end_order(["decode", "both"]) == [[0, 1]]
