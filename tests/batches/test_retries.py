"""Which answers are final, which lines are sent again, alone, or not any more."""

from __future__ import annotations

import random

import pytest

from baton_api.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    InternalError,
    ModelNotFound,
    Overloaded,
    PoisonRequest,
    RateLimited,
    RequestAborted,
    TransferFailed,
    Unauthorized,
    WorkerLost,
)
from baton_batches import retries
from baton_batches.retries import Outcome, Tries


@pytest.mark.parametrize(
    ("status", "code", "means"),
    [
        (200, None, Outcome.ANSWERED),
        (400, CONTEXT_LENGTH_EXCEEDED, Outcome.ANSWERED),
        (404, ModelNotFound.code, Outcome.ANSWERED),
        (413, None, Outcome.ANSWERED),
        (401, Unauthorized.code, Outcome.OUTAGE),
        (403, None, Outcome.ANSWERED),
        (408, None, Outcome.FAULT),
        (429, RateLimited.code, Outcome.BUSY),
        (499, RequestAborted.code, Outcome.FAULT),
        (500, InternalError.code, Outcome.FAULT),
        (500, PoisonRequest.code, Outcome.ANSWERED),
        (502, None, Outcome.FAULT),
        (503, Overloaded.code, Outcome.BUSY),
        (503, None, Outcome.BUSY),
        (503, WorkerLost.code, Outcome.LOST),
        (503, TransferFailed.code, Outcome.LOST),
        (504, None, Outcome.FAULT),
    ],
)
def test_what_an_answer_means(status: int, code: str | None, means: Outcome) -> None:
    assert retries.outcome(status, code) is means


@pytest.mark.parametrize(
    ("outcome", "times"),
    [(Outcome.FAULT, 5), (Outcome.SLOW, 3), (Outcome.LOST, 6)],
)
def test_after_so_many_a_line_is_given_up(outcome: Outcome, times: int) -> None:
    tries = Tries()
    for _ in range(times):
        assert not tries.exhausted
        tries = tries.after(outcome)
    assert tries.exhausted


@pytest.mark.parametrize("outcome", [Outcome.BUSY, Outcome.AWAY])
def test_what_is_not_the_lines_fault_never_counts(outcome: Outcome) -> None:
    tries = Tries()
    for _ in range(1000):
        tries = tries.after(outcome)
    assert not tries.exhausted and not tries.group


def test_tries_after_each_loss_bound_the_group_further() -> None:
    """The last of all tries are alone, and after them the line is given up."""
    tries = Tries()
    seen = []
    while not tries.exhausted:
        seen.append(tries.group)
        tries = tries.after(Outcome.LOST)
    assert seen == [0, 0, 64, 8, 1, 1]


def test_waits_grow_to_a_bound_and_differ() -> None:
    rng = random.Random(7)
    waits = [[retries.wait_s(tries, rng) for _ in range(50)] for tries in range(12)]
    for tries, drawn in enumerate(waits):
        longest = min(30.0, 0.5 * 2**tries)
        assert longest / 2 <= min(drawn) < max(drawn) <= longest
        assert len(set(drawn)) > 40
