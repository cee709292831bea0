"""Final answers, and lines that are sent again, in isolation, or not any more."""

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
from baton_batches.retries import AttemptOutcome, LineAttempts


@pytest.mark.parametrize(
    ("status", "code", "means"),
    [
        (200, None, AttemptOutcome.ANSWERED),
        (400, CONTEXT_LENGTH_EXCEEDED, AttemptOutcome.ANSWERED),
        (404, ModelNotFound.code, AttemptOutcome.ANSWERED),
        (413, None, AttemptOutcome.ANSWERED),
        (401, Unauthorized.code, AttemptOutcome.OUTAGE),
        (403, None, AttemptOutcome.ANSWERED),
        (408, None, AttemptOutcome.FAULT),
        (429, RateLimited.code, AttemptOutcome.BUSY),
        (499, RequestAborted.code, AttemptOutcome.FAULT),
        (500, InternalError.code, AttemptOutcome.FAULT),
        (500, PoisonRequest.code, AttemptOutcome.ANSWERED),
        (502, None, AttemptOutcome.FAULT),
        (503, Overloaded.code, AttemptOutcome.BUSY),
        (503, None, AttemptOutcome.BUSY),
        (503, WorkerLost.code, AttemptOutcome.LOST),
        (503, TransferFailed.code, AttemptOutcome.LOST),
        (504, None, AttemptOutcome.FAULT),
    ],
)
def test_retry_decision_follows_the_answer(status: int, code: str | None, means: AttemptOutcome) -> None:
    assert retries.outcome_of(status, code) is means


@pytest.mark.parametrize(
    ("outcome", "times"),
    [(AttemptOutcome.FAULT, 5), (AttemptOutcome.SLOW, 3), (AttemptOutcome.LOST, 6)],
)
def test_line_is_given_up_after_its_attempts(outcome: AttemptOutcome, times: int) -> None:
    attempts = LineAttempts()
    for _ in range(times):
        assert not attempts.exhausted
        attempts = attempts.after(outcome)
    assert attempts.exhausted


@pytest.mark.parametrize("outcome", [AttemptOutcome.BUSY, AttemptOutcome.AWAY])
def test_external_failures_never_count_against_a_line(outcome: AttemptOutcome) -> None:
    attempts = LineAttempts()
    for _ in range(1000):
        attempts = attempts.after(outcome)
    assert not attempts.exhausted and not attempts.group


def test_losses_reduce_the_group_size() -> None:
    """The last of all attempts are alone, and after them the line is given up."""
    attempts = LineAttempts()
    seen = []
    while not attempts.exhausted:
        seen.append(attempts.group)
        attempts = attempts.after(AttemptOutcome.LOST)
    assert seen == [0, 0, 64, 8, 1, 1]


def test_delays_grow_to_a_bound_with_jitter() -> None:
    rng = random.Random(7)
    waits = [[retries.backoff_s(attempts, rng) for _ in range(50)] for attempts in range(12)]
    for attempts, drawn in enumerate(waits):
        longest = min(30.0, 0.5 * 2**attempts)
        assert longest / 2 <= min(drawn) < max(drawn) <= longest
        assert len(set(drawn)) > 40
