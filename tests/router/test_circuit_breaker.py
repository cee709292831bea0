"""When requests that fail put a worker aside, and what brings it back."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from baton_router.workers.circuit_breaker import (
    FAILURES_IN_A_ROW,
    PAUSE_LIMIT_S,
    PAUSE_S,
    WINDOW,
    WINDOW_S,
    CircuitBreaker,
)

# F: a request failed; S: one was served; each a tenth of a second after the one before.
STORIES: dict[str, tuple[str, bool]] = {
    "nothing yet": ("", False),
    "served": ("SSSS", False),
    "one failure fewer than needed": ("FFFF", False),
    "five in a row": ("FFFFF", True),
    "a success between": ("FFFFSFFFF", False),
    "half of twenty": ("FS" * 10, False),
    "half of twenty, and the last one failed": ("FS" * 10 + "F", True),
    "nearly half": ("FSFSS" * 8, False),
    "good ones before the first failure do not count": ("S" * 100 + "FS" * 10 + "F", True),
}


def after(story: str, every_s: float = 0.1) -> tuple[CircuitBreaker, float]:
    breaker, now = CircuitBreaker(), 1000.0
    for number, outcome in enumerate(story, 1):
        now += every_s
        breaker = breaker.sent(number, now)
        breaker = breaker.failed(number, now) if outcome == "F" else breaker.served(number, now)
    return breaker, now


@pytest.mark.parametrize(("story", "open_"), STORIES.values(), ids=STORIES.keys())
def test_failures_open_the_breaker(story: str, open_: bool) -> None:
    breaker, now = after(story)
    assert breaker.refuses(now) == open_


def test_old_failures_do_not_open_the_breaker() -> None:
    breaker, now = after("FS" * 30, every_s=WINDOW_S / WINDOW * 1.5)
    assert not breaker.refuses(now)


def opened() -> tuple[CircuitBreaker, float]:
    return after("F" * FAILURES_IN_A_ROW)


def test_half_open_breaker_admits_one_probe_at_a_time() -> None:
    breaker, now = opened()
    assert breaker.refuses(now + PAUSE_S - 0.01)
    now += PAUSE_S
    assert not breaker.refuses(now)
    breaker = breaker.sent(77, now)
    assert breaker.refuses(now)
    assert breaker.served(5, now).refuses(now), "a request of long ago proves nothing"
    assert breaker.failed(5, now) == breaker
    assert not breaker.served(77, now).opened


def test_abandoned_probe_lets_the_next_request_probe() -> None:
    breaker, now = opened()
    now += PAUSE_S
    breaker = breaker.sent(77, now)
    assert breaker.release(5).refuses(now)
    breaker = breaker.release(77)
    assert not breaker.refuses(now)
    assert breaker.sent(78, now).probe == 78


def test_pause_doubles_up_to_its_limit() -> None:
    breaker, now = opened()
    pauses = []
    for number in range(100, 110):
        pauses.append(breaker.until - now)
        now = breaker.until
        breaker = breaker.sent(number, now).failed(number, now)
    assert pauses == pytest.approx([min(PAUSE_S * 2**n, PAUSE_LIMIT_S) for n in range(10)])


@pytest.mark.parametrize(("quiet_s", "pause_s"), [(1.0, 2 * PAUSE_S), (PAUSE_LIMIT_S + 1, PAUSE_S)])
def test_quiet_period_resets_the_pause(quiet_s: float, pause_s: float) -> None:
    breaker, now = opened()
    now = breaker.until
    breaker = breaker.sent(9, now).served(9, now)
    now += quiet_s
    for number in range(10, 10 + FAILURES_IN_A_ROW):
        breaker = breaker.failed(number, now)
    assert breaker.until - now == pytest.approx(pause_s)


def test_breaker_without_failures_keeps_no_state() -> None:
    breaker = CircuitBreaker()
    assert breaker.sent(1, 5.0) is breaker
    assert breaker.served(1, 5.0) is breaker
    assert breaker.release(1) is breaker


class Model:
    """The plain model: a list of all outcomes, evaluated each time."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[float, bool]] = []

    def bad(self, now: float) -> bool:
        """Whether outcomes since it last closed are enough to open it."""
        failures = [failed for _, failed in self.outcomes]
        if all(failures[-FAILURES_IN_A_ROW:]) and len(failures) >= FAILURES_IN_A_ROW:
            return True
        last: Sequence[tuple[float, bool]] = self.outcomes[-WINDOW:]
        enough = len(last) == WINDOW and now - last[0][0] <= WINDOW_S
        return enough and sum(failed for _, failed in last) * 2 >= WINDOW and last[-1][1]


@pytest.mark.parametrize("seed", range(60))
def test_law_breaker_opens_after_failures_and_admits_one_probe(seed: int) -> None:
    rng = random.Random(seed)
    breaker, model, now = CircuitBreaker(), Model(), 0.0
    under_way: dict[int, bool] = {}
    """Number -> whether it was let through as the probe."""
    share = rng.choice((0.05, 0.4, 0.6, 1.0))
    for number in range(1, 600):
        now += rng.expovariate(rng.choice((0.5, 5.0, 50.0)))
        was_open, refused = breaker.opened, breaker.refuses(now)
        if not refused:
            breaker = breaker.sent(number, now)
            assert (breaker.probe == number) == was_open
            under_way[number] = was_open
        assert sum(under_way.values()) <= 1, "one probe at a time"
        while under_way and rng.random() < 0.6:
            ended = rng.choice(list(under_way))
            probe = under_way.pop(ended)
            before = breaker
            if rng.random() < 0.1:
                breaker = breaker.release(ended)
                assert breaker.opened == before.opened and breaker.probe != ended
                continue
            failed = rng.random() < share
            breaker = (breaker.failed if failed else breaker.served)(ended, now)
            if before.opened and not probe:
                assert breaker is before
            elif before.opened:
                assert breaker.opened == failed
                model.outcomes.clear()
            else:
                if failed or any(bad for _, bad in model.outcomes):
                    model.outcomes.append((now, failed))
                if not any(bad for _, bad in model.outcomes[-WINDOW:]):
                    model.outcomes.clear()
                assert breaker.opened == model.bad(now)
                if breaker.opened:
                    model.outcomes.clear()
            assert not breaker.opened or 0 < breaker.until - breaker.since <= PAUSE_LIMIT_S + 1e-6
