"""The router's time predictions: lines through measurements, bookings, averages."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from baton_api import profiles
from baton_api.errors import SetupError
from baton_api.profiles import Capacity, PrefillLine, Profile, StepLine, TransferLine
from baton_http.upstream import UpstreamPool
from baton_router.scheduling.scheduler import RequestScheduler
from baton_router.settings import RouterSettings
from baton_router.workers.bookings import PrefillBookings, StreamBookings
from baton_router.workers.costs import (
    FORGETTING,
    LEAST_S,
    MAX_BYTES_PER_TOKEN,
    MIN_BYTES_PER_TOKEN,
    NEVER,
    BytesPerToken,
    CostPrior,
    LeastSquares,
    StepCost,
    TransferCost,
    WorkerKind,
)
from baton_router.workers.worker_state import WorkerStates


@pytest.mark.parametrize("seed", range(5))
def test_linear_model_is_learned_from_noisy_measurements(seed: int) -> None:
    rng = random.Random(seed)
    truth = (0.5, 2.0, 0.3)
    line = LeastSquares((0.0, 0.0, 0.0))
    for _ in range(300):
        inputs = (1.0, rng.uniform(0, 3), rng.uniform(0, 3))
        exact = sum(c * x for c, x in zip(truth, inputs, strict=True))
        line.learn(*inputs, exact * rng.uniform(0.9, 1.1))
    for inputs in ((1.0, 1.0, 1.0), (1.0, 3.0, 0.0), (1.0, 0.0, 3.0)):
        exact = sum(c * x for c, x in zip(truth, inputs, strict=True))
        assert line.predict(*inputs) == pytest.approx(exact, rel=0.15, abs=0.1)


def test_linear_model_follows_changed_times() -> None:
    line = LeastSquares((1.0, 0.0, 0.0))
    for _ in range(500):
        line.learn(1.0, 0.0, 0.0, 1.0)
    for _ in range(300):
        line.learn(1.0, 0.0, 0.0, 3.0)
    assert line.predict(1.0, 0.0, 0.0) == pytest.approx(3.0, rel=0.1)


def test_constant_zero_input_keeps_the_fit_stable() -> None:
    line = LeastSquares((1.0, 1.0, 0.0))
    for _ in range(20_000):
        line.learn(1.0, 0.0, 0.0, 2.0)
    assert line.predict(1.0, 0.0, 0.0) == pytest.approx(2.0)
    line.learn(1.0, 1.0, 0.0, 2.5)
    assert abs(line.predict(1.0, 0.0, 0.0) - 2.0) < 0.6


@pytest.mark.parametrize("seed", range(5))
def test_recursion_equals_the_textbook_least_squares(seed: int) -> None:
    rng = random.Random(seed)
    line = LeastSquares((0.1, 0.2, 0.3))
    coefficients = [0.1, 0.2, 0.3]
    variance = [[10.0 if row == column else 0.0 for column in range(3)] for row in range(3)]
    for _ in range(200):
        x = [1.0, rng.uniform(0, 3), rng.uniform(0, 3)]
        outcome = rng.uniform(0, 5)
        line.learn(x[0], x[1], x[2], outcome)
        gains = [sum(v * one for v, one in zip(row, x, strict=True)) for row in variance]
        spread = FORGETTING + sum(one * gain for one, gain in zip(x, gains, strict=True))
        error = outcome - sum(c * one for c, one in zip(coefficients, x, strict=True))
        coefficients = [c + gain / spread * error for c, gain in zip(coefficients, gains, strict=True)]
        variance = [
            [
                (variance[row][column] - gains[row] * gains[column] / spread) / FORGETTING
                for column in range(3)
            ]
            for row in range(3)
        ]
        assert line.coefficients == pytest.approx(coefficients, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_prompts_of_another_length_are_remembered(seed: int) -> None:
    """After ten minutes of short prompts a long one still costs what it did."""
    cost, truth, rng = WorkerKind().new_worker(), WorkerKind().new_worker(), random.Random(seed)
    for number in range(8000):
        tokens = 512 if number > 200 or number % 2 else 8192
        cost.learn(tokens, tokens, truth.seconds(tokens, tokens) * rng.uniform(0.8, 1.2))
    for tokens in (512, 8192):
        assert cost.seconds(tokens, tokens) == pytest.approx(truth.seconds(tokens, tokens), rel=0.25)


def test_changed_times_of_prompts_that_are_all_alike_are_followed() -> None:
    line = LeastSquares((1.0, 0.0, 0.0))
    for outcome in (1.0, 3.0):
        for _ in range(5000):
            line.learn(1.0, 0.5, 0.1, outcome)
        assert line.predict(1.0, 0.5, 0.1) == pytest.approx(outcome, rel=0.01)
    for _ in range(300):
        line.learn(1.0, 0.5, 0.1, 2.0)
    assert line.predict(1.0, 0.5, 0.1) == pytest.approx(2.0, rel=0.1)


def test_tokens_with_a_long_context_cost_more() -> None:
    cost = WorkerKind().new_worker()
    truth = WorkerKind().new_worker()
    truth.line.coefficients = (0.01, 0.05, 0.02)
    rng = random.Random(1)
    for _ in range(400):
        context = rng.randint(100, 8000)
        uncached = rng.randint(1, context)
        cost.learn(uncached, context, truth.seconds(uncached, context))
    for uncached, context in ((100, 8000), (8000, 8000), (500, 500)):
        assert cost.seconds(uncached, context) == pytest.approx(truth.seconds(uncached, context), rel=0.05)
    assert cost.seconds(100, 8000) > cost.seconds(100, 100)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_prompts_that_are_all_alike_keep_the_fit_stable(seed: int, noise: float) -> None:
    cost, rng = WorkerKind().new_worker(), random.Random(seed)
    for number in range(4000):
        uncached = rng.randint(48, 53)
        cost.learn(uncached, uncached + 42, (1e-4 + 2e-5 * uncached) * rng.uniform(1 - noise, 1 + noise))
        if number > 2000:
            assert cost.seconds(50, 92) == pytest.approx(1.1e-3, rel=0.5)
            assert cost.seconds(92, 92) < 2 * 1.94e-3


def test_prediction_is_never_in_the_past() -> None:
    prefill, step = WorkerKind().new_worker(), StepCost()
    for _ in range(50):
        prefill.learn(1000, 1000, 0.001)
        step.learn(1, 100, 0.0001)
    assert prefill.seconds(0, 10) >= LEAST_S
    assert step.seconds(0, 0) >= LEAST_S


def test_transfer_speed_follows_the_latest_transfers() -> None:
    cost = TransferCost()
    for _ in range(100):
        cost.learn(1000, 0.001 + 0.5)
    assert cost.seconds(2000, 0.0) == pytest.approx(1.001, rel=0.01)
    cost.apart_until = 30.0
    assert cost.seconds(2000, 29.9) == NEVER
    assert cost.seconds(2000, 30.0) < NEVER
    cost.learn(0, 9.0)
    assert cost.seconds(0, 30.0) == cost.start_s


def test_backlog_is_the_bookings_minus_the_progress_of_the_first() -> None:
    booked = PrefillBookings()
    booked.book(1, 4.0, 100, now=10.0)
    booked.book(2, 2.0, 50, now=11.0)
    assert booked.backlog_s(10.0) == pytest.approx(6.0)
    assert booked.backlog_s(12.0) == pytest.approx(4.0)
    assert booked.backlog_s(99.0) == pytest.approx(6.0 - 0.95 * 4.0), "late, but not done"
    booked.release(1, now=14.0)
    assert booked.backlog_s(14.0) == pytest.approx(2.0)
    assert booked.backlog_s(15.0) == pytest.approx(1.0)
    booked.release(2, now=16.0)
    assert booked.backlog_s(16.0) == 0.0


def test_booking_released_out_of_order_keeps_the_first() -> None:
    booked = PrefillBookings()
    booked.book(1, 4.0, 100, now=0.0)
    booked.book(2, 2.0, 50, now=0.0)
    booked.release(2, now=3.0)
    assert booked.backlog_s(3.0) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(10))
def test_bookings_are_released_completely(seed: int) -> None:
    rng = random.Random(seed)
    prefill, streams = PrefillBookings(), StreamBookings()
    live: dict[int, tuple[float, int, int]] = {}
    now = 0.0
    for number in range(500):
        now += rng.random()
        if live and rng.random() < 0.5:
            one = rng.choice(list(live))
            del live[one]
            for _ in range(rng.randint(1, 2)):  # twice is once
                prefill.release(one, now)
                streams.release(one)
        else:
            seconds, tokens, context = rng.uniform(0.01, 5), rng.randint(1, 1000), rng.randint(1, 1000)
            live[number] = seconds, tokens, context
            prefill.book(number, seconds, tokens, now)
            streams.book(number, context)
        assert prefill.waiting == streams.count == len(live)
        assert prefill.tokens == sum(tokens for _, tokens, _ in live.values())
        assert streams.tokens == sum(context for _, _, context in live.values())
        total = sum(seconds for seconds, _, _ in live.values())
        assert prefill.seconds == pytest.approx(total, abs=1e-6)
        assert 0.0 <= prefill.backlog_s(now) <= total + 1e-6


def test_untried_worker_is_assumed_to_be_like_its_peers() -> None:
    kind, other_kind = WorkerKind(), WorkerKind()
    first, second = kind.new_worker(), kind.new_worker()
    guess = first.seconds(1000, 1000)
    for size in range(100, 5000, 50):
        first.learn(size, size, 0.001 + size * 1e-6)
    later = kind.new_worker()
    for untried in (second, later):
        assert untried.seconds(1000, 1000) == pytest.approx(first.seconds(1000, 1000), rel=0.2)
        assert not untried.is_calibrated
    assert other_kind.new_worker().seconds(1000, 1000) == guess


def test_tried_worker_uses_its_own_measurements() -> None:
    kind = WorkerKind()
    quick, slow = kind.new_worker(), kind.new_worker()
    for size in range(100, 5000, 50):
        quick.learn(size, size, 0.001 + size * 1e-6)
        slow.learn(size, size, 0.1 + size * 1e-4)
    assert quick.seconds(1000, 1000) == pytest.approx(0.002, rel=0.3)
    assert slow.seconds(1000, 1000) == pytest.approx(0.2, rel=0.3)


@pytest.mark.parametrize("seed", range(20))
def test_law_prediction_is_monotonic(seed: int) -> None:
    rng = random.Random(seed)
    cost, step = WorkerKind().new_worker(), StepCost()
    for _ in range(200):
        size = rng.randint(1, 4000)
        cost.learn(size, size, rng.uniform(0.0, 0.05))  # noise, and nothing else
        step.learn(rng.randint(1, 32), rng.randint(1, 10_000), rng.uniform(0.0, 0.05))
        assert cost.seconds(100, 100) <= cost.seconds(1000, 1000) <= cost.seconds(100_000, 100_000)
        assert step.seconds(1, 100) <= step.seconds(8, 800) <= step.seconds(64, 100_000)


PROFILE = Profile(
    model="measured",
    machine="one core",
    baton="0",
    measured_at=0.0,
    prefill=PrefillLine(base_s=0.004, token_s=2e-5, pair_s=3e-9),
    step=StepLine(base_s=0.006, stream_s=1e-4, token_s=5e-8),
    transfer=TransferLine(start_s=0.002, token_s=4e-6),
    kv_tokens=10_000,
    capacity=Capacity(
        prefill_tokens_per_s=0.0, decode_tokens_per_s=0.0, decode_streams=0, prefill_per_decode=0.0
    ),
)


def test_profile_applies_until_something_is_measured() -> None:
    prior = CostPrior.of(PROFILE)
    cost = WorkerKind(prior).new_worker()
    for uncached, context in ((100, 100), (500, 4000)):
        assert cost.seconds(uncached, context) == pytest.approx(PROFILE.prefill.seconds(uncached, context))
    step = StepCost(LeastSquares(prior.step))
    assert step.seconds(8, 5000) == pytest.approx(PROFILE.step.seconds(8, 5000))
    assert not cost.is_calibrated
    for _ in range(60):
        cost.learn(100, 100, 1.0)
    assert cost.seconds(100, 100) == pytest.approx(1.0, rel=0.1)


def test_profile_applies_only_to_its_model() -> None:
    for states, seconds in (
        (WorkerStates([PROFILE]), PROFILE.transfer.seconds(1000)),
        (WorkerStates(), 0.003),
    ):
        assert states.transfer("a", "b").seconds(1000, 0.0) == pytest.approx(seconds)


def test_router_starts_with_its_configured_profiles(tmp_path: Path) -> None:
    def scheduler(path: Path) -> RequestScheduler:
        settings = RouterSettings(decode=("http://127.0.0.1:1",), profile=(path,))
        return RequestScheduler(settings, UpstreamPool(1.0), random.Random(0), lambda: 0.0)

    profiles.write(PROFILE, tmp_path / "there.json")
    states = scheduler(tmp_path / "there.json").planner.worker_states
    assert states.transfer("a", "b").start_s == PROFILE.transfer.start_s
    with pytest.raises(SetupError, match="Cannot read the profile"):
        scheduler(tmp_path / "none.json")


PROMPTS: dict[str, list[tuple[int, int]]] = {
    "none": [],
    "120 chats of two bytes, all else is the template": [(2, 31)] * 120,
    "after long ones": [(8192, 2048)] * 20 + [(2, 31)] * 500,
    "an empty one": [(0, 30)],
    "a mixture": [(2, 31), (400, 130), (9000, 2250)] * 40,
}


@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS.keys())
def test_bytes_per_token_of_short_prompts_say_little_about_long_ones(prompts: list[tuple[int, int]]) -> None:
    learned = BytesPerToken()
    for size, tokens in prompts:
        learned.learn(size, tokens)
    assert 8440 / learned.value == pytest.approx(2110, rel=0.15)


@pytest.mark.parametrize(("size", "tokens"), [(10**6, 1), (0, 10**6), (10**6, 10**6)])
def test_law_bytes_per_token_are_bounded(size: int, tokens: int) -> None:
    learned = BytesPerToken()
    for _ in range(1000):
        learned.learn(size, tokens)
        assert MIN_BYTES_PER_TOKEN <= learned.value <= MAX_BYTES_PER_TOKEN
