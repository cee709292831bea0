"""The block pool: who may have which block, and what goes when memory is short."""

from __future__ import annotations

import random

import pytest

from baton_api.errors import SetupError
from baton_api.hashing import chain_hash, root_hash
from baton_engine.kv.block_pool import BlockPool

ROOT = root_hash()


def chain(*tokens: int) -> list[bytes]:
    """Hashes of a chain of blocks of one token each."""
    hashes: list[bytes] = []
    for token in tokens:
        hashes.append(chain_hash(hashes[-1] if hashes else ROOT, [token]))
    return hashes


def own(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    """Blocks for a chain as a request would get and publish them."""
    blocks = pool.match(hashes)
    pool.take(blocks)
    fresh = pool.allocate(len(hashes) - len(blocks))
    for index, block in enumerate(fresh, start=len(blocks)):
        pool.publish(block, hashes[index], hashes[index - 1] if index else ROOT, index)
    return blocks + fresh


def test_block_0_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.available == 0


def test_block_pool_too_small_is_a_setup_error() -> None:
    with pytest.raises(SetupError, match=r"1 blocks.*--kv-cache-memory"):
        BlockPool(1)


def test_block_pool_released_block_is_found_by_its_hash() -> None:
    pool = BlockPool(5)
    hashes = chain(1, 2)
    blocks = own(pool, hashes)
    pool.release(blocks)
    assert (pool.free, pool.cached, pool.owned) == (2, 2, 0)
    assert pool.match(hashes) == blocks
    assert pool.match(chain(1, 3)) == blocks[:1]
    assert pool.match(chain(2)) == []


def test_block_pool_released_block_without_hash_is_free() -> None:
    pool = BlockPool(3)
    pool.release(pool.allocate(2))
    assert (pool.free, pool.cached) == (2, 0)


def test_block_pool_shared_block_is_owned_until_last_release() -> None:
    pool = BlockPool(5)
    hashes = chain(1)
    first, second = own(pool, hashes), own(pool, hashes)
    assert first == second
    pool.release(first)
    assert (pool.owned, pool.cached) == (1, 0)
    pool.release(second)
    assert (pool.owned, pool.cached) == (0, 1)


def test_block_pool_evicts_a_chains_tail_before_its_head() -> None:
    pool = BlockPool(4)
    hashes = chain(1, 2, 3)
    pool.release(own(pool, hashes))
    for left in (2, 1, 0):
        pool.allocate(1)
        assert len(pool.match(hashes)) == left


def test_block_pool_evicts_least_recently_used_chain_first() -> None:
    pool = BlockPool(5)
    old, new = chain(1, 2), chain(3, 4)
    pool.release(own(pool, old))
    pool.release(own(pool, new))
    pool.release(own(pool, old))
    pool.allocate(2)
    assert len(pool.match(old)) == 2
    assert pool.match(new) == []


def test_block_pool_old_parent_of_cached_children_is_kept() -> None:
    pool = BlockPool(5)
    pool.release(own(pool, chain(1)))
    pool.release(own(pool, chain(8)))
    pool.release(own(pool, chain(1, 2)))
    pool.allocate(2)  # one is free, one is evicted
    assert pool.match(chain(8)) == []
    assert len(pool.match(chain(1, 2))) == 2


def test_block_pool_shared_prefix_outlives_its_older_branch() -> None:
    pool = BlockPool(5)
    pool.release(own(pool, chain(1, 2)))
    pool.release(own(pool, chain(1, 3)))
    pool.allocate(2)
    assert len(pool.match(chain(1, 3))) == 2
    assert len(pool.match(chain(1, 2))) == 1


def test_block_pool_cached_parent_of_owned_block_is_evictable() -> None:
    """The owner computed the parent a second time; the first copy has no owner, and must not be stuck."""
    pool = BlockPool(5)
    hashes = chain(1, 2)
    first = own(pool, hashes[:1])
    copy = pool.allocate(2)
    assert not pool.publish(copy[0], hashes[0], ROOT, 0)
    assert pool.publish(copy[1], hashes[1], hashes[0], 1)
    pool.release(first)
    assert pool.available == 2
    assert len(pool.allocate(2)) == 2
    pool.release(copy)
    assert pool.cached == 1
    assert pool.match(hashes) == []  # its parent is gone: nothing leads to it
    pool.allocate(2)


def test_blocks_unused_leaf_outlives_compaction_of_stale_ones() -> None:
    """A busy prefix leaves stale entries; dropping them drops no block that can be evicted."""
    pool = BlockPool(5)
    old, busy = chain(1, 2), chain(3)
    pool.release(own(pool, old))
    for _ in range(20 * pool.capacity + 200):
        pool.release(own(pool, busy))
        assert len(pool._leaves) <= 2 * pool.capacity + 65, "stale entries pile up"
    assert pool.free == 1
    pool.allocate(2)
    assert (len(pool.match(old)), len(pool.match(busy))) == (1, 1), "the least recently used leaf goes first"
    pool.allocate(2)
    assert (pool.match(old), pool.match(busy)) == ([], [])


def test_block_pool_clear_frees_unused_and_keeps_used_blocks() -> None:
    pool = BlockPool(9)
    used, unused = own(pool, chain(1, 2)), own(pool, chain(3, 4, 5))
    pool.release(unused)
    pool.clear()
    assert (pool.free, pool.cached, pool.owned) == (6, 0, 2)
    assert pool.match(chain(3, 4, 5)) == []
    assert pool.match(chain(1, 2)) == used


def test_block_pool_first_of_two_equal_blocks_stays_published() -> None:
    pool = BlockPool(5)
    hashes = chain(1)
    first, second = pool.allocate(1), pool.allocate(1)
    assert pool.publish(first[0], hashes[0], ROOT, 0)
    assert not pool.publish(second[0], hashes[0], ROOT, 0)
    assert pool.match(hashes) == first
    pool.release(second)
    assert pool.free == 3


def test_block_pool_quarantined_block_is_kept_until_settled() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.quarantine(blocks[:1])
    pool.release(blocks[1:])
    assert (pool.quarantined, pool.available, pool.owned) == (1, 1, 0)
    pool.settle(blocks[:1])
    assert (pool.quarantined, pool.available) == (0, 2)


def test_pool_of_two_blocks_hands_out_one() -> None:
    """The least pool has the reserved block and one more; with one block, the message says the way out."""
    assert BlockPool(2).allocate(1) == [1]
    with pytest.raises(SetupError) as refused:
        BlockPool(1)
    assert str(refused.value).endswith(" Start the worker with a larger --kv-cache-memory.")


def test_evicted_blocks_are_counted_and_named() -> None:
    """KV events name what is gone; the count is a metric. Blocks dropped without need do not count."""
    gone: list[bytes] = []
    pool = BlockPool(4, on_evicted=gone.append)
    hashes = chain(1, 2, 3)
    pool.release(own(pool, hashes))
    assert (pool.evictions, gone) == (0, [])
    pool.allocate(2)
    assert (pool.evictions, gone) == (2, [hashes[2], hashes[1]])
    pool.clear()
    assert (pool.evictions, gone) == (2, [hashes[2], hashes[1], hashes[0]])


class Copies:
    """Tiers that have some blocks, and hear of all."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()
        self.heard: list[tuple[str, bytes]] = []

    def unused(self, name: bytes, block: int, parent: bytes, number: int) -> None:
        self.heard.append(("unused", name))

    def evicted(self, name: bytes) -> None:
        self.heard.append(("evicted", name))

    def has(self, name: bytes) -> bool:
        return name in self.names


def test_pool_evicts_a_block_that_a_tier_has_before_an_older_one() -> None:
    copies = Copies()
    pool = BlockPool(5, tiers=copies)
    old, new = chain(1, 2), chain(3, 4)
    pool.release(own(pool, old))
    pool.release(own(pool, new))
    assert copies.heard == [("unused", name) for name in (old[1], old[0], new[1], new[0])]
    copies.names = {new[1]}
    pool.allocate(2)
    assert copies.heard[4:] == [("evicted", new[1]), ("evicted", old[1])]
    pool.allocate(1)
    assert copies.heard[6:] == [("evicted", old[0])], "without copies, the least recently used one"


def test_pinned_twice_needs_two_unpins() -> None:
    """Two transfers may read one shared block: it may be unpinned when the last has ended."""
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.pin(blocks)
    pool.pin(blocks[:1])
    assert pool.pinned == 2
    pool.unpin(blocks)
    assert pool.pinned == 1
    with pytest.raises(AssertionError, match="released while pinned"):
        pool.release(blocks[:1])
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.pin(blocks)
    pool.pin(blocks[:1])
    pool.unpin(blocks)
    pool.unpin(blocks[:1])
    pool.release(blocks)
    assert (pool.pinned, pool.free) == (0, 3)


def test_unused_counts_known_blocks_without_users() -> None:
    pool = BlockPool(6)
    shared, other = chain(1), chain(1, 2, 3)
    pool.release(own(pool, other))
    own(pool, shared)
    assert pool.unused(pool.match(other)) == 2


def test_our_own_mistakes_are_noticed() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.pin([block])
    with pytest.raises(AssertionError, match="pinned"):
        pool.release([block])
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(AssertionError, match="twice"):
        pool.release([block])
    with pytest.raises(AssertionError, match="without an owner"):
        pool.pin([block])
    with pytest.raises(AssertionError, match="not in quarantine"):
        pool.settle([block])
    with pytest.raises(AssertionError, match="are available"):
        pool.allocate(4)
    with pytest.raises(AssertionError, match="cannot be published"):
        pool.publish(block, b"name", ROOT, 0)


@pytest.mark.parametrize("seed", range(8))
def test_block_pool_random_use_keeps_states_and_chains_whole(seed: int) -> None:
    chance = random.Random(seed)
    pool = BlockPool(24)
    held: list[list[int]] = []
    quarantine: list[int] = []
    for _ in range(1500):
        roll = chance.random()
        if roll < 0.5:
            hashes = chain(*(chance.randrange(2) for _ in range(chance.randrange(1, 7))))
            matched = pool.match(hashes)
            if len(hashes) - len(matched) + pool.unused(matched) <= pool.available:
                held.append(own(pool, hashes))
        elif roll < 0.9 and held:
            pool.release(held.pop(chance.randrange(len(held))))
        elif roll < 0.95 and pool.available:
            blocks = pool.allocate(1)
            pool.quarantine(blocks)
            quarantine += blocks
        elif roll < 0.96:
            pool.clear()
            assert pool.cached == 0
        elif quarantine:
            pool.settle([quarantine.pop()])
        users = {block for blocks in held for block in blocks}
        assert pool.owned == len(users)
        assert pool.quarantined == len(quarantine)
        assert pool.free + pool.cached + pool.owned + pool.quarantined == pool.capacity
        assert 0 not in users
    for blocks in held:
        pool.release(blocks)
    pool.settle(quarantine)
    assert pool.available == pool.capacity
    # Everything that is cached can be evicted, and each prefix goes after what stands on it.
    assert len(set(pool.allocate(pool.capacity))) == pool.capacity
