"""How long a first byte is waited for, and when another worker is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton_router.proxy.timeouts import OVERDUE, SLOW, FirstByteTimeout, first_byte_s, first_token_timeout_s
from baton_router.scheduling.picker import Grant

PREDICTIONS = {
    "a short one has the least": (0.05, 2.05),
    "a long one has three times that and once more": (4.0, 16.0),
    "where they meet": (2 / 3, 2 + 2 / 3),
}


@pytest.mark.parametrize(("predicted", "seconds"), PREDICTIONS.values(), ids=PREDICTIONS.keys())
def test_a_worker_has_several_times_what_was_predicted(predicted: float, seconds: float) -> None:
    assert first_token_timeout_s(predicted, 2.0) == pytest.approx(seconds)


def grant(patience: float, step_s: float = 0.01) -> Grant:
    return Grant(1, "127.0.0.1:1", "", "", b"", patience, step_s, has_alternative=True)


TOKENS: dict[str, tuple[Grant, int | None, float]] = {
    "of a stream": (grant(2.5), 1, 2.5),
    "of a whole answer": (grant(2.5), 101, 2.5 + 10 * 0.01 * 100),
    "of one whose length nobody knows": (grant(2.5), None, 0.0),
    "where there is nobody else": (grant(0.0), 1, 0.0),
}


@pytest.mark.parametrize(("granted", "tokens", "seconds"), TOKENS.values(), ids=TOKENS.keys())
def test_the_first_byte_is_due_with_the_token_that_it_comes_with(
    granted: Grant, tokens: int | None, seconds: float
) -> None:
    assert first_byte_s(granted, tokens) == pytest.approx(seconds)


class FakeAttempt:
    """Remembers why it was ended; before `begun` there is nothing to end."""

    def __init__(self, begun: bool = True) -> None:
        self.begun = begun
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.asked = asyncio.Event()

    def fail(self, cause: str) -> bool:
        self.asked.set()
        if self.begun:
            self.ended.set_result(cause)
        return self.begun


def yes() -> bool:
    return True


def no() -> bool:
    return False


CASES: dict[str, tuple[float, float, Callable[[], bool], str]] = {
    "slow": (0.01, 5.0, yes, SLOW),
    "slow, but retries are used up": (0.01, 0.05, no, OVERDUE),
    "nobody else to ask": (0.0, 0.02, yes, OVERDUE),
    "slow later than in any case": (9.0, 0.02, yes, OVERDUE),
}


@pytest.mark.parametrize(("slow", "limit", "may_leave", "cause"), CASES.values(), ids=CASES.keys())
async def test_an_attempt_ends_for_one_reason(
    slow: float, limit: float, may_leave: Callable[[], bool], cause: str
) -> None:
    attempt = FakeAttempt()
    patience = FirstByteTimeout(attempt, slow, asyncio.get_running_loop().time() + limit, may_leave)
    async with asyncio.timeout(60):
        assert await attempt.ended == cause
    patience.close()


async def test_an_attempt_that_only_connects_is_ended_as_soon_as_there_is_something_to_end() -> None:
    attempt = FakeAttempt(begun=False)
    loop = asyncio.get_running_loop()
    patience = FirstByteTimeout(attempt, 0.01, loop.time() + 5.0, yes)
    async with asyncio.timeout(60):
        await attempt.asked.wait()
        attempt.begun = True
        assert await attempt.ended == SLOW
    patience.close()


async def test_an_answer_that_has_begun_is_left_alone() -> None:
    attempt = FakeAttempt()
    FirstByteTimeout(attempt, 0.01, asyncio.get_running_loop().time() + 0.02, yes).close()
    await asyncio.sleep(0.05)
    assert not attempt.asked.is_set()
