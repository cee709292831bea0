"""
One read of remote blocks: its validation, slices and completion.

A large read is split into slices, because a read that completes inside the posting call would block the
transfer thread. Block numbers from a peer are validated. A read cannot be cancelled, and neither can its
completion: each waiter has a separate future, and its cancellation or timeout does not affect others.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from baton_api.errors import IncompatiblePeer, TransferFailed
from baton_api.messages import PoolLayout
from baton_engine.transfer import Pulled
from baton_engine.transfer.parts import DRAM, VRAM, whole_bytes

BLOCKS_LIMIT = 2**31 - 1
"""Maximum number of blocks of all ranks: NIXL's descriptor counts have 32 bits."""


def check_pools(ours: Sequence[PoolLayout], theirs: Sequence[PoolLayout], kv_heads: int) -> None:
    """
    Raise IncompatiblePeer if blocks of the pools `theirs` cannot be read into `ours`.

    `kv_heads` is that of the whole model.
    """
    if whole_bytes(theirs) != whole_bytes(ours):
        raise IncompatiblePeer(
            f"The peer's KV blocks have {whole_bytes(theirs)} bytes and this worker's {whole_bytes(ours)}. "
            "Start both with the same model, dtype and block size."
        )
    first = theirs[0]
    parts = math.lcm(*(len(pools) // pools[0].replicas for pools in (ours, theirs)))
    if len(theirs) % first.replicas or kv_heads % parts:
        raise IncompatiblePeer(
            f"The peer divides {kv_heads} key heads among {len(theirs)} ranks and this worker among "
            f"{len(ours)}. Choose --tensor-parallel-size so that it divides the key heads, or is a multiple "
            "of them."
        )
    for rank, pool in enumerate(theirs):
        if pool.rank != rank:
            raise IncompatiblePeer("The peer announced its ranks in another order.")
        if _sizes(pool) != _sizes(first):
            raise IncompatiblePeer("The peer announced different pools for its ranks.")
        if not 0 < pool.blocks <= BLOCKS_LIMIT // len(theirs) or pool.memory not in (DRAM, VRAM):
            raise IncompatiblePeer(f"The peer announced a pool of {pool.blocks} blocks of {pool.memory!r}.")
        if not 0 < pool.address < 2**64 - pool.blocks * pool.block_bytes or not 0 <= pool.device < 2**16:
            raise IncompatiblePeer("The peer announced a pool with an invalid address.")


def _sizes(pool: PoolLayout) -> tuple[int, int, str, int]:
    return pool.block_bytes, pool.blocks, pool.memory, pool.replicas


def check_read(theirs: PoolLayout, ours: PoolLayout, remote: Sequence[int], local: Sequence[int]) -> None:
    """Raise TransferFailed if remote blocks are invalid, ValueError if local ones are."""
    if len(remote) != len(local):
        raise ValueError(f"{len(remote)} remote blocks cannot be read into {len(local)} local ones")
    if local and not 0 <= min(local) <= max(local) < ours.blocks:
        raise ValueError(f"a local block is outside the pool of {ours.blocks}")
    if remote and not 0 <= min(remote) <= max(remote) < theirs.blocks:
        raise TransferFailed(f"The peer announced blocks outside its pool of {theirs.blocks}.")


def slices(remote: Sequence[int], local: Sequence[int], blocks: int) -> Iterator[tuple[list[int], list[int]]]:
    """Split both sides of a read into pieces of at most `blocks` blocks."""
    for begin in range(0, len(remote), blocks):
        end = begin + blocks
        yield list(remote[begin:end]), list(local[begin:end])


def runs(remote: Sequence[int], local: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (remote, local, count) of each run that is consecutive on both sides."""
    begin = 0
    for position in range(1, len(remote) + 1):
        step = position - begin
        if (
            position == len(remote)
            or remote[position] != remote[begin] + step
            or local[position] != local[begin] + step
        ):
            yield remote[begin], local[begin], step
            begin = position


class PullFuture:
    """Implementation of `Pull`. Its owner sets the result once, from any thread."""

    def __init__(self) -> None:
        self.end: Future[Pulled] = Future()
        # A running future cannot be cancelled, so a waiter's cancellation does not propagate.
        self.end.set_running_or_notify_cancel()

    def settled(self) -> asyncio.Future[Pulled]:
        waiter = asyncio.wrap_future(self.end)
        # Marks the exception as retrieved, so that asyncio does not log it for a waiter that has timed out.
        waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
        return waiter

    def succeed(self, pulled: Pulled) -> None:
        self.end.set_result(pulled)

    def fail(self, error: BaseException) -> None:
        self.end.set_exception(error)


def join_reads(parts: Sequence[Future[Pulled]], total: PullFuture) -> None:
    """Complete `total` with the last of `parts`. It fails if one of them has failed."""
    lock, left = threading.Lock(), len(parts)

    def ended(_: Future[Pulled]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        error = next((error for part in parts if (error := part.exception()) is not None), None)
        if error is not None:
            total.fail(error)
            return
        pulled = [part.result() for part in parts]
        seconds = max(part_read.seconds for part_read in pulled)
        total.succeed(Pulled(sum(part_read.bytes for part_read in pulled), seconds, pulled[0].transport))

    for part in parts:
        part.add_done_callback(ended)
