"""How long a first byte is waited for, and when another worker is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton_router.engines.engine_request import OVERDUE
from baton_router.proxy.timeouts import SLOW, FirstByteTimeout, first_byte_s
from baton_router.requests.picker import Grant
from baton_router.scheduling.scheduler import first_token_timeout_s

PREDICTIONS = {
    "a short one has the least": (0.05, 2.05),
    "a long one has three times that and once more": (4.0, 16.0),
    "where they meet": (2 / 3, 2 + 2 / 3),
}


@pytest.mark.parametrize(("predicted", "seconds"), PREDICTIONS.values(), ids=PREDICTIONS.keys())
def test_timeout_is_several_times_the_prediction(predicted: float, seconds: float) -> None:
    assert first_token_timeout_s(predicted, 2.0) == pytest.approx(seconds)


def grant(timeout: float, step_s: float = 0.01) -> Grant:
    return Grant(
        number=1,
        decode="127.0.0.1:1",
        prefill="",
        control="",
        summary=b"",
        first_token_timeout_s=timeout,
        step_s=step_s,
        has_alternative=True,
    )


TOKENS: dict[str, tuple[Grant, int | None, float]] = {
    "of a stream": (grant(2.5), 1, 2.5),
    "of a whole answer": (grant(2.5), 101, 2.5 + 10 * 0.01 * 100),
    "of one whose length nobody knows": (grant(2.5), None, 0.0),
    "where there is nobody else": (grant(0.0), 1, 0.0),
}


@pytest.mark.parametrize(("granted", "tokens", "seconds"), TOKENS.values(), ids=TOKENS.keys())
def test_first_byte_is_due_with_its_token(granted: Grant, tokens: int | None, seconds: float) -> None:
    assert first_byte_s(granted, tokens) == pytest.approx(seconds)


class FakeAttempt:
    """Remembers why it was ended; before `begun` there is nothing to end."""

    def __init__(self, begun: bool = True) -> None:
        self.begun = begun
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.polled = asyncio.Event()

    def fail(self, cause: str) -> bool:
        self.polled.set()
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
async def test_attempt_ends_for_one_reason_only(
    slow: float, limit: float, may_leave: Callable[[], bool], cause: str
) -> None:
    attempt = FakeAttempt()
    timeout = FirstByteTimeout(attempt, slow, asyncio.get_running_loop().time() + limit, may_leave)
    async with asyncio.timeout(60):
        assert await attempt.ended == cause
    timeout.close()


async def test_connecting_attempt_ends_as_soon_as_it_is_connected() -> None:
    attempt = FakeAttempt(begun=False)
    loop = asyncio.get_running_loop()
    timeout = FirstByteTimeout(attempt, 0.01, loop.time() + 5.0, yes)
    async with asyncio.timeout(60):
        await attempt.polled.wait()
        attempt.begun = True
        assert await attempt.ended == SLOW
    timeout.close()


async def test_started_answer_has_no_first_byte_timeout() -> None:
    attempt = FakeAttempt()
    FirstByteTimeout(attempt, 0.01, asyncio.get_running_loop().time() + 0.02, yes).close()
    await asyncio.sleep(0.05)
    assert not attempt.polled.is_set()
