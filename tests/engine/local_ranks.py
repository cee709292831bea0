"""The other ranks of a worker, whose pools are in this process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import msgspec

from baton_engine.kv.cache import KVCache
from baton_engine.parallel.messages import AnyOrder, AnyReply
from baton_engine.parallel.rank import RankOrders
from baton_engine.parallel.ranks import RankPools, settle


class LocalRanks:
    """Implementation of `ranks.Orders`."""

    def __init__(self, parts: Sequence[KVCache]) -> None:
        self._waiting: list[dict[int, Future[AnyReply]]] = [{} for _ in parts]
        self._ranks = [
            RankOrders(part, partial(self._reply, waiting))
            for part, waiting in zip(parts, self._waiting, strict=True)
        ]
        self._numbers = itertools.count(1)

    @property
    def others(self) -> int:
        return len(self._ranks)

    def order(self, order: AnyOrder) -> list[Future[AnyReply]]:
        order = msgspec.structs.replace(order, number=next(self._numbers))
        futures: list[Future[AnyReply]] = []
        for rank, waiting in zip(self._ranks, self._waiting, strict=True):
            waiting[order.number] = Future()
            futures.append(waiting[order.number])
            rank.begin(order)
        return futures

    @staticmethod
    def _reply(waiting: dict[int, Future[AnyReply]], reply: AnyReply) -> None:
        settle(waiting.pop(reply.number), reply)


def local_pools(parts: Sequence[KVCache]) -> RankPools | None:
    """The pools of all ranks but the first, if there are any."""
    return RankPools(LocalRanks(parts[1:])) if len(parts) > 1 else None
