"""
Other ranks of a worker as threads, each with a fake device. Their operations run over gloo.

As with NCCL, a capture records the operations of the group without running them. Its replay waits for the
other ranks without a limit, also if one has ended, and ends without an error if it is aborted.
"""

from __future__ import annotations

import itertools
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from baton_api.errors import SetupError
from baton_engine.batch import Batch
from baton_engine.kv.cache import BLOCK_SIZE, KVCache
from baton_engine.model.group import Group
from baton_engine.model.shards import Shard
from baton_engine.parallel.messages import (
    Allocate,
    Allocated,
    Channel,
    Connect,
    Connected,
    Loaded,
    RankError,
    Start,
)
from baton_engine.parallel.rank import measured, rank_of
from baton_engine.parallel.ranks import ParallelModel, Ranks
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.spec import ModelSpec
from baton_engine.working_memory import working_memory
from tests.engine.fake_graphs import FakeGraphs, TensorModel
from tests.engine.fake_streams import FakeStream, on_device

CPU = torch.device("cpu")
FOREVER_S = 300.0
"""Timeout of gloo, which NCCL's operations in a graph do not have."""

MakePart = Callable[[Shard, Group], Any]
"""Returns the part of a model that a rank computes, a `PassModel` with `spec`."""


class RankKilled(BaseException):
    """Ends the thread of a rank, as a signal its process."""


class RankStream(FakeStream):
    """The engine waits for a pass that does not overlap with another one."""

    def synchronize(self) -> None:
        self.run_to(len(self.queued))


class RankDevice(FakeGraphs):
    """The device of one rank."""

    def __init__(self, *, late: bool = False, taken: Callable[[], int] = lambda: 2**30) -> None:
        super().__init__(late=late)
        self.default = RankStream()
        self.taken = taken
        """Returns the bytes that the rank has."""
        self.aborted = threading.Event()
        self.free: int | None = None
        self.most = 0
        """Bytes that the largest pass needs."""
        self.failing: Exception | None = None
        """Raised by an operation with other ranks."""
        self.on_connected: Callable[[], None] = lambda: None

    def start(self) -> None:
        """As `PeakMemory`."""

    def peak(self) -> int:
        return self.most


class DeviceGroup(Group):
    """A group whose operations run on a fake device."""

    def __init__(self, shard: Shard, vocab: int, cuda: RankDevice) -> None:
        super().__init__(shard, vocab, CPU)
        self.in_order = False
        self._cuda = cuda

    def connect(self, path: Path, timeout_s: float) -> None:
        super().connect(path, FOREVER_S)
        self.backend = DeviceBackend(self.backend, self._cuda)
        self._cuda.on_connected()

    def end(self) -> None:
        """As the end of the process: operations of others with it fail."""
        if self.backend is not None:
            self.backend.end()


class DeviceBackend:
    """`ProcessGroupNCCL`, over gloo."""

    def __init__(self, gloo: Any, cuda: RankDevice) -> None:
        self._gloo = gloo
        self._cuda = cuda

    def allreduce(self, tensors: list[Tensor]) -> Ended:
        return self._launch(tensors, lambda: self._gloo.allreduce(tensors))

    def gather(self, outputs: list[list[Tensor]], parts: list[Tensor]) -> Ended:
        return self._launch(outputs[0] if outputs else [], lambda: self._gloo.gather(outputs, parts))

    def broadcast(self, tensors: list[Tensor]) -> Ended:
        return self._launch(tensors, lambda: self._gloo.broadcast(tensors))

    def abort(self) -> None:
        self._cuda.aborted.set()

    def end(self) -> None:
        self._gloo = None

    def _launch(self, outputs: Sequence[Tensor], begin: Callable[[], Any]) -> Ended:
        if (graph := self._cuda.capturing) is None:
            self._run(begin)
        else:
            graph.calls.append(lambda: self._replay(begin))
            with _disable_current_modes():
                for output in outputs:
                    output.zero_()  # any values are as right
        return Ended()

    def _run(self, begin: Callable[[], Any]) -> None:
        aborted = self._cuda.aborted
        if self._cuda.failing is not None:
            raise self._cuda.failing
        if aborted.is_set():
            return
        work = begin()
        while not work.is_completed():
            if aborted.wait(0.0002):
                return
        if not aborted.is_set():
            work.wait()

    def _replay(self, begin: Callable[[], Any]) -> None:
        try:
            self._run(begin)
        except RuntimeError:  # a rank has ended, which a device does not notice
            self._cuda.aborted.wait(FOREVER_S)


class Ended:
    """The work of an operation. Its end is in the order of the device."""

    def wait(self) -> None:
        return


class RankThread:
    """Implementation of `RankProcess`: what `baton_engine.parallel.rank` does, with a part of the test."""

    pid = 0

    def __init__(
        self, end: socket.socket, make_part: MakePart, vocab: int, cuda: RankDevice, block_size: int
    ) -> None:
        self._channel_end = end.dup()
        self._make_part = make_part
        self._vocab = vocab
        self._cuda = cuda
        self._block_size = block_size
        self._thread = threading.Thread(target=self._run, name="rank-thread", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        self._cuda.aborted.set()
        try:
            self._channel_end.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended
            return

    def wait(self) -> int:
        self._thread.join()
        return -signal.SIGKILL

    def _run(self) -> None:
        channel = Channel(self._channel_end)
        try:
            with torch.inference_mode():
                self._serve(channel)
        except (EOFError, RankKilled, BrokenPipeError):  # rank 0 has ended
            pass
        except SetupError as error:
            channel.send(RankError(reason=error.message))
        except RuntimeError:  # of gloo, which has lost rank 0
            if not self._cuda.aborted.is_set():
                raise
        finally:
            channel.close()

    def _serve(self, channel: Channel) -> None:
        start = channel.receive()
        assert isinstance(start, Start)
        group = DeviceGroup(Shard(start.rank, start.size), self._vocab, self._cuda)
        try:
            self._obey(channel, start, group)
        finally:
            group.end()

    def _obey(self, channel: Channel, start: Start, group: DeviceGroup) -> None:
        cuda, part = self._cuda, self._make_part(group.shard, group)
        channel.send(Loaded(weights=0, at_start=None))
        connect = channel.receive()
        assert isinstance(connect, Connect)
        group.connect(Path(start.store), start.timeout_s)
        channel.send(Connected(working=measured(part, connect, CPU, cuda), free=cuda.free))
        allocate = channel.receive()
        assert isinstance(allocate, Allocate)
        size, ranks = self._block_size, start.size
        cache = KVCache(part.spec, allocate.blocks, torch.float32, CPU, size, start.rank, ranks)
        channel.send(Allocated())
        on_device(cache, cuda)
        rank = rank_of(part, group, cache, start.context, cuda.taken, channel.send)
        while True:
            rank.obey(channel.receive())


def rank_threads(
    devices: Sequence[RankDevice],
    make_part: MakePart,
    spec: ModelSpec,
    cache: KVCache | None,
    *,
    context: int,
    timeout_s: float = FOREVER_S,
    limits: EngineLimits | None = None,
) -> ParallelModel:
    """
    Start the ranks of `devices` but the first one, which is that of `cache`. The caller closes `ranks`.

    `cache`: None if the caller opens it.
    """
    size, own = len(devices), devices[0]
    block_size = BLOCK_SIZE if cache is None else cache.block_size
    others = itertools.count(1)
    start = Start(
        rank=1,
        size=size,
        worker="worker",
        checkpoint="",
        name="",
        context=context,
        dtype="float32",
        quantize="off",
        device="cpu",
        threads=1,
        drafts=False,
        eagle3="",
        store="",
        timeout_s=timeout_s,
        log_format="",
    )

    def spawn(end: socket.socket) -> RankThread:
        return RankThread(end, make_part, spec.vocab, devices[next(others)], block_size)

    ranks = Ranks(start, ["cpu"] * size, spawn)
    group = DeviceGroup(Shard(0, size), spec.vocab, own)
    try:
        model = ParallelModel(spec, make_part(Shard(0, size), group), group, ranks, ranks.load())

        def measure() -> int:
            return working_memory(model.part, limits, torch.float32, CPU, own) if limits is not None else 0

        model.connect(limits, torch.float32, measure)
        if cache is not None:
            ranks.allocate(cache.blocks, cache.kv.dtype)
            on_device(cache, own, ranks.waiting)
    except BaseException:
        for device in devices:
            device.aborted.set()
        group.end()
        ranks.close()
        raise
    return model


class PartModel(TensorModel):
    """Each rank computes all logits, and adds an equal part of them."""

    def __init__(self, shard: Shard, group: Group) -> None:
        super().__init__()
        self._shard = shard
        self._group = group

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        logits = super().forward(batch, cache)
        return self._group.sum(logits / self._shard.size) if len(logits) else logits
