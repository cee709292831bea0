"""Blocks that ranks divide: read over NIXL by workers of another degree."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future

import msgspec
import pytest
import torch

from baton_api.errors import IncompatiblePeer, SetupError, TransferFailed
from baton_api.messages import PoolLayout
from baton_engine.kv.cache import FLOAT8_CACHE, KVCache, Section
from baton_engine.model.shards import Shard
from baton_engine.transfer import Pulled
from baton_engine.transfer.integrity import (
    block_checksums,
    by_sums,
    join_sealed,
    joined_checksums,
    split_sealed,
)
from baton_engine.transfer.nixl_transfer import NixlTransfer
from baton_engine.transfer.parts import VRAM, CommonPieces, common_pieces, pool_layout, sources
from baton_engine.transfer.reads import PullFuture, check_pools, join_reads
from tests.engine.local_ranks import local_pools
from tests.engine.transfer_links import PeerProcess, ucx_tls
from tests.engine.transfer_pools import divide, fill, head_pools, pattern, pools_of, rows

BLOCKS = 40
LAYERS = 3


def pools(
    ranks: int, whole: int = 96, *, heads: int = 4, address: int = 4096, blocks: int = 10
) -> tuple[PoolLayout, ...]:
    replicas = max(1, ranks // heads)
    size = whole * replicas // ranks
    return tuple(
        PoolLayout(address=address, block_bytes=size, blocks=blocks, rank=rank, replicas=replicas)
        for rank in range(ranks)
    )


PIECES: dict[str, tuple[PoolLayout, int, PoolLayout, CommonPieces]] = {
    "one from two": (pools(1)[0], 1, pools(2)[1], CommonPieces((24, 24), (24, 72), (0, 24))),
    "two from one": (pools(2)[1], 2, pools(1)[0], CommonPieces((24, 24), (0, 24), (24, 72))),
    "two from two": (pools(2)[1], 2, pools(2)[1], CommonPieces((24, 24), (0, 24), (0, 24))),
    "other heads": (pools(2)[1], 2, pools(2)[0], CommonPieces((), (), ())),
    "one of two replicas from two ranks": (
        pools(8)[5],
        4,
        pools(2)[1],
        CommonPieces((12, 12), (0, 12), (0, 24)),
    ),
    "one latent of two ranks": (
        pools(1)[0],
        1,
        pools(2, heads=1)[1],
        CommonPieces((48, 48), (0, 48), (0, 48)),
    ),
}
"""A rank of this worker, its ranges of heads, a rank of the peer, and the pieces of blocks with 2 planes."""


@pytest.mark.parametrize("name", PIECES)
def test_pieces_are_the_largest_in_one_pool_on_both_sides(name: str) -> None:
    ours, parts, theirs, expected = PIECES[name]
    assert common_pieces(ours, parts, theirs, (Section(2, ours.block_bytes // 2),)) == expected


def held(ranks: int, planes: int, heads: int) -> list[list[tuple[int, int]]]:
    """Return the plane and head of each byte of a block, for each rank, if a head has one byte in a plane."""
    owned = [Shard(rank, ranks).kv_heads(heads) for rank in range(ranks)]
    return [[(plane, head) for plane in range(planes) for head in part] for part in owned]


def degrees(heads: int) -> list[int]:
    """Return the numbers of ranks up to 24 that can divide or repeat the key heads."""
    return [ranks for ranks in range(1, 25) if not heads % ranks or not ranks % heads]


def test_pieces_move_each_head_to_its_place_for_any_degrees() -> None:
    for heads, planes in itertools.product((1, 2, 3, 4, 6, 12), (1, 2, 6)):
        for ours, theirs in itertools.product(degrees(heads), repeat=2):
            our_pools, their_pools = (pools(ranks, planes * heads, heads=heads) for ranks in (ours, theirs))
            check_pools(our_pools, their_pools, heads)
            sections = (Section(planes, our_pools[0].block_bytes // planes),)
            theirs_held = held(theirs, planes, heads)
            for our, expected in zip(our_pools, held(ours, planes, heads), strict=True):
                moved = [(-1, -1)] * len(expected)
                for their in sources(our, ours, their_pools):
                    common = common_pieces(our, ours // our.replicas, their, sections)
                    for size, target, source in zip(common.sizes, common.ours, common.theirs, strict=True):
                        assert moved[target] == (-1, -1), "it was read before"
                        piece = theirs_held[their.rank][source : source + size]
                        moved[target : target + size] = piece
                assert moved == expected


SOURCES: dict[str, tuple[int, int, int, list[list[int]]]] = {
    "equal degrees": (4, 4, 1, [[0], [1], [2], [3]]),
    "equal degrees with two heads": (4, 4, 2, [[0], [1], [2], [3]]),
    "one rank": (1, 4, 1, [[0]]),
    "one rank with two heads": (1, 4, 2, [[0, 2]]),
    "two ranks": (2, 4, 1, [[0], [2]]),
    "more ranks": (4, 2, 1, [[0], [0], [1], [1]]),
    "ranks that do not divide": (3, 2, 1, [[0], [0], [1]]),
    "two ranks with two heads each": (2, 8, 4, [[0, 2], [4, 6]]),
    "replicas from two ranks": (8, 2, 4, [[0], [0], [0], [0], [1], [1], [1], [1]]),
}
"""Ranks of the reader and of the peer, key heads, and the ranks that each rank reads."""


@pytest.mark.parametrize("name", SOURCES)
def test_readers_are_spread_over_replicas(name: str) -> None:
    ours, theirs, heads, expected = SOURCES[name]
    their_pools = pools(theirs, heads=heads)
    read = [[pool.rank for pool in sources(our, ours, their_pools)] for our in pools(ours, heads=heads)]
    assert read == expected


def test_no_replica_is_read_by_two_ranks_more_than_another() -> None:
    for heads in (1, 2, 3, 4, 6, 12):
        for ours, theirs in itertools.product(degrees(heads), repeat=2):
            their_pools = pools(theirs, heads=heads)
            read = Counter(
                pool.rank for our in pools(ours, heads=heads) for pool in sources(our, ours, their_pools)
            )
            replicas = their_pools[0].replicas
            for first in range(0, theirs, replicas):
                counts = [read[rank] for rank in range(first, first + replicas)]
                assert max(counts) - min(counts) <= 1


DTYPES = (torch.bfloat16, FLOAT8_CACHE)


def drafting(ranks: int, dtype: torch.dtype) -> list[KVCache]:
    """Return the parts of all ranks of a worker with a draft head: random keys, values and states."""
    (whole,), parts = (head_pools(count, BLOCKS, LAYERS, dtype) for count in (1, ranks))
    generator = torch.Generator().manual_seed(1)
    whole.kv.view(torch.uint8).random_(generator=generator)
    divide(whole, parts)
    return parts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_move_keys_and_states_of_a_draft_head_to_their_places(dtype: torch.dtype) -> None:
    """Its key heads have another number and another size than those of the model."""
    for ours, theirs in itertools.product((1, 2, 4), repeat=2):
        targets, peers = head_pools(ours, BLOCKS, LAYERS, dtype), drafting(theirs, dtype)
        for target, source in itertools.product(targets, peers):
            common = common_pieces(pool_layout(target), ours, pool_layout(source), target.sections)
            for size, to, start in zip(common.sizes, common.ours, common.theirs, strict=True):
                written, read = (part.kv.view(torch.uint8).view(BLOCKS, -1) for part in (target, source))
                written[:, to : to + size] = read[:, start : start + size]
        for part, expected in zip(targets, drafting(ours, dtype), strict=True):
            assert torch.equal(part.kv.view(torch.uint8), expected.kv.view(torch.uint8))


REFUSED: dict[str, tuple[tuple[PoolLayout, ...], str]] = {
    "other bytes": (pools(2, 100), "100 bytes and this worker's 96"),
    "no ranks": ((), "0 bytes"),
    "ranks that do not divide": (
        pools(3),
        "The peer divides 4 key heads among 3 ranks and this worker among 2. Choose",
    ),
    "ranks with the same heads, not the same number of each": (
        (*pools(8), msgspec.structs.replace(pools(8)[0], rank=9)),
        "among 9 ranks",
    ),
    "another number of ranks with the same heads": (
        (*pools(4)[:2], msgspec.structs.replace(pools(4)[2], replicas=2), pools(4)[3]),
        "different pools",
    ),
    "unequal ranks": ((pools(2)[0], pools(2, blocks=9)[1]), "different pools"),
    "another order": (pools(2)[::-1], "in another order"),
    "too many blocks": (pools(4, blocks=2**31 // 4), "blocks of 'DRAM'"),
    "an address beyond memory": (pools(4, address=2**64 - 1), "invalid address"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_check_pools_refuses_what_cannot_be_divided(name: str) -> None:
    theirs, message = REFUSED[name]
    with pytest.raises(IncompatiblePeer) as caught:
        check_pools(pools(2), theirs, 4)
    assert message in caught.value.message


def test_metadata_of_all_ranks_is_split_again() -> None:
    for sealed in ([b"one"], [b"one", b""], [b"", b"two", b"\0" * 300]):
        assert split_sealed(join_sealed(sealed), len(sealed)) == sealed
    joined = join_sealed([b"one", b"two"])
    for damaged, ranks in ((joined, 3), (joined[:-8], 2), (joined + b"x", 2), (b"", 2)):
        with pytest.raises(TransferFailed, match=f"not that of {ranks} ranks"):
            split_sealed(damaged, ranks)


# --- Checksums ---


def sums_of(parts: list[KVCache]) -> list[int]:
    """Return the sums of all parts of each block, added."""
    sums = [block_checksums(part, range(BLOCKS), sums=True) for part in parts]
    return joined_checksums(sums, parts[0].replicas)


def test_sums_of_all_ranks_add_up_to_that_of_one() -> None:
    content = pattern(BLOCKS, LAYERS, 1)
    expected: list[int] = []
    for ranks in (1, 2, 4, 8, 12):
        parts = pools_of(ranks, BLOCKS, LAYERS)
        for part in parts:
            fill(part, content)
        sums = sums_of(parts)
        expected = expected or sums
        assert sums == expected
        for part in parts:
            part.block(3)[-1] ^= 1
            assert [block for block, one in enumerate(sums_of(parts)) if one != sums[block]] == [3]
            part.block(3)[-1] ^= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_blocks_with_a_draft_head_do_not_depend_on_the_ranks(dtype: torch.dtype) -> None:
    expected = sums_of(drafting(1, dtype))
    for ranks in (2, 4):
        parts = drafting(ranks, dtype)
        assert sums_of(parts) == expected
        assert parts[1].head is not None
        parts[1].head.states.view(torch.uint8)[7, 0] ^= 1
        assert [block for block, one in enumerate(sums_of(parts)) if one != expected[block]] == [7]


def test_sums_notice_heads_in_the_place_of_others() -> None:
    first, second = pools_of(2, BLOCKS, LAYERS)
    for part in (first, second):
        fill(part, pattern(BLOCKS, LAYERS, 1))
    expected = sums_of([first, second])
    first.kv[5], second.kv[5] = second.kv[5].clone(), first.kv[5].clone()
    assert [block for block, one in enumerate(sums_of([first, second])) if one != expected[block]] == [5]


def test_workers_decide_by_one_rule_for_sums() -> None:
    on_device = (msgspec.structs.replace(pools(1)[0], memory=VRAM),)
    cases = [(pools(1), 1), (pools(1), 2), (pools(2), 1), (on_device, 1)]
    assert [by_sums(announced, readers) for announced, readers in cases] == [False, True, True, True]


# --- Reads ---


def test_joined_read_ends_with_the_last_part() -> None:
    """Until then, a rank may still write blocks of a failed read."""
    parts: list[Future[Pulled]] = [Future(), Future(), Future()]
    whole, other = PullFuture(), PullFuture()
    join_reads(parts, whole)
    join_reads(parts[1:], other)
    parts[2].set_result(Pulled(5, 0.5, ""))
    parts[0].set_exception(TransferFailed("rank 0 failed"))
    assert not whole.end.done()
    parts[1].set_result(Pulled(6, 0.25, "nixl/ucx tcp"))
    with pytest.raises(TransferFailed, match="rank 0 failed"):
        whole.end.result(0)
    assert other.end.result(0) == Pulled(11, 0.5, "nixl/ucx tcp")


DEGREES = ((2, 1), (1, 2), (2, 2), (4, 2), (1, 4), (8, 2), (2, 8), (8, 8))


@pytest.fixture(scope="module", params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    with ucx_tls(name):
        yield name


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.parametrize(("theirs", "ours"), DEGREES)
async def test_read_of_another_degree_moves_every_block(transport: str, theirs: int, ours: int) -> None:
    content, parts = pattern(BLOCKS, LAYERS, 1), pools_of(ours, BLOCKS, LAYERS)
    transfer = await NixlTransfer.create(parts[0], "reader", local_pools(parts))
    chance = random.Random(4)
    with PeerProcess(BLOCKS, LAYERS, 1, theirs) as process:
        peer = await transfer.connect(process.metadata, process.pools, "epoch")
        for count in (1, 7, BLOCKS):
            remote = [chance.randrange(BLOCKS) for _ in range(count)]
            local = chance.sample(range(BLOCKS), count)
            before = rows(*parts).clone()
            pulled = await transfer.pull(peer, remote, local).settled()
            assert pulled.bytes == count * content.shape[1] * parts[0].replicas
            before[local] = content[remote]
            assert rows(*parts).equal(before)
        sums = transfer.checksums(range(BLOCKS), by_sums(process.pools, ours))
        assert sums == sums_of(parts)
        for part in parts:
            part.block(3)[-1] ^= 1
            assert transfer.checksums([3], sums=True) != sums[3:4]
            part.block(3)[-1] ^= 1
        await transfer.disconnect(peer)
        with pytest.raises(TransferFailed, match="is gone"):
            await transfer.pull(peer, [1], [1]).settled()
        await transfer.close()


@pytest.mark.nixl
@pytest.mark.slow
async def test_worker_does_not_start_without_the_agents_of_all_ranks() -> None:
    parts = pools_of(2, BLOCKS, LAYERS)
    others = local_pools(parts)
    assert others is not None
    others.close(0.0)
    with pytest.raises(SetupError, match="A rank cannot transfer its KV blocks"):
        await NixlTransfer.create(parts[0], "reader", others)


@pytest.mark.nixl
@pytest.mark.slow
async def test_connection_fails_as_a_whole_if_one_rank_fails() -> None:
    """Rank 1 cannot read the metadata of its peer. A later connection of both works."""
    parts = pools_of(2, BLOCKS, LAYERS)
    transfer = await NixlTransfer.create(parts[0], "reader", local_pools(parts))
    with PeerProcess(BLOCKS, LAYERS, 1, 2) as process:
        sealed = split_sealed(process.metadata, 2)
        damaged = join_sealed([sealed[0], sealed[1][:-1] + b"?"])
        with pytest.raises(TransferFailed, match="damaged"):
            await transfer.connect(damaged, process.pools, "epoch")
        peer = await transfer.connect(process.metadata, process.pools, "epoch")
        assert (await transfer.pull(peer, [1], [2]).settled()).bytes == rows(*parts).shape[1]
    await transfer.close()
