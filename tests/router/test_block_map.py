"""Chunks of text and blocks of tokens: where they meet, and what follows from a block's going."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from baton_api.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from baton_router.cache.block_map import PENDING_LIMIT, BlockMap
from baton_router.cache.prefix_index import PrefixIndex
from baton_router.cache.prompt_chunks import PromptChunks


def stored(blocks: Sequence[int], parent: int | None = None) -> BlockStored:
    return BlockStored(list(blocks), parent, [], 16)


def prompt(*sizes: int, first: int = 100) -> PromptChunks:
    """Chunks of these bytes, called 100, 101 and so on."""
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return PromptChunks(tuple(range(first, first + len(sizes))), tuple(ends))


class Router:
    """An index and a map, with workers that report their blocks."""

    def __init__(self, workers: int = 2) -> None:
        self.index = PrefixIndex()
        self.map = BlockMap(self.index)
        for slot in range(workers):
            self.index.register(slot, 10_000)
        self.held = [self.map.open(slot) for slot in range(workers)]

    def send(self, one: PromptChunks, slot: int, tail: int, blocks: int) -> None:
        """A prompt is sent, computed and reported."""
        new = self.index.insert(slot, one.names)
        self.map.place(one, tail, blocks, len(one.names) - len(new), [slot])

    def holds(self, one: PromptChunks) -> dict[int, int]:
        return self.index.match(one.names)


@pytest.mark.parametrize(
    ("sizes", "blocks", "gone", "left"),
    [
        ((512, 512, 512, 512), 4, 4, 3),
        ((512, 512, 512, 512), 4, 1, 0),
        ((512, 512), 8, 5, 1),  # the second chunk ends in the eighth block, and its beginning is in the fifth
        ((512, 512), 8, 4, 0),
        ((512, 512, 512), 2, 2, 1),  # 1 ends in block 1, the others in 2
        ((10, 10, 2000), 10, 2, 2),  # short messages are where they are short
        ((10, 10, 2000), 10, 1, 0),
        ((512, 100), 1, 1, 0),
    ],
)
def test_chunk_belongs_to_the_block_in_which_it_ends(
    sizes: tuple[int, ...], blocks: int, gone: int, left: int
) -> None:
    """`gone` is the first block that goes; a worker drops those behind it before."""
    router, one = Router(1), prompt(*sizes)
    chain = list(range(1, blocks + 1))
    router.held[0].apply([stored(chain)])
    router.send(one, 0, chain[-1], blocks)
    assert router.holds(one) == {0: len(sizes)}
    router.held[0].apply([BlockRemoved(chain[gone - 1 :][::-1])])
    assert router.holds(one) == ({0: left} if left else {})


def test_report_before_its_events_is_applied_later() -> None:
    router, one = Router(1), prompt(512, 512)
    router.send(one, 0, 4, 4)
    router.held[0].apply([stored([1, 2]), stored([3, 4], 2)])
    router.held[0].apply([BlockRemoved([4, 3])])
    assert router.holds(one) == {0: 1}


def test_waiting_reports_expire() -> None:
    router = Router(1)
    for number in range(PENDING_LIMIT + 1):
        router.send(prompt(512, first=number), 0, 10_000 + number, 1)
    router.held[0].apply([stored([10_000]), stored([10_001])])
    router.held[0].apply([BlockRemoved([10_000, 10_001])])
    assert router.holds(prompt(512, first=0)) == {0: 1}  # the oldest was given up
    assert router.holds(prompt(512, first=1)) == {}


def test_new_blocks_extend_the_placed_chunks() -> None:
    router, turn = Router(1), prompt(512, 512, 512)
    router.held[0].apply([stored([1, 2, 3, 4])])
    router.send(prompt(512, 512), 0, 4, 4)
    router.held[0].apply([stored([5, 6], 4)])
    router.send(turn, 0, 6, 6)
    router.held[0].apply([BlockRemoved([6])])
    assert router.holds(turn) == {0: 2}
    router.held[0].apply([BlockRemoved([5, 4])])
    assert router.holds(turn) == {0: 1}


def test_removed_block_affects_only_its_worker() -> None:
    router, one = Router(2), prompt(512)
    for held in router.held:
        held.apply([stored([1])])
    router.send(one, 0, 1, 1)
    router.send(one, 1, 1, 1)
    router.held[0].apply([BlockRemoved([1])])
    assert router.holds(one) == {1: 1}


def test_report_finds_earlier_holders_of_its_blocks() -> None:
    """From before this router began, or through another one."""
    router, one = Router(3), prompt(512, 512)
    router.held[1].replace({1: None, 2: 1, 3: 2})
    router.held[0].apply([stored([1, 2, 3, 4])])
    router.send(one, 0, 4, 4)
    assert router.holds(one) == {0: 2, 1: 1}


def test_worker_that_stores_a_known_block_holds_its_chunk() -> None:
    router, one = Router(2), prompt(512, 512)
    router.held[0].apply([stored([1, 2])])
    router.send(one, 0, 2, 2)
    router.held[1].apply([stored([1, 2])])
    assert router.holds(one) == {0: 2, 1: 2}


@pytest.mark.parametrize("way", ["cleared", "replaced"])
def test_cleared_cache_holds_no_chunks(way: str) -> None:
    router, one = Router(2), prompt(512, 512)
    for slot, held in enumerate(router.held):
        held.apply([stored([1, 2])])
        router.send(one, slot, 2, 2)
    if way == "cleared":
        router.held[0].apply([AllBlocksCleared()])
    else:
        router.held[0].replace({7: None})
    assert router.holds(one) == {1: 2}


def test_ended_process_has_no_further_effect() -> None:
    router, one = Router(1), prompt(512)
    before = router.held[0]
    before.apply([stored([1])])
    router.send(one, 0, 1, 1)
    router.index.clear(0)
    after = router.map.open(0)
    after.apply([stored([1])])
    router.send(one, 0, 1, 1)
    before.apply([BlockRemoved([1])])
    before.replace({})
    assert router.holds(one) == {0: 1}


def test_prompt_without_parents_is_placed_up_to_the_gap() -> None:
    router, one = Router(1), prompt(512, 512)
    router.held[0].apply([stored([2], 1)])
    router.send(one, 0, 2, 2)
    assert len(router.map) == 1
    router.held[0].apply([BlockRemoved([2])])
    assert router.holds(one) == {0: 1} and len(router.map) == 0


def test_holder_without_the_prefix_gets_no_credit() -> None:
    router, one = Router(2), prompt(512, 512)
    for held in router.held:
        held.apply([stored([2], 1)])
    router.send(one, 0, 2, 2)
    assert router.holds(one) == {0: 2}


def test_waiting_report_is_placed_by_a_snapshot() -> None:
    router, one = Router(1), prompt(512, 512)
    router.send(one, 0, 2, 2)
    router.held[0].replace({1: None, 2: 1})
    router.held[0].apply([BlockRemoved([2])])
    assert router.holds(one) == {0: 1}


def test_chunks_of_a_snapshot_are_evicted_from_the_end() -> None:
    router, one = Router(2), prompt(512, 512)
    router.held[0].apply([stored([1, 2])])
    router.send(one, 0, 2, 2)
    router.index.register(1, 1)
    router.held[1].replace({1: None, 2: 1})
    assert router.holds(one) == {0: 2, 1: 1}


def test_worker_without_events_costs_nothing() -> None:
    router = Router(1)
    router.map.close(0)
    router.send(prompt(512), 0, 1, 1)
    assert len(router.map) == 0


@pytest.mark.parametrize("seed", range(20))
def test_placed_chunks_belong_to_the_holders_of_their_block(seed: int) -> None:
    """Workers that compute, evict, clear and restart. Prompts are branches of one tree."""
    rng = random.Random(seed)
    router = Router(3)
    pools: list[dict[int, int | None]] = [{} for _ in range(3)]
    sent: dict[int, PromptChunks] = {}

    def chain(one: int) -> list[int]:
        """Blocks of prompt number `one`: 2 per chunk, the first chunks shared with its ancestors."""
        path: list[int] = []
        while one:
            path[:0] = [2 * one, 2 * one + 1]
            one //= 2
        return path

    for _ in range(500):
        slot, roll = rng.randrange(3), rng.random()
        pool = pools[slot]
        if roll < 0.55:
            number = rng.randrange(1, 40)
            blocks = chain(number)
            names = tuple(blocks[1::2])
            one = PromptChunks(names, tuple(128 * (index + 1) for index in range(len(names))))
            new = router.index.insert(slot, names)
            events = []
            for index, block in enumerate(blocks):
                if block not in pool:
                    pool[block] = blocks[index - 1] if index else None
                    events.append(stored([block], pool[block]))
            early = rng.random() < 0.3
            if early:
                router.held[slot].apply(events)
            router.map.place(one, blocks[-1], len(blocks), len(names) - len(new), [slot])
            if not early:
                router.held[slot].apply(events)
            sent[number] = one
        elif roll < 0.9:
            leaves = [block for block in pool if block not in pool.values()]
            if leaves:
                leaf = rng.choice(leaves)
                del pool[leaf]
                router.held[slot].apply([BlockRemoved([leaf])])
        elif roll < 0.93:
            pool.clear()
            router.held[slot].apply([AllBlocksCleared()])
        elif roll < 0.96:
            pool.clear()
            router.index.clear(slot)
            router.held[slot] = router.map.open(slot)
        else:
            router.held[slot].replace(dict(pool))
        for one in sent.values():
            believed = router.holds(one)
            for number, other in enumerate(pools):
                truly = 0
                while truly < len(one.names) and one.names[truly] in other:
                    truly += 1
                assert believed.get(number, 0) == truly
    for slot in range(3):
        router.held[slot].replace({})
    assert len(router.map) == 0 and len(router.index) == 0
