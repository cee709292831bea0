"""Checksums of blocks."""

from __future__ import annotations

import random

import pytest
import xxhash

from baton_engine.transfer.integrity import block_checksums
from tests.engine.fake_streams import FakeCuda, on_device
from tests.engine.transfer_pools import pattern, pool, rows

EACH_KIND = pytest.mark.parametrize("sums", [False, True], ids=["xxh3", "sums"])


def test_checksum_is_the_xxh3_of_the_blocks_bytes() -> None:
    cache = pool(8, layers=2)
    rows(cache).copy_(pattern(8, 2, seed=1))
    for block in range(8):
        assert block_checksums(cache, [block])[0] == xxhash.xxh3_64_intdigest(bytes(cache.block(block)))


def split_mix(state: int) -> int:
    """The finalizer of SplitMix64, as its authors write it."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def test_device_checksum_is_the_sum_of_mixed_words() -> None:
    cache = pool(3, layers=2)
    rows(cache).copy_(pattern(3, 2, seed=5))
    for block, sum_ in enumerate(block_checksums(cache, range(3), sums=True)):
        content = bytes(cache.block(block))
        words = [int.from_bytes(content[at : at + 8], "little") for at in range(0, len(content), 8)]
        mixed = (split_mix(word ^ (at * 0x9E3779B97F4A7C15 % 2**64)) for at, word in enumerate(words, 1))
        assert sum_ == sum(mixed) % 2**64


def test_device_checksum_changes_with_the_order_of_words() -> None:
    cache = pool(2)
    rows(cache).copy_(pattern(2, 1, seed=6))
    rows(cache)[1] = rows(cache)[0].view(-1, 8).flip(0).reshape(-1)
    first, second = block_checksums(cache, (0, 1), sums=True)
    assert first != second


def test_checksums_are_computed_beside_the_passes() -> None:
    """Their queue is not that of the passes: they would wait for the next ones."""
    cuda = FakeCuda()
    cache = on_device(pool(4), cuda)
    with cache.streams.side_stream():
        assert cuda.current_stream(cache.kv.device) is not cuda.default
    assert cuda.current_stream(cache.kv.device) is cuda.default


@EACH_KIND
def test_many_at_once_are_the_same_as_one_by_one(sums: bool) -> None:
    cache = pool(8)
    rows(cache).copy_(pattern(8, 1, seed=2))
    blocks = [5, 0, 5, 7]
    one_by_one = [block_checksums(cache, [block], sums)[0] for block in blocks]
    assert block_checksums(cache, blocks, sums) == one_by_one
    assert block_checksums(cache, [], sums) == []


@EACH_KIND
def test_checksum_flipped_bit_changes_only_its_block(sums: bool) -> None:
    cache = pool(4)
    rows(cache).copy_(pattern(4, 1, seed=3))
    before = block_checksums(cache, range(4), sums)
    chance = random.Random(4)
    for _ in range(200):
        block, byte, bit = chance.randrange(4), chance.randrange(cache.block_bytes), 1 << chance.randrange(8)
        cache.block(block)[byte] ^= bit
        changed = [
            now != then for now, then in zip(block_checksums(cache, range(4), sums), before, strict=True)
        ]
        assert changed == [number == block for number in range(4)]
        cache.block(block)[byte] ^= bit
