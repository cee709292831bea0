"""The index against a plain model of it: one ordered list of chunks for each worker."""

from __future__ import annotations

import random

import pytest

from baton_router.cache.prefix_index import PrefixIndex


class Plain:
    """The plain model of the index: for each worker its chunks, the next one to evict first."""

    def __init__(self) -> None:
        self.capacity: dict[int, int] = {}
        self.held: dict[int, list[int]] = {}

    def register(self, worker: int, capacity: int) -> None:
        self.capacity[worker] = capacity
        held = self.held.setdefault(worker, [])
        del held[: max(0, len(held) - capacity)]

    def insert(self, worker: int, chunks: list[int]) -> None:
        held = [chunk for chunk in self.held[worker] if chunk not in chunks] + chunks[::-1]
        self.held[worker] = held[max(0, len(held) - self.capacity[worker]) :]

    def match(self, chunks: list[int]) -> dict[int, int]:
        matches: dict[int, int] = {}
        for worker, held in self.held.items():
            count = 0
            while count < len(chunks) and chunks[count] in held:
                count += 1
            if count:
                matches[worker] = count
        return matches


def chain(*messages: int) -> list[int]:
    """The names of a prompt's chunks: each covers all before it."""
    return [hash(messages[: end + 1]) for end in range(len(messages))]


def index_of(**held: list[int]) -> PrefixIndex:
    index = PrefixIndex()
    for name, chunks in held.items():
        index.register(int(name[1:]), 100)
        index.insert(int(name[1:]), chunks)
    return index


def test_worker_matches_up_to_its_first_missing_chunk() -> None:
    index = index_of(w0=chain(1, 2, 3), w1=chain(1, 2), w2=chain(9))
    assert index.match(chain(1, 2, 3, 4)) == {0: 3, 1: 2}
    assert index.match(chain(9, 1)) == {2: 1}
    assert index.match(chain(7)) == {}
    assert index.match([]) == {}


def test_full_worker_evicts_the_tail_of_the_oldest_prompt() -> None:
    index = PrefixIndex()
    index.register(0, 4)
    index.insert(0, chain(1, 2, 3))
    index.insert(0, chain(1, 8, 9))
    assert index.match(chain(1, 2, 3)) == {0: 2}
    assert index.match(chain(1, 8, 9)) == {0: 3}


def test_insert_of_matched_chunks_marks_them_as_used() -> None:
    """The hottest prefix is matched each time and never new: it must not be dropped first."""
    index = PrefixIndex()
    index.register(0, 4)
    index.insert(0, chain(1, 2))
    index.insert(0, chain(7, 8))
    assert index.insert(0, chain(1, 2), matched=2) == []
    index.insert(0, chain(5, 6))
    assert index.match(chain(1, 2)) == {0: 2}
    assert index.match(chain(7, 8)) == {}


def test_smaller_capacity_applies_at_once() -> None:
    index = index_of(w0=chain(1, 2, 3, 4))
    index.register(0, 2)
    assert index.match(chain(1, 2, 3, 4)) == {0: 2}
    assert index.holds(0) == 2


def test_removed_worker_leaves_no_entries() -> None:
    index = index_of(w0=chain(1, 2), w1=chain(1))
    index.forget(0)
    assert index.match(chain(1, 2)) == {1: 1}
    index.forget(1)
    index.forget(1)
    assert len(index) == 0


def test_prompt_longer_than_the_capacity_keeps_its_prefix() -> None:
    index = PrefixIndex()
    index.register(0, 3)
    index.insert(0, chain(1, 2, 3, 4, 5, 6))
    assert index.match(chain(1, 2, 3, 4, 5, 6)) == {0: 3}


@pytest.mark.parametrize("seed", range(20))
def test_law_index_equals_its_plain_model(seed: int) -> None:
    rng = random.Random(seed)
    index, plain = PrefixIndex(), Plain()
    for worker in range(4):
        capacity = rng.randint(1, 30)
        index.register(worker, capacity)
        plain.register(worker, capacity)
    for _ in range(400):
        worker = rng.randrange(4)
        chunks = chain(*(rng.randrange(3) for _ in range(rng.randint(1, 7))))
        match rng.randrange(12):
            case 0:
                capacity = rng.randint(1, 30)
                index.register(worker, capacity)
                plain.register(worker, capacity)
            case 1:
                index.clear(worker)
                plain.held[worker] = []
            case 2:
                gone = rng.sample(chunks, rng.randint(1, len(chunks)))
                index.remove(worker, gone)
                plain.held[worker] = [one for one in plain.held[worker] if one not in gone]
            case _:
                matched = index.match(chunks).get(worker, 0)
                index.insert(worker, chunks, rng.randint(0, matched))
                plain.insert(worker, chunks)
        query = chain(*(rng.randrange(3) for _ in range(7)))
        assert index.match(query) == plain.match(query)
        assert [index.holds(one) for one in range(4)] == [len(plain.held[one]) for one in range(4)]
    assert len(index) == len({chunk for held in plain.held.values() for chunk in held})


def test_law_a_million_prompts_stay_within_the_capacity() -> None:
    index = PrefixIndex()
    for worker in range(2):
        index.register(worker, 500)
    for number in range(100_000):
        index.insert(number % 2, [number * 10 + place for place in range(10)])
    assert len(index) == 1000
