"""Checksums of blocks."""

from __future__ import annotations

import random

import xxhash

from baton_engine.transfer.integrity import block_checksum, block_checksums
from tests.engine.transfer_pools import pattern, pool, rows


def test_checksum_is_the_xxh3_of_the_blocks_bytes() -> None:
    cache = pool(8, layers=2)
    rows(cache).copy_(pattern(8, 2, seed=1))
    for block in range(8):
        assert block_checksum(cache, block) == xxhash.xxh3_64_intdigest(bytes(cache.block(block)))


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    cache = pool(8)
    rows(cache).copy_(pattern(8, 1, seed=2))
    blocks = [5, 0, 5, 7]
    assert block_checksums(cache, blocks) == [block_checksum(cache, block) for block in blocks]
    assert block_checksums(cache, []) == []


def test_checksum_flipped_bit_changes_only_its_block() -> None:
    cache = pool(4)
    rows(cache).copy_(pattern(4, 1, seed=3))
    before = block_checksums(cache, range(4))
    chance = random.Random(4)
    for _ in range(200):
        block, byte, bit = chance.randrange(4), chance.randrange(cache.block_bytes), 1 << chance.randrange(8)
        cache.block(block)[byte] ^= bit
        changed = [now != then for now, then in zip(block_checksums(cache, range(4)), before, strict=True)]
        assert changed == [number == block for number in range(4)]
        cache.block(block)[byte] ^= bit
