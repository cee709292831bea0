"""Whether blocks of a peer are read or computed: the table, and what always holds."""

from __future__ import annotations

import random

import pytest

from baton_engine.tiers.policy import (
    FIRST_BYTES_PER_S,
    FORGET_S,
    PAUSE_S,
    SHARE,
    PeerSpeed,
    PromptSpeed,
    ReadSpeed,
    read_within_s,
)

BLOCK_BYTES = 1_000_000

CASES = {
    "sooner by far": (100, 2.0, ReadSpeed(0.01, 0.001), 1.0),
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
    """Whatever was measured: with the read's limit, a prompt takes at most 1 + SHARE times computing."""
    chance = random.Random(1)
    for _ in range(2000):
        compute_s = chance.choice([0.0, chance.expovariate(1.0)])
        speed = ReadSpeed(chance.expovariate(20.0), chance.expovariate(1000.0))
        blocks = chance.randint(1, 500)
        within_s = read_within_s(blocks, compute_s, speed)
        assert within_s in (0.0, SHARE * compute_s)
        assert not within_s or speed.seconds(blocks) <= within_s


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
