"""What those who wait want: a bound that may let one be asked in vain, and never keeps one from going."""

from __future__ import annotations

import math
import random

from baton_router.scheduling.queued_request import QueueWakeup, has_capacity
from baton_router.workers.costs import RELIABLE_AFTER, WorkerKind
from baton_router.workers.worker_state import WorkerState

MOST = 100


def known(*booked: int, seconds: float = 1.0) -> WorkerState:
    """A worker that has prompts with so many tokens to compute."""
    made = WorkerState(0, "epoch", WorkerKind().newcomer())
    for _ in range(RELIABLE_AFTER):
        made.prefill_cost.learn(10, 10, 0.001)
    for number, tokens in enumerate(booked):
        made.prefills.book(number, seconds, tokens, now=0.0)
    return made


def wishes_of(*wishes: tuple[WorkerState, int], again: float = math.inf) -> QueueWakeup:
    made = QueueWakeup()
    for worker, tokens in wishes:
        made.add(worker, tokens, again)
    return made


def test_whom_no_worker_suits_is_asked() -> None:
    busy, free = known(50), known()
    cases = [
        ("nobody waits", wishes_of(), False),
        ("the worker is busy", wishes_of((busy, 1)), False),
        ("another one is free, but not wanted", wishes_of((busy, 1), (busy, 2)), False),
        ("one of two that are wanted is free", wishes_of((busy, 1), (free, 1)), True),
        ("an idle worker takes what is longer than a pass", wishes_of((free, MOST + 1)), True),
        ("nearly done, and the smallest fits", wishes_of((known(60, seconds=0.01), 40)), True),
        ("nearly done, and the smallest does not fit", wishes_of((known(60, seconds=0.01), 41)), False),
        ("a smaller one came later", wishes_of((known(60, seconds=0.01), 41), (known(), 1)), True),
        ("time to look for another worker", wishes_of((busy, 1), again=0.5), True),
    ]
    assert [(name, wishes.may_go(MOST, now=0.5)) for name, wishes, _ in cases] == [
        (name, expected) for name, _, expected in cases
    ]
    wishes = wishes_of((busy, 1))
    wishes.add_unplanned()
    assert wishes.may_go(MOST, now=0.0), "one who has no worker looks for one at every chance"


def test_the_next_look_is_when_the_first_busy_worker_is_nearly_done() -> None:
    soon, late = known(50, seconds=0.5), known(50, seconds=2.0)
    wishes = wishes_of((late, 1), (soon, 1))
    first = wishes.seconds_until_free(0.0)
    assert 0 < first < 0.5
    assert first < wishes_of((late, 1)).seconds_until_free(0.0) < 2.0
    assert wishes_of((known(), 1)).seconds_until_free(0.0) == math.inf


def test_nobody_who_could_go_is_ever_kept() -> None:
    chance = random.Random(5)
    for _ in range(500):
        workers = [
            known(*(chance.randrange(1, 60) for _ in range(chance.randrange(3))), seconds=chance.random() / 5)
            for _ in range(3)
        ]
        waiting = [(chance.choice(workers), chance.randrange(1, 120)) for _ in range(chance.randrange(6))]
        wishes, now = wishes_of(*waiting), chance.random()
        for worker, tokens in waiting:
            assert wishes.may_go(MOST, now) or not has_capacity(worker, tokens, MOST, now)
