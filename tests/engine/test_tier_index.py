"""Where a tier's blocks are: what subscribers hear of them, and when a slot is used again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from baton_api.hashing import block_hashes, root_hash
from baton_api.kv_events import HOST_MEMORY, BlockStored
from baton_engine.kv.events import Change, KvEvents, Stored, events_of
from baton_engine.tiers.index import ANNOUNCED, Place, TierIndex
from tests.engine.test_tiers import Heard


def test_index_announces_each_chain_as_one_event_in_parts_of_limited_size() -> None:
    heard = Heard()
    events = KvEvents(heard)
    blocks, chains = ANNOUNCED + 1000, 8
    index = TierIndex(range(blocks), HOST_MEMORY, events)
    for chain in range(chains):
        names = [number.to_bytes(16) for number in range(chain, blocks, chains)]
        for name, parent in reversed(list(zip(names, [root_hash(), *names[:-1]], strict=True))):
            slot = index.reserve()
            assert slot is not None
            index.add(name, Place(slot, 0, parent))
    events.flush()
    heard.batches.clear()
    known = set(heard.known[HOST_MEMORY])
    heard.known[HOST_MEMORY].clear()
    for _ in index.announce():
        pass
    assert heard.known[HOST_MEMORY] == known
    assert [len(batch) for batch in heard.batches] == [ANNOUNCED, 1000]
    stored = [event for batch in heard.batches for event in events_of(batch, 4, tokens=True)]
    assert len(stored) == chains + 1, "one chain is in both"
    assert all(isinstance(event, BlockStored) for event in stored)


def test_index_announces_each_block_once_and_none_that_was_dropped_meanwhile() -> None:
    class Late(Heard):
        """It may hear of the end of a block before it knows of it."""

        def publish(self, changes: Sequence[Change]) -> None:
            self.batches.append(changes)

    heard = Late()
    events = KvEvents(heard)
    index = TierIndex(range(2 * ANNOUNCED), HOST_MEMORY, events)
    names = [number.to_bytes(16) for number in range(2 * ANNOUNCED)]

    def add(name: bytes) -> None:
        slot = index.reserve()
        assert slot is not None
        index.add(name, Place(slot, 0, root_hash()))

    for name in names:
        add(name)
    events.flush()
    heard.batches.clear()
    announced = index.announce()
    next(announced)
    for name in (names[0], names[1], names[-1]):  # the last one was announced
        index.drop(name)
    add(names[1])
    assert len(list(announced)) == 1
    known = set[bytes]()
    for change in itertools.chain(*heard.batches):
        if isinstance(change, Stored):
            assert change.name not in known, "stored twice"
            known.add(change.name)
        else:
            known.discard(change.name)
    assert known == set(index._places) == set(names[1:-1])


def test_index_slot_that_is_read_is_not_used_again_before_the_end_of_the_read() -> None:
    index = TierIndex(range(2), HOST_MEMORY, None)
    names = block_hashes(range(8), 4, root_hash())
    for name in names:
        slot = index.reserve()
        assert slot is not None
        index.add(name, Place(slot, 0, b""))
    held = index.hold(names)
    assert index.reserve() is None, "both are being read"
    index.drop(names[0])
    assert (index.reserve(), names[0] in index, index.matched(names)) == (None, False, 0)
    index.release(held)
    assert (index.free, len(index)) == (1, 1)
    assert index.reserve() == held[0].slot
