"""The queue wake-up: a bound that may wake a request too early, but never delays one."""

from __future__ import annotations

import math
import random

from baton_router.scheduling.wakeup import QueueWakeup, has_capacity
from baton_router.workers.costs import RELIABLE_AFTER, WorkerKind
from baton_router.workers.worker_state import WorkerState

MOST = 100


def state(*booked: int, seconds: float = 1.0) -> WorkerState:
    """A worker that has prompts with so many tokens to compute."""
    created = WorkerState(0, "epoch", WorkerKind())
    for _ in range(RELIABLE_AFTER):
        created.prefill_cost.learn(10, 10, 0.001)
    for number, tokens in enumerate(booked):
        created.prefills.book(number, seconds, tokens, now=0.0)
    return created


def wakeup_of(*wakeup: tuple[WorkerState, int], again: float = math.inf) -> QueueWakeup:
    created = QueueWakeup()
    for worker, tokens in wakeup:
        created.add(worker, tokens, again)
    return created


def test_may_go_compares_free_workers_and_smallest_requests() -> None:
    busy, free = state(50), state()
    cases = [
        ("nobody waits", wakeup_of(), False),
        ("the worker is busy", wakeup_of((busy, 1)), False),
        ("another one is free, but not wanted", wakeup_of((busy, 1), (busy, 2)), False),
        ("one of two that are wanted is free", wakeup_of((busy, 1), (free, 1)), True),
        ("an idle worker takes what is longer than a pass", wakeup_of((free, MOST + 1)), True),
        ("nearly done, and the smallest fits", wakeup_of((state(60, seconds=0.01), 40)), True),
        ("nearly done, and the smallest does not fit", wakeup_of((state(60, seconds=0.01), 41)), False),
        ("a smaller one came later", wakeup_of((state(60, seconds=0.01), 41), (state(), 1)), True),
        ("time to look for another worker", wakeup_of((busy, 1), again=0.5), True),
    ]
    assert [(name, wakeup.may_go(MOST, now=0.5)) for name, wakeup, _ in cases] == [
        (name, expected) for name, _, expected in cases
    ]
    wakeup = wakeup_of((busy, 1))
    wakeup.add_unplanned()
    assert wakeup.may_go(MOST, now=0.0), "one who has no worker looks for one at every chance"


def test_next_wakeup_is_when_the_first_worker_is_nearly_done() -> None:
    soon, late = state(50, seconds=0.5), state(50, seconds=2.0)
    wakeup = wakeup_of((late, 1), (soon, 1))
    first = wakeup.seconds_until_free(0.0)
    assert 0 < first < 0.5
    assert first < wakeup_of((late, 1)).seconds_until_free(0.0) < 2.0
    assert wakeup_of((state(), 1)).seconds_until_free(0.0) == math.inf


def test_law_wakeup_never_delays_a_startable_request() -> None:
    chance = random.Random(5)
    for _ in range(500):
        workers = [
            state(*(chance.randrange(1, 60) for _ in range(chance.randrange(3))), seconds=chance.random() / 5)
            for _ in range(3)
        ]
        waiting = [(chance.choice(workers), chance.randrange(1, 120)) for _ in range(chance.randrange(6))]
        wakeup, now = wakeup_of(*waiting), chance.random()
        for worker, tokens in waiting:
            assert wakeup.may_go(MOST, now) or not has_capacity(worker, tokens, MOST, now)
