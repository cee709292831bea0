"""The forecast: a table of shapes, then what noise makes of a demand that is constant."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from baton_operator.scaling.history import forecast

TICK_S, WINDOW_S = 15.0, 120.0

SHAPES: dict[str, tuple[Callable[[float], float], float]] = {
    "constant": (lambda time: 100.0, 100.0),
    "rising by a fifth in the time that a worker takes to start": (lambda time: 10.0 + time / 5, 88.0),
    "falling": (lambda time: 310.0 - time, 10.0),
    "rising steeply: half as much again is believed": (lambda time: 2 * time - 300, 450.0),
}


@pytest.mark.parametrize(("shape", "expected"), SHAPES.values(), ids=SHAPES)
def test_forecast_shape_gives_expected_value(shape: Callable[[float], float], expected: float) -> None:
    samples = [(TICK_S * tick, shape(TICK_S * tick)) for tick in range(1, 21)]
    assert forecast(samples, shape(300.0), 90.0) == pytest.approx(expected)


def test_of_too_little_nothing_is_forecast() -> None:
    assert forecast([(TICK_S * tick, 100.0 * tick) for tick in range(1, 8)], 700.0, 90.0) == 700.0


def test_requests_that_come_by_chance_forecast_next_to_nothing() -> None:
    """Counted over two minutes, looked at every 15 s: what looks like a line is mostly the same requests."""
    for rate in (0.1, 0.3, 3.0):
        assert _mean_excess(rate) < 0.05


def _mean_excess(rate: float) -> float:
    rng = random.Random(1)
    came: list[float] = [0.0]
    while came[-1] < 20_000:
        came.append(came[-1] + rng.expovariate(rate))
    seen = [
        (now, sum(now - WINDOW_S < at <= now for at in came) / WINDOW_S)
        for now in (TICK_S * tick for tick in range(8, 400))
    ]
    forecasts = [forecast(seen[end - 20 : end], seen[end - 1][1], 90.0) for end in range(20, len(seen))]
    return sum(forecasts) / sum(value for _, value in seen[19:-1]) - 1
