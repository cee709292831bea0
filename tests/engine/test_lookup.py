"""Drafts from a request's own tokens, and their number by cost: pure decisions."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from baton_engine.prompt_lookup import (
    CANDIDATES,
    GAP,
    INDEXED_AT_ONCE,
    LONGEST_MATCH,
    PAIR,
    PRIORS,
    AcceptanceRates,
    Lookup,
)
from baton_engine.speculation.costs import LIFETIME, PassTimes, allot

CASES: dict[str, tuple[list[int], list[int], list[int], list[int]]] = {
    "nothing repeats": ([1, 2, 3, 4], [], [], []),
    "an empty prompt": ([], [], [7], []),
    "a pair repeats": ([1, 2, 3, 4, 5, 1], [], [2], [3, 4, 5]),
    "the latest of two": ([1, 2, 8, 9, 1, 2, 6, 7, 1], [], [2], [6, 7, 1]),
    "a longer match before the latest": ([5, 1, 2, 8, 9, 0, 1, 2, 6, 7, 5, 1], [], [2], [8, 9, 0]),
    "a repeated token": ([4, 7, 7], [], [7], [7, 7, 7]),
    "a period of two": ([4, 1, 2, 1], [], [2], [1, 2, 1]),
    "a prediction from its start": ([1, 2], [5, 6, 7, 8], [], [5, 6, 7]),
    "a prediction that is followed": ([1, 2], [5, 6, 7, 8], [5], [6, 7, 8]),
    "the end of a prediction": ([1, 2], [5, 6, 7], [5, 6], [7]),
    "after the end of a prediction": ([1, 2], [5, 6, 7], [5, 6, 7], []),
    "a prediction that is left": ([1, 2], [5, 6, 7], [5, 9], []),
    "a prediction that is found again": ([1, 2], [5, 6, 7, 8, 9], [5, 4, 7, 8], [9]),
}


@pytest.mark.parametrize(("prompt", "prediction", "answer", "draft"), CASES.values(), ids=CASES.keys())
def test_lookup_proposes(
    prompt: list[int], prediction: list[int], answer: list[int], draft: list[int]
) -> None:
    lookup = Lookup(prompt, prediction)
    lookup.propose(3)
    lookup.follow(answer)
    assert lookup.propose(3) == draft


def test_lookup_counts_predicted_tokens() -> None:
    lookup = Lookup([1, 2], [5, 6, 7, 8, 9])
    for token in (5, 6, 3, 7, 8, 9, 5, 6):
        lookup.propose(1)
        lookup.push(token)
    assert lookup.predicted == 3  # 5, 6, and 9 after the pair that was found again


def test_lookup_starts_with_the_rates_of_earlier_requests() -> None:
    shared = AcceptanceRates()
    fresh = Lookup([1, 2, 3, 1, 2], shared=shared)
    assert fresh.propose(1) == [3]
    for _ in range(200):
        lookup = Lookup([1, 2, 3, 1], shared=shared)
        lookup.push(2)
        lookup.propose(1)
        lookup.push(9)
    late = Lookup([1, 2, 3, 1, 2], shared=shared)
    late.propose(1)
    assert late.chances(1)[0] < 0.1 < fresh.chances(1)[0]
    assert shared.of(0) == PRIORS[0]  # other classes keep their rates


@pytest.mark.parametrize("seed", range(20))
def test_lookup_draft_follows_the_longest_match(seed: int) -> None:
    """The law, against a search of every place."""
    numbers = random.Random(seed)
    text = [numbers.randrange(2 + seed % 5) for _ in range(numbers.randrange(2, 60))]
    lookup = Lookup(text[:2])
    for token in text[2:]:
        lookup.push(token)  # without `propose`: no place is followed
    draft = lookup.propose(4)

    def matched(place: int) -> int:
        length = 0
        while length < min(place, LONGEST_MATCH) and text[place - length - 1] == text[-length - 1]:
            length += 1
        return length

    matches = [place for place in reversed(range(PAIR, len(text))) if matched(place) >= PAIR]
    best = max(matches[:CANDIDATES], key=matched, default=len(text))  # the latest of several
    assert draft == (text[best:] * 4)[:4]


def test_lookup_never_proposes_the_gap() -> None:
    lookup = Lookup([1, 2, 3], [3, 4])
    for token in (3, 4, 1, 2, 3, 4, 1):
        assert GAP not in lookup.propose(8)
        lookup.push(token)


def test_lookup_long_prompt_is_indexed_in_parts() -> None:
    prompt = list(range(2 * INDEXED_AT_ONCE))
    lookup = Lookup(prompt)
    lookup.follow([5, 6])
    assert lookup.propose(2) == []
    assert lookup.propose(2) == [7, 8]


def test_lookup_chances_rise_with_hits_and_fall_with_misses() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 3
    lookup = Lookup(text)
    lookup.propose(1)
    before = lookup.chances(8)
    assert all(later < earlier for earlier, later in pairwise(before))
    lookup.follow(text)
    lookup.propose(1)
    assert lookup.chances(8)[7] > before[7]
    missed = Lookup(text)
    for token in (90, 1, 2, 91, 1, 2, 92, 1, 2):
        missed.propose(1)
        missed.push(token)
    missed.propose(1)
    assert missed.chances(1)[0] < 0.3


def times_of(**seconds: float) -> PassTimes:
    """Pass times by number of tokens, such as t8=2.0."""
    times = PassTimes()
    for name, value in seconds.items():
        times.add(int(name[1:]), value)
    return times


def test_pass_times_reach_ends_at_the_limit() -> None:
    times = PassTimes(limit=20)
    for size, reach in ((8, 16), (16, 20)):
        times.add(size, 1.0)
        assert times.reach(1) == reach


def test_pass_times_delay_makes_drafts_rare_and_is_tried_again() -> None:
    times = times_of(t1=1.0, t8=1.0)
    for _ in range(30):
        times.add_delay(2.0)
    assert allot([[0.9, 0.8]], 1, times) == [0]
    for _ in range(2 * LIFETIME):
        times.add(1, 1.0)
        times.add(8, 1.0)
    assert allot([[0.9, 0.8]], 1, times) == [2]


ALLOTTED: dict[str, tuple[list[list[float]], int, dict[str, float], list[int]]] = {
    "nothing was measured": ([[0.9, 0.8]], 1, {}, [0]),
    "free tokens": ([[0.9, 0.8]], 1, {"t1": 1.0, "t8": 1.0}, [2]),
    "tokens at their share of the time": ([[0.9, 0.8]], 1, {"t1": 1.0, "t8": 8.0}, [0]),
    "less than the errors of the estimates": ([[0.9]], 1, {"t1": 1.0, "t2": 1.86, "t8": 8.0}, [0]),
    "only likely tokens": ([[0.9, 0.8, 0.2, 0.1]], 1, {"t1": 1.0, "t2": 1.3, "t8": 3.1}, [2]),
    "the likelier row": ([[0.3, 0.1], [0.9, 0.8]], 2, {"t2": 1.0, "t8": 2.5}, [0, 2]),
    "at most twice the measured size": ([[0.99] * 16], 1, {"t1": 1.0}, [1]),
    "a tile of which the first token is dear": (
        [[0.99] * 5], 1, {"t1": 1.0, "t2": 2.5, "t3": 2.5, "t6": 2.5}, [5],
    ),
    "a full batch": ([[0.9] * 4] * 32, 32, {"t32": 32.0, "t64": 64.0}, [0] * 32),
}  # fmt: skip


@pytest.mark.parametrize(("chances", "tokens", "seconds", "counts"), ALLOTTED.values(), ids=ALLOTTED.keys())
def test_allot_weighs_chances_against_seconds(
    chances: list[list[float]], tokens: int, seconds: dict[str, float], counts: list[int]
) -> None:
    assert allot(chances, tokens, times_of(**seconds)) == counts


@pytest.mark.parametrize("seed", range(10))
def test_allot_expects_no_fewer_tokens_per_second(seed: int) -> None:
    """The law: a draft is planned only if the measured times promise more tokens per second."""
    numbers = random.Random(seed)
    times, rows = PassTimes(), numbers.randrange(1, 40)
    for size in range(1, 100):
        times.add(size, numbers.uniform(0.5, 1.5) + numbers.random() * size)
    chances = [
        sorted((numbers.random() for _ in range(numbers.randrange(9))), reverse=True) for _ in range(rows)
    ]
    counts = allot(chances, rows, times)
    gain = sum(sum(row[:count]) for row, count in zip(chances, counts, strict=True))
    assert times.of(rows + sum(counts)) / (rows + gain) <= times.of(rows) / rows
    assert all(count <= len(row) for row, count in zip(chances, counts, strict=True))


def test_pass_times_slow_pass_counts_little() -> None:
    times = times_of(t4=1.0)
    times.add(4, 9.0)
    assert times.of(4) == pytest.approx(1.8)
    times.add(4, 1.0)
    assert times.of(4) == pytest.approx(1.4)


def test_pass_times_old_measurements_are_dropped() -> None:
    times = times_of(t8=50.0)
    for _ in range(2 * LIFETIME):
        times.add(1, 1.0)
    assert times.of(8) < 8.0
    assert times.reach(1) == 2
