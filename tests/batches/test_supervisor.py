"""The choice of batches for free slots, and delays before a failed runner is restarted."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from baton_batches.supervisor import Backoff, choose_batches
from baton_batches.values import BatchRecord, BatchStatus

PLAIN = BatchRecord(
    **{field.name: None for field in dataclasses.fields(BatchRecord)}  # type: ignore[arg-type]
)


def batch(seq: int, owner: str) -> BatchRecord:
    return dataclasses.replace(PLAIN, seq=seq, id=f"batch_{seq}", owner=owner, status=BatchStatus.IN_PROGRESS)


@pytest.mark.parametrize(
    ("waiting", "running", "slots", "begun"),
    [
        ("", "", 2, []),
        ("a", "", 2, [1]),
        ("aaa", "", 2, [1, 2]),
        ("aab", "", 2, [1, 3]),
        ("aab", "a", 2, [3]),
        ("ab", "ab", 2, []),
        ("aaabc", "", 3, [1, 4, 5]),
        ("aab", "bb", 4, [1, 2]),
    ],
    ids=[
        "nothing waits",
        "one waits",
        "one owner has all places",
        "two owners share",
        "who has one waits",
        "no room",
        "three owners",
        "who has two waits longer",
    ],
)
def test_owners_take_turns(waiting: str, running: str, slots: int, begun: list[int]) -> None:
    candidates = [batch(number, owner) for number, owner in enumerate(waiting, 1)]
    held = [batch(100 + number, owner) for number, owner in enumerate(running)]
    assert [one.seq for one in choose_batches(candidates, held, slots)] == begun


@pytest.mark.parametrize("seed", range(20))
def test_choose_batches_shares_places_between_owners(seed: int) -> None:
    rng = random.Random(seed)
    waiting = [batch(number, rng.choice("abcd")) for number in range(rng.randint(0, 30))]
    slots = rng.randint(1, 12)
    begun = choose_batches(waiting, [], slots)
    assert len(begun) == min(slots, len(waiting))
    held = Counter(one.owner for one in begun)
    for owner in {one.owner for one in waiting if one not in begun}:
        assert max(held.values(), default=0) - held[owner] <= 1


def test_unsuccessful_runner_is_restarted_with_growing_delays() -> None:
    setback: Backoff | None = None
    waits = []
    for _ in range(9):
        setback = Backoff.after(setback, done=7, now=0.0)
        waits.append(setback.until)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert Backoff.after(setback, done=8, now=0.0).until == 0.5
