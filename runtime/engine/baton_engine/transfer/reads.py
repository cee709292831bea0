"""
One read of remote blocks: its validation and slicing, and its completion.

A large read is cut into slices, so that one that completes inside the posting call does not hold the transfer
thread for long. Block numbers from a peer are validated; numbers of this worker's own pool are the caller's.
A read cannot be cancelled, so its completion cannot either: every waiter has its own future, and one that is
cancelled or times out affects no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from baton_api.errors import IncompatiblePeer, TransferFailed
from baton_api.messages import PoolLayout
from baton_engine.transfer import Pulled

BLOCKS_LIMIT = 2**31 - 1
"""NIXL counts descriptors in 32 bits."""


def check_pool(ours: PoolLayout, theirs: PoolLayout) -> None:
    """Raises IncompatiblePeer unless blocks of the pool `theirs` fit into `ours`."""
    if theirs.block_bytes != ours.block_bytes:
        raise IncompatiblePeer(
            f"The peer's KV blocks have {theirs.block_bytes} bytes and this worker's {ours.block_bytes}: "
            "start both with the same model, dtype and block size."
        )
    if not 0 < theirs.blocks <= BLOCKS_LIMIT or theirs.memory not in ("DRAM", "VRAM"):
        raise IncompatiblePeer(f"The peer announced a pool of {theirs.blocks} blocks of {theirs.memory!r}.")
    if not 0 < theirs.address < 2**64 - theirs.blocks * theirs.block_bytes or not 0 <= theirs.device < 2**16:
        raise IncompatiblePeer("The peer announced a pool outside of any address space.")


def check_read(theirs: PoolLayout, ours: PoolLayout, remote: Sequence[int], local: Sequence[int]) -> None:
    """Raises TransferFailed if the peer has no such blocks, ValueError if this worker has none."""
    if len(remote) != len(local):
        raise ValueError(f"{len(remote)} remote blocks cannot be read over {len(local)} local ones")
    if local and not 0 <= min(local) <= max(local) < ours.blocks:
        raise ValueError(f"a local block is outside of the pool of {ours.blocks}")
    if remote and not 0 <= min(remote) <= max(remote) < theirs.blocks:
        raise TransferFailed(f"The peer announced blocks outside of its pool of {theirs.blocks}.")


def slices(remote: Sequence[int], local: Sequence[int], blocks: int) -> Iterator[tuple[list[int], list[int]]]:
    """Both sides of a read in pieces of at most `blocks` blocks."""
    for begin in range(0, len(remote), blocks):
        end = begin + blocks
        yield list(remote[begin:end]), list(local[begin:end])


def runs(remote: Sequence[int], local: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(remote, local, count) of each stretch that is consecutive on both sides."""
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


class Settlement:
    """A `Pull` that is settled by its owner, once, from any thread."""

    def __init__(self) -> None:
        self._end: Future[Pulled] = Future()
        # A running future refuses to be cancelled, so a waiter's cancellation stops at the waiter.
        self._end.set_running_or_notify_cancel()

    def settled(self) -> asyncio.Future[Pulled]:
        waiter = asyncio.wrap_future(self._end)
        # One that stopped listening at its deadline is no error that asyncio should write of.
        waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
        return waiter

    def succeed(self, pulled: Pulled) -> None:
        self._end.set_result(pulled)

    def fail(self, error: TransferFailed) -> None:
        self._end.set_exception(error)
