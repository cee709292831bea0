"""The window: as wide as helps, and narrower for who says that it is too much."""

from __future__ import annotations

import heapq
import random

import pytest

from baton_batches.send_window import FIRST, MOST, SendWindow


class Service:
    """Serves `slots` lines at once, each for `seconds`. Rejects lines beyond `slots + queue`."""

    def __init__(self, slots: int, seconds: float, queue: int | None = None, wait_s: float = 1.0) -> None:
        self.slots, self.seconds, self.wait_s = slots, seconds, wait_s
        self.capacity = None if queue is None else slots + queue
        self.refusals = 0
        self.served = 0
        self.widths: list[int] = []

    def run(self, window: SendWindow, lines: int, rng: random.Random) -> float:
        """Send lines through `window` until `lines` were served; gives the seconds that it took."""
        now = 0.0
        free = [0.0] * self.slots
        away: list[tuple[float, float, bool]] = []
        while self.served < lines:
            while len(away) < window.size and now >= window.open_at:
                if self.capacity is not None and len(away) >= self.capacity:
                    heapq.heappush(away, (now + 0.001, now, False))
                    self.refusals += 1
                else:
                    start = max(now, heapq.heappop(free))
                    end = start + self.seconds * rng.uniform(0.5, 1.5)
                    heapq.heappush(free, end)
                    heapq.heappush(away, (end, now, True))
            if not away:
                now = window.open_at
                continue
            now, sent, well = heapq.heappop(away)
            if well:
                self.served += 1
                window.answered(now)
            else:
                window.refused(sent, now, self.wait_s)
            self.widths.append(window.size)
        return now


@pytest.mark.parametrize(("slots", "seconds"), [(1, 0.5), (8, 0.2), (64, 1.0), (256, 2.0), (300, 0.1)])
def test_window_widens_until_the_service_is_full(slots: int, seconds: float) -> None:
    window, service = SendWindow(0.0), Service(slots, seconds)
    lines = max(5000, 200 * slots, int(10 * slots / seconds))
    took = service.run(window, lines, random.Random(slots))
    assert lines / took > 0.85 * slots / seconds
    settled = service.widths[len(service.widths) // 2 :]
    assert sorted(settled)[len(settled) // 2] <= max(FIRST, 2 * slots)


def test_window_never_exceeds_its_bound() -> None:
    window, service = SendWindow(0.0, most=40), Service(1000, 0.1)
    service.run(window, 4000, random.Random(1))
    assert max(service.widths) == 40


def test_rejection_halves_and_closes_the_window_for_retry_after() -> None:
    window = SendWindow(0.0)
    window.refused(sent=1.0, now=2.0, wait_s=5.0)
    assert (window.size, window.open_at) == (FIRST // 2, 7.0)


def test_lines_in_flight_at_a_cut_do_not_cut_again() -> None:
    window = SendWindow(0.0)
    for sent in (1.0, 1.1, 1.9):
        window.refused(sent=sent, now=2.0, wait_s=1.0)
    assert window.size == FIRST // 2
    window.refused(sent=2.5, now=3.0, wait_s=1.0)
    assert window.size == FIRST // 4


def test_window_is_never_narrower_than_one_line() -> None:
    window = SendWindow(0.0)
    for second in range(100):
        window.refused(sent=second, now=second + 0.5, wait_s=0.0)
    assert window.size == 1


def test_window_recovers_soon_after_an_outage() -> None:
    window = SendWindow(0.0)
    for second in range(1, 31):
        window.refused(sent=second - 0.5, now=second, wait_s=1.0)
    assert window.size == 1
    now = 31.0
    for _ in range(6):
        for _ in range(window.size):
            now += 1 / window.size
            window.answered(now)
    assert window.size >= FIRST // 2


@pytest.mark.parametrize("seed", range(5))
def test_busy_service_stays_full_with_few_rejections(seed: int) -> None:
    rng = random.Random(seed)
    service = Service(slots=rng.randint(4, 64), seconds=0.5, queue=rng.randint(0, 16), wait_s=0.2)
    window = SendWindow(0.0)
    lines = service.slots * 300
    took = service.run(window, lines, rng)
    assert lines / took > 0.6 * service.slots / service.seconds
    assert service.refusals < lines / 10
    assert max(service.widths) <= MOST
