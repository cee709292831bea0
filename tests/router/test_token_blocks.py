"""Blocks named by their tokens, whatever an engine calls them."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton_api.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from baton_router.cache.token_blocks import TokenBlocks, prompt_tail

SIZE = 4


def stored(
    tokens: list[int], names: list[int], parent: int | None, extra: list[object] | None = None
) -> BlockStored:
    keys = [extra, *[None] * (len(names) - 1)] if extra else None
    return BlockStored(names, parent, tokens, SIZE, extra_keys=keys)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # a busy machine is no defect
@given(st.lists(st.integers(0, 60_000), min_size=SIZE, max_size=6 * SIZE), st.integers(0, 5), st.integers())
def test_last_block_of_a_prompt_has_the_name_of_its_tail(tokens: list[int], cut: int, seed: int) -> None:
    """Blocks come in one event or in several; the engine's own names are random."""
    rng, blocks = random.Random(seed), TokenBlocks()
    count = len(tokens) // SIZE
    cut = min(cut, count)
    names = [rng.getrandbits(64) for _ in range(count)]
    full = tokens[: count * SIZE]
    events = [stored(full[: cut * SIZE], names[:cut], None)] if cut else []
    if cut < count:
        events.append(stored(full[cut * SIZE :], names[cut:], names[cut - 1] if cut else None))
    translated = blocks.translate(events)
    last = translated[-1]
    assert isinstance(last, BlockStored)
    assert f"{last.block_hashes[-1]:016x}" == prompt_tail(tokens, SIZE)
    removed = blocks.translate([BlockRemoved([names[-1]])])
    assert removed == [BlockRemoved([last.block_hashes[-1]])]


def test_salts_and_adapters_have_names_of_their_own() -> None:
    tokens = list(range(8))
    tails = {prompt_tail(tokens, SIZE, salt, adapter) for salt in ("", "a", "b") for adapter in ("", "x")}
    assert len(tails) == 6
    blocks = TokenBlocks()
    (event,) = blocks.translate([stored(tokens, [1, 2], None, ["a"])])
    assert isinstance(event, BlockStored)
    assert f"{event.block_hashes[-1]:016x}" == prompt_tail(tokens, SIZE, "a")


def test_blocks_without_a_known_parent_are_left_out() -> None:
    blocks = TokenBlocks()
    assert blocks.translate([stored(list(range(4)), [7], 99)]) == []
    assert blocks.translate([BlockRemoved([7])]) == []


def test_media_are_told_apart() -> None:
    """What comes to a tier, goes from the pool and goes from the tier is of the same block."""
    blocks, tokens = TokenBlocks(), list(range(4))
    (name,) = blocks.translate([stored(tokens, [1], None)])[0].block_hashes  # type: ignore[union-attr]
    assert blocks.translate([BlockStored([1], None, tokens, SIZE, medium="CPU")]) == [
        BlockStored([name], None, [], SIZE, medium="CPU")
    ]
    assert blocks.translate([BlockRemoved([1])]) == [BlockRemoved([name])]
    assert blocks.translate([BlockRemoved([1], "CPU")]) == [BlockRemoved([name], "CPU")]
    assert blocks.translate([BlockRemoved([1], "CPU")]) == [] and len(blocks) == 0


def test_pool_stays_known_beside_a_disk_that_never_deletes() -> None:
    """The pool has 4 blocks, the oldest of which leaves for each new one; all of them stay on the disk."""
    blocks, limit = TokenBlocks(limit=8), 8
    known: list[BlockStored] = []
    for number in range(3 * limit):
        tokens = [number] * SIZE
        (event,) = blocks.translate([stored(tokens, [number], None)])
        assert isinstance(event, BlockStored)
        known.append(event)
        on_disk = blocks.translate([BlockStored([number], None, tokens, SIZE, medium="STORAGE")])
        assert bool(on_disk) is (number < limit - 1)  # the pool's new block is one of them
        if number >= 4:
            gone = blocks.translate([BlockRemoved([number - 4])])
            assert gone == [BlockRemoved(known[number - 4].block_hashes)]
    assert len(blocks) == limit - 1 + 4


def test_pool_has_a_limit_of_its_own() -> None:
    blocks = TokenBlocks(limit=2)
    known = [bool(blocks.translate([stored([number] * SIZE, [number], None)])) for number in range(3)]
    assert known == [True, True, False]
    assert blocks.translate([BlockRemoved([0])]) and blocks.translate([stored([3] * SIZE, [3], None)])


def test_clearing_forgets_all_names() -> None:
    blocks = TokenBlocks()
    blocks.translate([stored(list(range(4)), [1], None)])
    assert blocks.translate([AllBlocksCleared()]) == [AllBlocksCleared()]
    assert len(blocks) == 0


def test_prompt_shorter_than_a_block_has_no_tail() -> None:
    assert prompt_tail([1, 2, 3], SIZE) == ""
