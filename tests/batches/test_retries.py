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
from baton_batches.retries import LineTries, TryOutcome


@pytest.mark.parametrize(
    ("status", "code", "means"),
    [
        (200, None, TryOutcome.ANSWERED),
        (400, CONTEXT_LENGTH_EXCEEDED, TryOutcome.ANSWERED),
        (404, ModelNotFound.code, TryOutcome.ANSWERED),
        (413, None, TryOutcome.ANSWERED),
        (401, Unauthorized.code, TryOutcome.OUTAGE),
        (403, None, TryOutcome.ANSWERED),
        (408, None, TryOutcome.FAULT),
        (429, RateLimited.code, TryOutcome.BUSY),
        (499, RequestAborted.code, TryOutcome.FAULT),
        (500, InternalError.code, TryOutcome.FAULT),
        (500, PoisonRequest.code, TryOutcome.ANSWERED),
        (502, None, TryOutcome.FAULT),
        (503, Overloaded.code, TryOutcome.BUSY),
        (503, None, TryOutcome.BUSY),
        (503, WorkerLost.code, TryOutcome.LOST),
        (503, TransferFailed.code, TryOutcome.LOST),
        (504, None, TryOutcome.FAULT),
    ],
)
def test_what_an_answer_means(status: int, code: str | None, means: TryOutcome) -> None:
    assert retries.outcome_of(status, code) is means


@pytest.mark.parametrize(
    ("outcome", "times"),
    [(TryOutcome.FAULT, 5), (TryOutcome.SLOW, 3), (TryOutcome.LOST, 6)],
)
def test_after_so_many_a_line_is_given_up(outcome: TryOutcome, times: int) -> None:
    tries = LineTries()
    for _ in range(times):
        assert not tries.exhausted
        tries = tries.after(outcome)
    assert tries.exhausted


@pytest.mark.parametrize("outcome", [TryOutcome.BUSY, TryOutcome.AWAY])
def test_what_is_not_the_lines_fault_never_counts(outcome: TryOutcome) -> None:
    tries = LineTries()
    for _ in range(1000):
        tries = tries.after(outcome)
    assert not tries.exhausted and not tries.group


def test_tries_after_each_loss_bound_the_group_further() -> None:
    """The last of all tries are alone, and after them the line is given up."""
    tries = LineTries()
    seen = []
    while not tries.exhausted:
        seen.append(tries.group)
        tries = tries.after(TryOutcome.LOST)
    assert seen == [0, 0, 64, 8, 1, 1]


def test_waits_grow_to_a_bound_and_differ() -> None:
    rng = random.Random(7)
    waits = [[retries.backoff_s(tries, rng) for _ in range(50)] for tries in range(12)]
    for tries, drawn in enumerate(waits):
        longest = min(30.0, 0.5 * 2**tries)
        assert longest / 2 <= min(drawn) < max(drawn) <= longest
        assert len(set(drawn)) > 40
