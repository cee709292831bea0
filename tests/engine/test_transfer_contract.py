"""The contract of every transfer: loopback, NIXL's shared memory, and NIXL's TCP."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence

import pytest
from torch import Tensor

from baton_api.errors import IncompatiblePeer, TransferFailed
from baton_engine.kv.cache import KVCache
from baton_engine.transfer import Transfer
from baton_engine.transfer.kinds import create_transfer
from baton_engine.transfer.loopback import LoopbackTransfer
from tests.engine.transfer_links import Link, PeerProcess, ucx_tls
from tests.engine.transfer_pools import pattern, pool, rows

BLOCKS = 160
LAYERS = 8  # 64 KiB a block: a pull of the whole pool has 3 slices


@pytest.fixture(
    scope="module",
    params=[
        "loopback",
        pytest.param("shm", marks=pytest.mark.nixl),
        pytest.param("tcp", marks=pytest.mark.nixl),
    ],
)
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    """A worker that reads, and one that is read from; in another process but for loopback."""
    kind: str = request.param
    cache = pool(BLOCKS, LAYERS)
    if kind == "loopback":
        theirs = pool(BLOCKS, LAYERS)
        rows(theirs).copy_(pattern(BLOCKS, LAYERS, 1))
        source = LoopbackTransfer(theirs, "peer")
        transfer: Transfer = LoopbackTransfer(cache, "reader")
        yield Link(kind, transfer, cache, source.metadata, source.pools, "epoch")
        asyncio.run(source.close())
        asyncio.run(transfer.close())
        return
    with ucx_tls(kind), PeerProcess(BLOCKS, LAYERS, seed=1) as peer:
        transfer = asyncio.run(create_transfer("nixl", cache, "reader"))
        yield Link(kind, transfer, cache, peer.metadata, peer.pools, peer.epoch)
        asyncio.run(transfer.close())


@pytest.fixture(scope="module")
def theirs() -> Tensor:
    return pattern(BLOCKS, LAYERS, 1)


def assert_moved(cache: KVCache, theirs: Tensor, remote: Sequence[int], local: Sequence[int]) -> None:
    """Each local block holds what its remote one does, and every other is as it was: zero."""
    ours = rows(cache)
    assert ours[list(local)].equal(theirs[list(remote)])
    others = [block for block in range(cache.blocks) if block not in set(local)]
    assert not ours[others].any()


CASES = {
    "one block": ([7], [3]),
    "one block over the same number": ([5], [5]),
    "the last block": ([BLOCKS - 1], [0]),
    "consecutive on both sides": (range(10, 40), range(60, 90)),
    "consecutive there, scattered here": (range(10, 14), [9, 3, 77, 40]),
    "scattered there, consecutive here": ([9, 3, 77, 40], range(10, 14)),
    "backwards": (range(30, 20, -1), range(1, 11)),
    "one block to several places": ([4, 4, 4], [8, 1, 5]),
    "the whole pool, in several slices": (range(BLOCKS), range(BLOCKS)),
}


@pytest.mark.parametrize("case", CASES)
async def test_transfer_moves_every_block_and_changes_no_other(link: Link, theirs: Tensor, case: str) -> None:
    remote, local = CASES[case]
    link.cache.kv.zero_()
    async with link.connected() as peer:
        pulled = await link.transfer.pull(peer, remote, local).settled()
    assert_moved(link.cache, theirs, remote, local)
    assert pulled.bytes == len(remote) * link.cache.block_bytes
    assert pulled.seconds > 0


async def test_any_pairs_of_blocks_arrive(link: Link, theirs: Tensor) -> None:
    chance = random.Random(4)
    async with link.connected() as peer:
        for _ in range(12):
            link.cache.kv.zero_()
            count = chance.randint(1, BLOCKS)
            remote = [chance.randrange(BLOCKS) for _ in range(count)]
            local = chance.sample(range(BLOCKS), count)
            await link.transfer.pull(peer, remote, local).settled()
            assert_moved(link.cache, theirs, remote, local)


async def test_pulls_at_the_same_time_do_not_mix(link: Link, theirs: Tensor) -> None:
    link.cache.kv.zero_()
    chance = random.Random(5)
    local = chance.sample(range(BLOCKS), BLOCKS)
    remote = [chance.randrange(BLOCKS) for _ in range(BLOCKS)]
    async with link.connected() as peer:
        parts = [slice(begin, begin + 20) for begin in range(0, BLOCKS, 20)]
        pulls = [link.transfer.pull(peer, remote[part], local[part]) for part in parts]
        await asyncio.gather(*(pull.settled() for pull in pulls))
    assert_moved(link.cache, theirs, remote, local)


async def test_transfer_empty_pull_settles_at_once(link: Link) -> None:
    async with link.connected() as peer:
        assert (await link.transfer.pull(peer, [], []).settled()).bytes == 0


async def test_transfer_transport_is_named_from_the_first_read(link: Link) -> None:
    names = {"loopback": "loopback", "shm": "nixl/ucx shm", "tcp": "nixl/ucx tcp"}
    async with link.connected() as peer:
        pulled = [await link.transfer.pull(peer, [1], [1]).settled() for _ in range(3)]
    assert {one.transport for one in pulled} == {names[link.kind]}


async def test_transfer_cancelled_waiter_does_not_cancel_the_pull(link: Link, theirs: Tensor) -> None:
    link.cache.kv.zero_()
    async with link.connected() as peer:
        pull = link.transfer.pull(peer, range(BLOCKS), range(BLOCKS))
        hasty = pull.settled()
        hasty.cancel()
        assert (await pull.settled()).bytes == BLOCKS * link.cache.block_bytes
        assert hasty.cancelled()
    assert_moved(link.cache, theirs, range(BLOCKS), range(BLOCKS))


async def test_blocks_that_the_peer_does_not_have_fail_the_pull(link: Link) -> None:
    async with link.connected() as peer:
        for block in (-1, BLOCKS, 2**40):
            with pytest.raises(TransferFailed, match=f"outside its pool of {BLOCKS}"):
                await link.transfer.pull(peer, [0, block], [1, 2]).settled()


async def test_transfer_local_blocks_outside_the_pool_are_an_error(link: Link) -> None:
    async with link.connected() as peer:
        for local in ([BLOCKS], [-1], [1, 2]):
            with pytest.raises(ValueError):
                link.transfer.pull(peer, [0], local)


async def test_transfer_incompatible_pool_is_rejected(link: Link) -> None:
    for fields in ({"block_bytes": 4096}, {"blocks": 0}, {"memory": "DISK"}, {"address": 2**64 - 1}):
        with pytest.raises(IncompatiblePeer):
            await link.transfer.connect(link.metadata, link.changed_pools(**fields), link.epoch)


async def test_transfer_pool_not_owned_by_the_peer_is_rejected(link: Link) -> None:
    elsewhere = link.changed_pools(address=link.pools[0].address + 2**32)
    with pytest.raises(TransferFailed):
        await link.transfer.connect(link.metadata, elsewhere, link.epoch)
    async with link.connected() as peer:  # and the refusal left nothing behind
        await link.transfer.pull(peer, [1], [1]).settled()


async def test_metadata_that_are_not_whole_are_refused(link: Link) -> None:
    whole = link.metadata
    flipped = bytes([*whole[:-1], whole[-1] ^ 1])
    for bad in (b"", b"hello", whole[:-1], whole + b"x", whole[1:], flipped, bytes(2**21)):
        with pytest.raises(TransferFailed):
            await link.transfer.connect(bad, link.pools, link.epoch)


async def test_transfer_disconnected_peer_can_be_reconnected(link: Link) -> None:
    async with link.connected() as peer:
        pass
    with pytest.raises(TransferFailed, match="gone"):
        await link.transfer.pull(peer, [1], [1]).settled()
    async with link.connected() as again:
        assert again.name == peer.name
        await link.transfer.pull(again, [1], [1]).settled()
