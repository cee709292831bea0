"""
The process of a rank other than 0: `python -m baton_engine.parallel.rank`, with a socket as stdin.

It computes what rank 0 sends, on its part of the weights and of the KV cache. A thread receives messages, so
that the process notices the end of rank 0 even if it waits in a collective operation, and then ends at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from baton_api import logs
from baton_api.errors import BatonError
from baton_engine.batch import Batch
from baton_engine.captured_passes import CapturedPasses
from baton_engine.devices import free_bytes, taken_bytes
from baton_engine.kv.cache import KVCache
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import Decoder, Model, create_decoder
from baton_engine.model.draft_head import DraftHead
from baton_engine.model.group import Group
from baton_engine.model.head_loading import head_of, with_eagle3
from baton_engine.model.shards import Shard
from baton_engine.model.weights import WeightsSummary
from baton_engine.ops.choice import kept_formats
from baton_engine.parallel.messages import (
    Allocate,
    Allocated,
    AnyMessage,
    AnyReply,
    CapturePass,
    Channel,
    ClosePool,
    Connect,
    Connected,
    ConnectPeer,
    DisconnectPeer,
    Draft,
    DropPass,
    Forward,
    KeepStates,
    Loaded,
    Opened,
    OpenPool,
    Order,
    OrderFailed,
    OrderReply,
    Project,
    PullBlocks,
    RankError,
    ReadEnded,
    ReplayPass,
    ReserveDrafts,
    SelectStates,
    ServePeers,
    Start,
    SumBlocks,
    Summed,
    batch_rows,
)
from baton_engine.parallel.parallel_passes import captured
from baton_engine.streams import Event
from baton_engine.transfer import Pulled
from baton_engine.transfer.integrity import block_checksums
from baton_engine.transfer.pool_reader import PoolReader
from baton_engine.working_memory import DevicePeak, PeakMemory, working_memory

log = logging.getLogger(__name__)

Expected = TypeVar("Expected")


def main() -> int:
    """Run until rank 0 ends, or a message cannot be computed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal signals all processes, but rank 0 drains first
    channel = Channel(socket.socket(fileno=0))
    inbox: queue.SimpleQueue[AnyMessage] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, inbox), name="rank-inbox", daemon=True).start()
    try:
        with torch.inference_mode():
            _serve(channel, inbox)
    except Exception as error:  # rank 0 cannot continue without this rank, whatever the reason
        log.exception("This rank cannot continue.")
        reason = error.message if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            channel.send(RankError(reason=reason))
    return 1


def _listen(channel: Channel, inbox: queue.SimpleQueue[AnyMessage]) -> None:
    try:
        while True:
            inbox.put(channel.receive())
    except EOFError:
        status = 0
    except msgspec.DecodeError as error:
        status = 1
        with contextlib.suppress(OSError):
            channel.send(RankError(reason=f"rank 0 sent an invalid message: {error}"))
    os._exit(status)  # another thread may wait in a collective operation forever


def _serve(channel: Channel, inbox: queue.SimpleQueue[AnyMessage]) -> None:
    start = _expect(inbox, Start)
    logs.begin(logs.read_format(start.log_format), f"{start.worker}-rank-{start.rank}")
    torch.set_num_threads(start.threads)
    device = torch.device(start.device)
    at_start = free_bytes(device)
    group, model, replicas, size = _load(start, device)
    channel.send(Loaded(weights=size, at_start=at_start))
    connect = _expect(inbox, Connect)
    group.connect(Path(start.store), start.timeout_s)
    working = measured(model, connect, device, DevicePeak(device))
    channel.send(Connected(working=working, free=free_bytes(device)))
    request = _expect(inbox, Allocate)
    dtype = getattr(torch, request.dtype)
    cache = KVCache(
        model.spec, request.blocks, dtype, device, rank=start.rank, ranks=start.size, replicas=replicas
    )
    channel.send(Allocated())
    rank = rank_of(model, group, cache, start.context, partial(taken_bytes, device), channel.send)
    while True:
        rank.obey(inbox.get())


def measured(model: Model, message: Connect, device: torch.device, memory: PeakMemory) -> int:
    """Return the bytes that the largest pass needs on this rank's device. Raises SetupError."""
    if message.limits is None:
        return 0
    return working_memory(model, message.limits, getattr(torch, message.dtype), device, memory, samples=False)


def _load(start: Start, device: torch.device) -> tuple[Group, Decoder, int, int]:
    """Return the group, the model, the number of ranks with its key heads, and the bytes of its weights."""
    checkpoint, shard = Checkpoint(Path(start.checkpoint), start.name), Shard(start.rank, start.size)
    spec, dtype = load_spec(checkpoint).served_to(start.context), getattr(torch, start.dtype)
    eagle3 = Checkpoint(Path(start.eagle3), Path(start.eagle3).name) if start.eagle3 else None
    if start.drafts:
        spec = replace(spec, draft_head=head_of(spec, checkpoint, eagle3))
    quantize, formats = kept_formats(start.quantize, spec, device, dtype, ranks=start.size)
    weights = load_weights(
        checkpoint, spec, dtype, quantize=quantize, shard=shard, formats=formats, device=device, lazy=True
    )
    summary = WeightsSummary(with_eagle3(weights, eagle3, spec, dtype, device, shard))
    group = Group(shard, spec.vocab, device)
    model = create_decoder(shard.spec(spec), summary.weights, device, dtype, group)
    return group, model, shard.replicas(spec.kv_heads), summary.formats.total()


class Rank:
    """Carries out rank 0's messages, after the rank has loaded. One thread calls it."""

    def __init__(
        self,
        model: Decoder,
        group: Group,
        cache: KVCache,
        passes: Callable[[bool], CapturedPasses],
        send: Callable[[AnyMessage], None],
    ) -> None:
        """`model` and `cache` are the rank's part. `passes` creates those of the model, or of its head."""
        self._model = model
        self._group = group
        self._cache = cache
        self._create_passes = passes
        self._passes: dict[bool, CapturedPasses] = {}
        """Captured ones by whether they are of the head."""
        self._send = send
        self._orders = RankOrders(cache, send)

    def obey(self, message: AnyMessage) -> None:
        """Carry out one message. If it raises an error, the rank cannot continue."""
        model, cache = self._model, self._cache
        device = cache.kv.device
        match message:
            case ReplayPass():
                values, tables, states = message.arrays()
                passes = self._passes_of(message.of_head)
                passes.replay_values(message.captured, values, tables, state_blocks=states)
            case Forward():
                batch = Batch(batch_rows(message.rows), cache.block_size, device)
                if message.fed:
                    ids = torch.empty(batch.size, dtype=torch.int64, device=device)
                    batch.feed(self._group.broadcast(ids))
                if message.hidden:
                    model.hidden_states(batch, cache)
                else:
                    model.forward(batch, cache)
            case Project():
                size = message.states, model.spec.hidden
                model.project(self._group.broadcast(torch.empty(size, dtype=torch.float32, device=device)))
            case Order():
                self._orders.begin(message)
            case CapturePass():
                self._send(captured(self._passes_of(message.of_head), message.rows))
            case DropPass():
                self._passes_of(message.of_head).drop(message.rows)
            case Draft():
                batch = Batch(batch_rows(message.rows), cache.block_size, device)
                if message.continues:
                    batch.continue_states()
                _head(model).forward(batch, cache)
            case ReserveDrafts():
                _head(model).reserve(message.rows)
            case KeepStates():
                _head(model).keep(message.rows, message.blocks, cache)
            case SelectStates():
                _head(model).select(message.rows)
            case _:
                raise ValueError(f"unexpected message {type(message).__name__}")

    def _passes_of(self, of_head: bool) -> CapturedPasses:
        """Return the captured passes. Those of the head are created last, and do not count the model's."""
        if of_head not in self._passes:
            self._passes[of_head] = self._create_passes(of_head)
        return self._passes[of_head]


def _head(model: Decoder) -> DraftHead:
    assert model.drafts is not None, "the model has no draft head"
    return model.drafts


def rank_of(
    model: Decoder,
    group: Group,
    cache: KVCache,
    context: int,
    taken: Callable[[], int],
    send: Callable[[AnyMessage], None],
) -> Rank:
    """Return the rank. The captured passes of its model begin with the tokens of rank 0, as rank 0's do."""

    def passes(of_head: bool) -> CapturedPasses:
        if of_head:
            return CapturedPasses(_head(model), cache, context, taken)
        return CapturedPasses(model, cache, context, taken, share=group.broadcast)

    return Rank(model, group, cache, passes, send)


def _expect(inbox: queue.SimpleQueue[AnyMessage], kind: type[Expected]) -> Expected:
    message = inbox.get()
    if not isinstance(message, kind):
        raise ValueError(f"unexpected message {type(message).__name__}, expected {kind.__name__}")
    return message


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


if __name__ == "__main__":
    raise SystemExit(main())
