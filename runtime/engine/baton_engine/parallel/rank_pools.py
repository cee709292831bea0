"""Rank 0's access to the blocks of the other ranks: sends orders to their agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

from baton_api.errors import TransferFailed
from baton_api.messages import PoolLayout
from baton_engine.parallel.messages import (
    AnyOrder,
    AnyReply,
    ClosePool,
    ConnectPeer,
    DisconnectPeer,
    OpenPool,
    PullBlocks,
    ServePeers,
    SumBlocks,
)
from baton_engine.transfer import Pulled

Result = TypeVar("Result")


class Orders(Protocol):
    """The part of `Ranks` that transfers use."""

    @property
    def others(self) -> int: ...

    def order(self, order: AnyOrder) -> list[Future[AnyReply]]: ...


UNNUMBERED = 0
"""Number of an order before `Ranks.order` gives it one."""


class RankPools:
    """
    Implementation of `transfer.nixl_transfer.OtherRanks`. Any thread may use it, and no call waits.

    A thread of its own sends the orders, because a stopped rank does not read them.
    """

    def __init__(self, ranks: Orders) -> None:
        self._ranks = ranks
        self._sender = ThreadPoolExecutor(1, "rank-pools")

    def open(self, worker: str) -> list[Future[tuple[bytes, PoolLayout]]]:
        return self._order(OpenPool(UNNUMBERED, worker), lambda reply: (reply.sealed, reply.pool))

    def connect(
        self, sealed: Sequence[bytes], pools: tuple[PoolLayout, ...], epoch: str, peer: str
    ) -> list[Future[None]]:
        return self._order(ConnectPeer(UNNUMBERED, list(sealed), pools, epoch, peer), _nothing)

    def disconnect(self, peer: str) -> None:
        self._order(DisconnectPeer(UNNUMBERED, peer), _nothing)

    def pull(self, peer: str, remote: Sequence[int], local: Sequence[int]) -> list[Future[Pulled]]:
        order = PullBlocks(UNNUMBERED, peer, list(remote), list(local))
        return self._order(order, lambda reply: Pulled(reply.bytes, reply.seconds, reply.transport))

    def checksums(self, blocks: Sequence[int]) -> list[Future[list[int]]]:
        return self._order(SumBlocks(UNNUMBERED, list(blocks)), lambda reply: list(reply.sums))

    def serve(self, change: int) -> None:
        self._order(ServePeers(UNNUMBERED, change), _nothing)

    def close(self, seconds: float) -> list[Future[None]]:
        closed = self._order(ClosePool(UNNUMBERED, seconds), _nothing)
        self._sender.shutdown(wait=False)
        return closed

    def _order(self, order: AnyOrder, read: Callable[[Any], Result]) -> list[Future[Result]]:
        """Send `order`, and return what `read` gets from the replies, in the order of the ranks."""
        results: list[Future[Result]] = [Future() for _ in range(self._ranks.others)]

        def send() -> None:
            for result, reply in zip(results, self._ranks.order(order), strict=True):
                reply.add_done_callback(partial(_pass_on, result, read))

        for result in results:
            result.set_running_or_notify_cancel()  # a waiter's cancellation does not propagate
        try:
            self._sender.submit(send)
        except RuntimeError:  # it was shut down
            for result in results:
                result.set_exception(TransferFailed("The worker is closing."))
        return results


def _pass_on(result: Future[Result], read: Callable[[Any], Result], reply: Future[AnyReply]) -> None:
    if (error := reply.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(read(reply.result()))


def _nothing(_: AnyReply) -> None:
    return
