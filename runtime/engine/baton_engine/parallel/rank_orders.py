"""A rank's part of a transfer: carries out rank 0's orders about the blocks of this rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from baton_api.errors import BatonError
from baton_engine.kv.cache import KVCache
from baton_engine.parallel.messages import (
    AnyReply,
    ClosePool,
    ConnectPeer,
    DisconnectPeer,
    Opened,
    OpenPool,
    Order,
    OrderFailed,
    OrderReply,
    PullBlocks,
    ReadEnded,
    ServePeers,
    SumBlocks,
    Summed,
)
from baton_engine.streams import Event
from baton_engine.transfer import Pulled
from baton_engine.transfer.integrity import block_checksums
from baton_engine.transfer.pool_reader import PoolReader


class RankOrders:
    """
    The orders of one rank, run one after the other on a thread.

    A read continues on the thread of its `PoolReader`.
    """

    def __init__(self, cache: KVCache, send: Callable[[AnyReply], None]) -> None:
        """`send` is called from any thread. It may raise OSError, because rank 0 has ended."""
        self._cache = cache
        self._send = send
        self._pool: PoolReader | None = None
        self._thread = ThreadPoolExecutor(1, "rank-orders", initializer=cache.streams.use)

    def begin(self, order: Order) -> None:
        """
        Queue `order` behind all work that the calling thread has launched on the device.

        A pass may still write blocks that are to be summed, and blocks that are to be read into.
        """
        self._thread.submit(self._run, order, self._cache.streams.record())

    def _run(self, order: Order, launched: Event) -> None:
        try:
            launched.wait()
            self._obey(order)
        except Exception as error:
            reason = error.message if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
            self._reply(OrderFailed(number=order.number, reason=reason))

    def _obey(self, order: Order) -> None:
        number = order.number
        match order:
            case OpenPool():
                self._pool = PoolReader(self._cache, order.worker)
                sealed = self._pool.open().result()
                self._reply(Opened(number=number, sealed=sealed, pool=self._pool.pool))
                return
            case SumBlocks():
                sums = block_checksums(self._cache, order.blocks, sums=True)
                self._reply(Summed(number=number, sums=sums))
                return
        pool = self._pool
        assert pool is not None, "the first order is OpenPool"
        match order:
            case ConnectPeer():
                pool.connect(order.sealed, order.pools, order.epoch, order.peer).result()
            case DisconnectPeer():
                pool.disconnect(order.peer).result()
            case ServePeers():
                pool.serve(order.change)
            case PullBlocks():
                read = pool.pull(order.peer, order.remote, order.local)
                read.end.add_done_callback(lambda end: self._reply(_read_ended(number, end)))
                return
            case ClosePool():
                pool.stop()
                pool.join(order.seconds)
        self._reply(OrderReply(number=number))

    def _reply(self, reply: AnyReply) -> None:
        with contextlib.suppress(OSError):
            self._send(reply)


def _read_ended(number: int, end: Future[Pulled]) -> AnyReply:
    if (error := end.exception()) is not None:
        return OrderFailed(number=number, reason=str(error))
    pulled = end.result()
    return ReadEnded(number=number, bytes=pulled.bytes, seconds=pulled.seconds, transport=pulled.transport)
