"""Blocks that ranks divide: read by workers of another degree, over loopback and NIXL."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import AsyncIterator, Iterator

import pytest

from baton_api.errors import IncompatiblePeer
from baton_api.messages import PoolLayout
from baton_engine.transfer.integrity import block_checksums
from baton_engine.transfer.kinds import create_transfer
from baton_engine.transfer.loopback import LoopbackTransfer
from baton_engine.transfer.parts import BlockPiece, block_pieces
from baton_engine.transfer.reads import check_pools
from tests.engine.transfer_links import PeerProcess, ucx_tls
from tests.engine.transfer_pools import fill, pattern, pool, rows

BLOCKS = 40
LAYERS = 3
NIXL = [pytest.mark.nixl, pytest.mark.slow]


def pools(ranks: int, whole: int = 96, *, address: int = 4096, blocks: int = 10) -> tuple[PoolLayout, ...]:
    return (PoolLayout(address=address, block_bytes=whole // ranks, blocks=blocks),) * ranks


PIECES: dict[str, tuple[int, int, list[BlockPiece], list[BlockPiece]]] = {
    "one from two": (
        1,
        2,
        [BlockPiece(0, 0, 24), BlockPiece(0, 24, 24), BlockPiece(0, 48, 24), BlockPiece(0, 72, 24)],
        [BlockPiece(0, 0, 24), BlockPiece(1, 0, 24), BlockPiece(0, 24, 24), BlockPiece(1, 24, 24)],
    ),
    "two from one": (
        2,
        1,
        [BlockPiece(0, 0, 24), BlockPiece(1, 0, 24), BlockPiece(0, 24, 24), BlockPiece(1, 24, 24)],
        [BlockPiece(0, 0, 24), BlockPiece(0, 24, 24), BlockPiece(0, 48, 24), BlockPiece(0, 72, 24)],
    ),
}
"""Ranks on both sides, and the pieces of a block with 2 planes there."""


@pytest.mark.parametrize("name", PIECES)
def test_pieces_are_the_largest_in_one_pool_on_both_sides(name: str) -> None:
    ours, theirs, ours_expected, theirs_expected = PIECES[name]
    assert block_pieces(pools(ours), theirs, 2) == ours_expected
    assert block_pieces(pools(theirs), ours, 2) == theirs_expected


def held(ranks: int, planes: int, heads: int) -> list[list[tuple[int, int]]]:
    """Return the plane and head of each byte of a block, for each rank, if a head has one byte in a plane."""
    each = heads // ranks
    return [
        [(plane, head) for plane in range(planes) for head in range(rank * each, (rank + 1) * each)]
        for rank in range(ranks)
    ]


def test_pieces_move_each_head_to_its_place_for_any_degrees() -> None:
    for ours, theirs, planes in itertools.product(range(1, 7), range(1, 7), (1, 2, 6)):
        heads = 2 * math.lcm(ours, theirs)
        ours_held, theirs_held = held(ours, planes, heads), held(theirs, planes, heads)
        moved = [[(-1, -1)] * len(part) for part in ours_held]
        size = planes * heads
        targets = block_pieces(pools(ours, size), theirs, planes)
        sources = block_pieces(pools(theirs, size), ours, planes)
        for target, source in zip(targets, sources, strict=True):
            piece = theirs_held[source.rank][source.offset : source.offset + source.size]
            moved[target.rank][target.offset : target.offset + target.size] = piece
        assert moved == ours_held


REFUSED: dict[str, tuple[tuple[PoolLayout, ...], str]] = {
    "other bytes": (pools(2, 100), "100 bytes and this worker's 96"),
    "no ranks": ((), "0 bytes"),
    "ranks that do not divide": (
        pools(3),
        "The peer divides 4 key heads among 3 ranks and this worker among 2, which needs 6 equal parts.",
    ),
    "unequal ranks": ((pools(2)[0], pools(2, blocks=9)[1]), "different pools"),
    "too many blocks": (pools(4, blocks=2**31 // 4), "blocks of 'DRAM'"),
    "an address beyond memory": (pools(4, address=2**64 - 1), "invalid address"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_check_pools_refuses_what_cannot_be_divided(name: str) -> None:
    theirs, message = REFUSED[name]
    with pytest.raises(IncompatiblePeer) as caught:
        check_pools(pools(2), theirs, 4)
    assert message in caught.value.message


def test_checksum_does_not_depend_on_the_ranks() -> None:
    content = pattern(BLOCKS, LAYERS, 1)
    expected: list[int] = []
    for ranks in (1, 2, 4):
        cache = pool(BLOCKS, LAYERS, ranks)
        fill(cache, content)
        sums = block_checksums(cache, range(BLOCKS))
        expected = expected or sums
        assert sums == expected
        cache.parts[-1].block(3)[-1] ^= 1
        assert [
            block for block, one in enumerate(block_checksums(cache, range(BLOCKS))) if one != sums[block]
        ] == [3]


DEGREES = ((2, 1), (1, 2), (2, 2), (4, 2), (1, 4))


@pytest.fixture(
    scope="module", params=["loopback", *(pytest.param(kind, marks=NIXL) for kind in ("shm", "tcp"))]
)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    with ucx_tls(name):
        yield name


@contextlib.asynccontextmanager
async def open_peer(kind: str, ranks: int) -> AsyncIterator[tuple[bytes, tuple[PoolLayout, ...]]]:
    """Yield metadata and pools of a worker that holds `pattern(BLOCKS, LAYERS, 1)`."""
    if kind != "loopback":
        with PeerProcess(BLOCKS, LAYERS, 1, ranks) as process:
            yield process.metadata, process.pools
        return
    cache = pool(BLOCKS, LAYERS, ranks)
    fill(cache, pattern(BLOCKS, LAYERS, 1))
    peer = LoopbackTransfer(cache, "peer")
    yield peer.metadata, peer.pools
    await peer.close()


@pytest.mark.parametrize(("theirs", "ours"), DEGREES)
async def test_read_of_another_degree_moves_every_block(kind: str, theirs: int, ours: int) -> None:
    content, cache = pattern(BLOCKS, LAYERS, 1), pool(BLOCKS, LAYERS, ours)
    transfer = await create_transfer("loopback" if kind == "loopback" else "nixl", cache, "reader")
    chance = random.Random(4)
    async with open_peer(kind, theirs) as (metadata, pools):
        peer = await transfer.connect(metadata, pools, "epoch")
        for count in (1, 7, BLOCKS):
            remote = [chance.randrange(BLOCKS) for _ in range(count)]
            local = chance.sample(range(BLOCKS), count)
            before = rows(cache).clone()
            pulled = await transfer.pull(peer, remote, local).settled()
            assert pulled.bytes == count * content.shape[1]
            before[local] = content[remote]
            assert rows(cache).equal(before)
        await transfer.disconnect(peer)
        await transfer.close()
