"""Whether blocks of a peer are read or computed: the table, and what always holds."""

from __future__ import annotations

import random

import pytest

from baton_engine.tiers.policy import (
    DOUBLINGS,
    FIRST_BYTES_PER_S,
    FORGET_S,
    LATE,
    LEAST_S,
    LOSS,
    PAUSE_S,
    SHARE,
    PeerSpeed,
    PromptSpeed,
    ReadSpeed,
    cleans,
    read_within_s,
)

BLOCK_BYTES = 1_000_000

CASES = {
    "sooner by far": (100, 2.0, ReadSpeed(0.01, 0.001), 4 * 0.11),
    "much sooner: no request notices": (100, 20.0, ReadSpeed(0.01, 0.001), 1.0),
    "an eighth of computing": (98, 8.0, ReadSpeed(0.02, 0.01), 4.0),
    "so soon that the first connection takes longer": (10, 2.0, ReadSpeed(0.001, 0.0001), 0.25),
    "so little that it must be sooner": (10, 0.1, ReadSpeed(0.001, 0.0001), 0.05),
    "exactly half of computing": (98, 2.0, ReadSpeed(0.02, 0.01), 1.0),
    "a little more than half": (99, 2.0, ReadSpeed(0.02, 0.01), 0.0),
    "as long as computing": (200, 2.0, ReadSpeed(0.0, 0.01), 0.0),
    "few blocks, whose announcement takes longest": (1, 0.03, ReadSpeed(0.02, 0.0001), 0.0),
    "a busy peer": (100, 2.0, ReadSpeed(1.5, 0.0001), 0.0),
    "nothing was computed yet": (100, 0.0, ReadSpeed(0.01, 0.001), 0.0),
}


@pytest.mark.parametrize("name", CASES)
def test_read_within(name: str) -> None:
    blocks, compute_s, speed, expected = CASES[name]
    assert read_within_s(blocks, compute_s, speed) == pytest.approx(expected), name


def test_read_is_given_up_before_it_costs_more_than_a_share() -> None:
    """Whatever was measured: a prompt takes at most 1 + SHARE times computing, and less if reads are fast."""
    chance = random.Random(1)
    for _ in range(2000):
        compute_s = chance.choice([0.0, chance.expovariate(1.0)])
        speed = ReadSpeed(chance.expovariate(20.0), chance.expovariate(1000.0))
        blocks = chance.randint(1, 500)
        within_s = read_within_s(blocks, compute_s, speed)
        predicted_s = speed.seconds(blocks)
        assert (within_s > 0) == (predicted_s <= SHARE * compute_s)
        assert within_s <= SHARE * compute_s
        assert within_s <= max(LEAST_S, LOSS * compute_s, LATE * predicted_s)
        assert not within_s or predicted_s <= within_s


@pytest.mark.parametrize("compute_s", [0.05, 0.3, 2.0, 20.0, 120.0])
@pytest.mark.parametrize("idle_s", [0.0, 1.0, 40.0])
def test_peer_that_stalls_costs_little_of_the_time(compute_s: float, idle_s: float) -> None:
    """
    Invariant 7, in virtual time: a conversation's turns, one after the other, while its peer answers nothing.

    One turn may take longer, up to the limit of `read_within_s`; all of them take 1.05 times computing.
    """
    speed, blocks = PeerSpeed(BLOCK_BYTES), 16
    now, turns, worst_s, taken_s = 0.0, 0, 0.0, 0.0
    while now < 6 * 3600:
        turn_s = compute_s
        known = speed.at(now)
        within_s = 0.0 if known is None else read_within_s(blocks, compute_s, known)
        if within_s:
            turn_s += within_s
            speed.failed(now + within_s, within_s)
        turns += 1
        worst_s = max(worst_s, turn_s)
        taken_s += turn_s
        now += turn_s + idle_s
    predicted_s = 0.02 + blocks * BLOCK_BYTES / FIRST_BYTES_PER_S
    assert worst_s <= compute_s + min(0.5 * compute_s, max(0.25, 0.05 * compute_s, 4 * predicted_s)) + 1e-9
    assert taken_s <= 1.05 * turns * compute_s


@pytest.mark.parametrize(
    ("name", "ready", "room", "expected"),
    [
        ("half of the pool is ready", 50, False, False),
        ("less than half is", 49, False, True),
        ("the engine is idle and the tier has room", 100, True, True),
    ],
)
def test_cleans(name: str, ready: int, room: bool, expected: bool) -> None:
    assert cleans(ready, 100, room) is expected, name


def test_prompt_speed_follows_the_latest_passes() -> None:
    speed = PromptSpeed()
    assert speed.seconds(100) == 0.0
    speed.add(0, 9.0)  # a pass without prompt tokens says nothing
    speed.add(512, 1.0)
    assert speed.seconds(1024) == pytest.approx(2.0)
    for _ in range(100):
        speed.add(512, 2.0)
    assert speed.seconds(512) == pytest.approx(2.0, rel=0.01)
    speed.add(100_000, 100.0)
    assert speed.seconds(100) == pytest.approx(0.1)


def first(speed: PeerSpeed, now: float) -> float:
    known = speed.at(now)
    assert known is not None
    return known.seconds(10)


def test_peer_speed_learns_forgets_and_pauses() -> None:
    speed = PeerSpeed(BLOCK_BYTES)
    assumed = first(speed, 0.0)
    assert assumed == pytest.approx(0.02 + 10 * BLOCK_BYTES / FIRST_BYTES_PER_S)
    for _ in range(30):
        speed.add(10, 1.0, 5.0, now=1.0)
    assert first(speed, 1.0) == pytest.approx(6.0, rel=0.01)
    assert first(speed, 1.0 + FORGET_S) == assumed, "a slow measurement does not count for ever"
    speed.add(10, 0.02, 0.01, now=100.0)
    assert first(speed, 100.0) == pytest.approx(assumed), "and does not count in later averages"
    speed.failed(now=100.0)
    assert speed.at(100.0) is None
    assert speed.at(99.9 + PAUSE_S) is None
    assert speed.at(100.0 + PAUSE_S) is not None
    speed.add(10, 0.02, 0.01, now=200.0)
    now = 1000.0
    for failures in range(8):
        for _ in range(3):
            speed.failed(now)  # of several requests at the same time
        pause_s = PAUSE_S * 2 ** min(failures, DOUBLINGS)
        assert speed.at(now + pause_s - 0.1) is None and speed.at(now + pause_s) is not None
        now += pause_s
    speed.add(10, 0.02, 0.01, now)
    speed.failed(now)
    assert speed.at(now + PAUSE_S) is not None, "the failures before a success do not count"
    speed.failed(now, lost_s=3.0)
    assert speed.at(now + 59.9) is None and speed.at(now + 60.0) is not None, "3 s are a twentieth of it"
