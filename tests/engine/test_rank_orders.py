"""Orders of rank 0 to other ranks, on a device that runs nothing before something waits for it."""

from __future__ import annotations

import contextlib
import queue

import pytest

from baton_api.errors import SetupError
from baton_engine.kv.cache import KVCache
from baton_engine.parallel.messages import AnyReply, Order, OrderFailed, PullBlocks, SumBlocks, Summed
from baton_engine.parallel.rank import RankOrders
from baton_engine.transfer.integrity import block_checksums
from baton_engine.transfer.nixl_transfer import NixlTransfer
from baton_engine.transfer.pool_reader import PoolReader
from tests.decode.pair import TIMEOUT_S
from tests.engine.fake_streams import FakeCuda, on_device
from tests.engine.local_ranks import local_pools
from tests.engine.transfer_pools import fill, pattern, pools_of

BLOCKS = 4
CONTENT = pattern(BLOCKS, 1, seed=1)


def late_pass(cuda: FakeCuda, part: KVCache) -> None:
    """Launch a pass that writes the blocks of `part`, once the device runs it."""
    cuda.default.queued.append(lambda: fill(part, CONTENT))


def written_sums() -> list[int]:
    """The sums of whole blocks with `CONTENT`."""
    (whole,) = pools_of(1, BLOCKS)
    fill(whole, CONTENT)
    return block_checksums(whole, range(BLOCKS), sums=True)


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def late(cuda: FakeCuda) -> KVCache:
    """Rank 1 of 2, whose device is late."""
    part = on_device(pools_of(2, BLOCKS)[1], cuda)
    late_pass(cuda, part)
    return part


def reply_of(part: KVCache, order: Order) -> AnyReply:
    replies: queue.SimpleQueue[AnyReply] = queue.SimpleQueue()
    RankOrders(part, replies.put).begin(order)
    return replies.get(timeout=TIMEOUT_S)


@pytest.fixture
async def transfer(late: KVCache) -> NixlTransfer:
    """The transfer of a worker with two ranks, of which only the second one has a late device."""
    first = pools_of(2, BLOCKS)[0]
    fill(first, CONTENT)
    return NixlTransfer(first, "worker", local_pools([first, late]))


async def test_checksums_are_computed_after_the_event_of_every_rank(transfer: NixlTransfer) -> None:
    """Announcements carry them, so no block is announced before all ranks have written it."""
    assert transfer.checksums(range(BLOCKS), sums=True) == written_sums()
    await transfer.close()


def test_rank_begins_no_order_before_its_passes_have_ended(cuda: FakeCuda, late: KVCache) -> None:
    """A read into blocks of an ended request would be overwritten by the request's last pass."""
    reply = reply_of(late, PullBlocks(7, "peer", [1], [2]))
    assert isinstance(reply, OrderFailed) and "OpenPool" in reply.reason
    assert reply.number == 7
    assert cuda.default.ended == 1


def test_rank_reports_the_error_of_its_device(cuda: FakeCuda, late: KVCache) -> None:
    cuda.broken = True
    reply = reply_of(late, SumBlocks(8, [1]))
    assert isinstance(reply, OrderFailed) and "illegal memory access" in reply.reason


def test_rank_uses_its_device_on_the_thread_of_orders(cuda: FakeCuda, late: KVCache) -> None:
    assert isinstance(reply_of(late, SumBlocks(9, [])), Summed)
    assert any(name.startswith("rank-orders") for name in cuda.users)


def test_agent_has_a_context_of_the_device_on_its_thread(cuda: FakeCuda, late: KVCache) -> None:
    """The driver has contexts per thread. Without one, UCX takes the memory of a GPU for that of the host."""
    pool = PoolReader(late, "worker")
    with contextlib.suppress(SetupError):  # NIXL is not installed
        pool.open().result(TIMEOUT_S)
    assert cuda.users == {"transfer"}
    pool.stop()
    assert pool.join(TIMEOUT_S)
