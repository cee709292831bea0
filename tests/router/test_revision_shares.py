"""Shares of revisions: the weights hold although requests have preferences."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from itertools import repeat

import pytest

from baton_router.scheduling.revision_weights import AHEAD_LIMIT, REVISIONS_LIMIT, RevisionShares


def given(weights: Mapping[str, float], preferences: list[str]) -> Counter[str]:
    shares, counts = RevisionShares(), Counter[str]()
    for preferred in preferences:
        chosen = shares.choose(weights, preferred)
        shares.sent(weights, chosen)
        counts[chosen] += 1
    return counts


CASES: dict[str, tuple[dict[str, float], list[str], dict[str, int]]] = {
    "one generation": ({"a": 3.0}, [""] * 5, {"a": 5}),
    "half and half": ({"a": 1.0, "b": 1.0}, [""] * 100, {"a": 50, "b": 50}),
    "a canary of a tenth": ({"a": 90.0, "b": 10.0}, [""] * 100, {"a": 90, "b": 10}),
    "a few that prefer the canary have it": ({"a": 90.0, "b": 10.0}, ["b"] * 5, {"b": 5}),
    "who prefers a generation without a weight has another": ({"a": 1.0}, ["b"] * 5, {"a": 5}),
}


@pytest.mark.parametrize(("weights", "preferences", "counts"), CASES.values(), ids=CASES.keys())
def test_revision_shares_follow_the_weights(
    weights: dict[str, float], preferences: list[str], counts: dict[str, int]
) -> None:
    assert given(weights, preferences) == counts


def test_canary_gets_its_share_of_existing_conversations() -> None:
    counts = given({"a": 99.0, "b": 1.0}, list(repeat("a", 10_000)))
    assert abs(counts["b"] - 100) <= AHEAD_LIMIT + 1


@pytest.mark.parametrize("seed", range(50))
def test_law_revision_shares_stay_close_to_their_weights(seed: int) -> None:
    rng = random.Random(seed)
    names = "abcd"[: rng.randrange(2, 5)]
    weights = {name: rng.choice((0.5, 1.0, 10.0, 89.0)) for name in names}
    total = sum(weights.values())
    favourite = rng.choice(names)
    shares, counts = RevisionShares(), Counter[str]()
    for number in range(1, 2_000):
        preferred = favourite if rng.random() < 0.7 else rng.choice(["", *names])
        chosen = shares.choose(weights, preferred)
        if chosen != preferred:  # then it was ahead
            assert counts[preferred] >= number * weights.get(preferred, 0.0) / total - 1 or not preferred
        shares.sent(weights, chosen)
        counts[chosen] += 1
        for name, weight in weights.items():
            off = counts[name] - number * weight / total
            assert -(len(names) - 1) * (AHEAD_LIMIT + 1) <= off <= AHEAD_LIMIT + 1


def test_revisions_long_gone_are_forgotten() -> None:
    shares = RevisionShares()
    for number in range(10 * REVISIONS_LIMIT):
        weights = {f"r{number}": 1.0, f"r{number + 1}": 1.0}
        shares.sent(weights, shares.choose(weights, ""))
        assert len(shares) <= REVISIONS_LIMIT + 2
