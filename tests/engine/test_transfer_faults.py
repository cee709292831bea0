"""NIXL's reads while the peer dies, hangs, comes back, or restarts; and their cost when idle."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import psutil
import pytest

from baton_api.errors import TransferFailed
from baton_engine.kv.cache import KVCache
from baton_engine.transfer import Peer, Pull, Pulled
from baton_engine.transfer.nixl_transfer import NixlTransfer
from tests.decode.pair import eventually
from tests.engine.transfer_links import Child, PeerProcess, ucx_tls
from tests.engine.transfer_pools import pattern, pool, rows

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

BLOCKS = 256
LAYERS = 64  # 512 KiB a block, 128 MiB a pool: twice what a read has under way, so it is met in the middle
SOON_S = 300.0
"""An answer that takes this long has not come; none of them takes 2 s on an idle machine."""


@pytest.fixture(params=["shm", "tcp"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    with ucx_tls(request.param):
        yield request.param


@pytest.fixture
def peer(request: pytest.FixtureRequest) -> Iterator[PeerProcess]:
    if "kind" in request.fixturenames:
        request.getfixturevalue("kind")  # it decides how the peer's UCX may speak
    with PeerProcess(BLOCKS, LAYERS, seed=1) as process:
        yield process


@pytest.fixture
def cache() -> KVCache:
    return pool(BLOCKS, LAYERS)


@asynccontextmanager
async def reading(cache: KVCache) -> AsyncIterator[NixlTransfer]:
    transfer = await NixlTransfer.create(cache, "reader")
    try:
        yield transfer
    finally:
        await transfer.close()


async def connect(transfer: NixlTransfer, process: PeerProcess) -> Peer:
    return await transfer.connect(process.metadata, process.pools, process.epoch)


async def soon(pull: Pull) -> Pulled:
    return await asyncio.wait_for(pull.settled(), SOON_S)


async def still_under_way(pull: Pull) -> bool:
    done, _ = await asyncio.wait({pull.settled()}, timeout=0.3)
    return not done


def everything(transfer: NixlTransfer, peer: Peer, seed: int = 3) -> Pull:
    """All blocks of the pool, scattered."""
    return transfer.pull(peer, random.Random(seed).sample(range(BLOCKS), BLOCKS), range(BLOCKS))


async def test_nixl_killed_peer_fails_the_pull(kind: str, peer: PeerProcess, cache: KVCache) -> None:
    async with reading(cache) as transfer:
        connected = await connect(transfer, peer)
        await soon(transfer.pull(connected, [1], [1]))
        peer.kill()
        with pytest.raises(TransferFailed):
            await soon(everything(transfer, connected))
        with pytest.raises(TransferFailed, match="gone"):
            await soon(transfer.pull(connected, [1], [1]))


async def test_nixl_peer_killed_before_the_first_read_fails_the_pull(
    kind: str, peer: PeerProcess, cache: KVCache
) -> None:
    async with reading(cache) as transfer:
        connected = await connect(transfer, peer)
        peer.kill()
        with pytest.raises(TransferFailed):
            await soon(everything(transfer, connected))


async def test_nixl_peer_killed_in_mid_read_fails_the_pulls(
    kind: str, peer: PeerProcess, cache: KVCache
) -> None:
    async with reading(cache) as transfer:
        connected = await connect(transfer, peer)
        await soon(transfer.pull(connected, [1], [1]))
        pulls = [everything(transfer, connected, seed) for seed in range(60)]  # 7.5 GB
        await soon(transfer.pull(connected, [2], [2]))  # by then each of the others has moved some
        peer.kill()
        ends = await asyncio.gather(*(soon(pull) for pull in pulls), return_exceptions=True)
        assert isinstance(ends[-1], TransferFailed)
        assert all(isinstance(end, (TransferFailed, Pulled)) for end in ends)
        before = rows(cache).clone()
        await asyncio.sleep(0.3)  # settled pulls stay settled: no bytes land late
        assert rows(cache).equal(before)


async def test_nixl_hung_peer_leaves_the_pull_unsettled(kind: str, peer: PeerProcess, cache: KVCache) -> None:
    async with reading(cache) as transfer:
        connected = await connect(transfer, peer)
        peer.stop()
        pull = transfer.pull(connected, range(BLOCKS), range(BLOCKS))
        assert await still_under_way(pull)
        peer.go_on()
        assert (await soon(pull)).bytes == BLOCKS * cache.block_bytes
        assert rows(cache).equal(pattern(BLOCKS, LAYERS, 1))


async def test_nixl_hung_peer_killed_settles_the_pull(kind: str, peer: PeerProcess, cache: KVCache) -> None:
    async with reading(cache) as transfer:
        connected = await connect(transfer, peer)
        peer.stop()
        pull = everything(transfer, connected)
        assert await still_under_way(pull)
        peer.kill()
        with pytest.raises(TransferFailed):
            await soon(pull)


async def test_nixl_peer_hung_over_tcp_in_mid_read_is_waited_for(peer: PeerProcess, cache: KVCache) -> None:
    with ucx_tls("tcp"), PeerProcess(BLOCKS, LAYERS, seed=1) as over_tcp:
        async with reading(cache) as transfer:
            connected = await connect(transfer, over_tcp)
            for _ in range(50):  # on a busy machine, all reads may have ended before the peer stops
                pulls = [everything(transfer, connected, seed) for seed in range(6)]
                await soon(transfer.pull(connected, [2], [2]))  # by then each of the others has moved some
                over_tcp.stop()
                if await still_under_way(pulls[-1]):
                    break
                over_tcp.go_on()
            assert not pulls[-1].settled().done()
            before = rows(cache).clone()
            over_tcp.go_on()
            await asyncio.gather(*(soon(pull) for pull in pulls))
            assert not rows(cache).equal(before), "the late bytes landed: why blocks are quarantined"


async def test_shared_memory_is_read_though_the_peer_hangs(peer: PeerProcess, cache: KVCache) -> None:
    async with reading(cache) as transfer:
        connected = await connect(transfer, peer)
        for _ in range(
            50
        ):  # the peer has a part in setting up the connection, which outlasts the first reads
            await soon(transfer.pull(connected, [1], [1]))
            peer.stop()
            pull = transfer.pull(connected, range(BLOCKS), range(BLOCKS))
            if not await still_under_way(pull):
                break
            peer.go_on()
            await soon(pull)
        await soon(pull)
        assert rows(cache).equal(pattern(BLOCKS, LAYERS, 1))


async def test_nixl_hung_peer_delays_no_other(kind: str, peer: PeerProcess, cache: KVCache) -> None:
    with PeerProcess(BLOCKS, LAYERS, seed=2) as other:
        async with reading(cache) as transfer:
            hung = await connect(transfer, peer)
            peer.stop()
            stuck = transfer.pull(hung, [0], [0])
            assert await still_under_way(stuck)
            lively = await asyncio.wait_for(connect(transfer, other), SOON_S)
            await soon(transfer.pull(lively, range(1, BLOCKS), range(1, BLOCKS)))
            assert rows(cache)[1:].equal(pattern(BLOCKS, LAYERS, 2)[1:])
            peer.kill()
            with pytest.raises(TransferFailed):
                await soon(stuck)
            await soon(transfer.pull(lively, [0], [0]))


async def test_nixl_hung_peer_can_be_connected_and_disconnected(
    kind: str, peer: PeerProcess, cache: KVCache
) -> None:
    async with reading(cache) as transfer:
        peer.stop()
        connected = await asyncio.wait_for(connect(transfer, peer), SOON_S)
        pull = transfer.pull(connected, [1], [1])
        assert await still_under_way(pull)
        await asyncio.wait_for(transfer.disconnect(connected), SOON_S)
        assert await still_under_way(pull), "letting go of the peer does not stop its writing"
        peer.go_on()
        await soon(pull)
        assert rows(cache)[1].equal(pattern(BLOCKS, LAYERS, 1)[1])


async def test_nixl_restarted_peer_is_another_peer(kind: str, peer: PeerProcess, cache: KVCache) -> None:
    async with reading(cache) as transfer:
        first = await connect(transfer, peer)
        await soon(transfer.pull(first, [1], [1]))
        peer.kill()
        with PeerProcess(BLOCKS, LAYERS, seed=2) as again:
            second = await connect(transfer, again)  # while the dead one is still known
            assert second.name != first.name
            with pytest.raises(TransferFailed):
                await soon(transfer.pull(first, [2], [2]))
            await soon(transfer.pull(second, range(BLOCKS), range(BLOCKS)))
            assert rows(cache).equal(pattern(BLOCKS, LAYERS, 2))
            await transfer.disconnect(first)
            await transfer.disconnect(second)


async def test_nixl_peer_that_does_not_serve_is_read_once_it_does(
    kind: str, peer: PeerProcess, cache: KVCache
) -> None:
    async with reading(cache) as transfer:
        connected = await connect(transfer, peer)
        peer.order("rest")
        pull = transfer.pull(connected, [1], [1])
        assert await still_under_way(pull)
        peer.order("serve")
        await soon(pull)


async def test_nixl_reader_killed_in_mid_read_does_no_harm(
    kind: str, peer: PeerProcess, cache: KVCache
) -> None:
    for _ in range(3):
        with Child("read", BLOCKS, LAYERS, peer.metadata, peer.pools) as reader:
            assert reader.hear() == "reading"
    async with reading(cache) as transfer:
        connected = await connect(transfer, peer)
        await soon(transfer.pull(connected, range(BLOCKS), range(BLOCKS)))
        assert rows(cache).equal(pattern(BLOCKS, LAYERS, 1))


async def test_two_hundred_connections_leak_no_files(kind: str, peer: PeerProcess, cache: KVCache) -> None:
    this = psutil.Process()
    async with reading(cache) as transfer:

        async def come_and_go(times: int) -> None:
            for _ in range(times):
                connected = await connect(transfer, peer)
                await soon(transfer.pull(connected, [1], [1]))
                await transfer.disconnect(connected)

        await come_and_go(5)
        ours, theirs = this.num_fds(), peer.files
        await come_and_go(200)
        await eventually(lambda: this.num_fds() <= ours + 2 and peer.files <= theirs + 2)


async def test_peers_that_end_leak_no_files(kind: str, peer: PeerProcess, cache: KVCache) -> None:
    this = psutil.Process()
    async with reading(cache) as transfer:
        await soon(transfer.pull(await connect(transfer, peer), [1], [1]))
        before = this.num_fds()
        for seed in range(4):
            with PeerProcess(BLOCKS, LAYERS, seed) as short:
                await soon(transfer.pull(await connect(transfer, short), [1], [1]))
        async with asyncio.timeout(SOON_S):
            while this.num_fds() > before + 2:
                await connect(transfer, peer)  # this releases the sockets of peers that have ended
                await asyncio.sleep(0.01)


async def test_nixl_idle_worker_takes_no_cpu_and_serving_one_little(kind: str, peer: PeerProcess) -> None:
    async def cpu_per_second() -> float:
        before = peer.cpu_seconds
        await asyncio.sleep(1.0)  # the span that is measured
        return peer.cpu_seconds - before

    # A thread that spins does so in each of these seconds.
    assert min([await cpu_per_second() for _ in range(3)]) < 0.25, "serving, nobody reads"
    peer.order("rest")
    assert min([await cpu_per_second() for _ in range(3)]) < 0.03


async def test_nixl_close_during_a_read_keeps_the_pool_registered(
    peer: PeerProcess, cache: KVCache, caplog: pytest.LogCaptureFixture
) -> None:
    transfer = await NixlTransfer.create(cache, "reader")
    connected = await connect(transfer, peer)
    peer.stop()
    pull = transfer.pull(connected, [1], [1])
    assert await still_under_way(pull)
    await transfer.close()
    assert "is still in progress" in caplog.text
    assert await still_under_way(pull)
    peer.go_on()
    await soon(pull)
    assert rows(cache)[1].equal(pattern(BLOCKS, LAYERS, 1)[1])
