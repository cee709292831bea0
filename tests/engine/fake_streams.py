"""
Streams and events of a GPU that runs nothing until something waits for it.

A real device may be as late as this one. So whatever does not wait for the right event finds memory as it was
before, every time.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from baton_engine.batch import Batch
from baton_engine.kv.cache import KVCache
from baton_engine.streams import DeviceStreams, Waiting
from tests.engine.fake_model import FakeModel


class FakeStream:
    """A queue of work."""

    def __init__(self) -> None:
        self.queued: list[Callable[[], None]] = []
        self.ended = 0
        self._lock = threading.Lock()

    def wait_stream(self, other: FakeStream) -> None:
        position = len(other.queued)
        self.queued.append(lambda: other.run_to(position))

    def synchronize(self) -> None:
        """It stays late all the same: whatever relies on the work waits for an event of its own."""

    def run_to(self, position: int) -> None:
        with self._lock:
            while self.ended < position:
                self.queued[self.ended]()
                self.ended += 1


class FakeEvent:
    """An event as CUDA defines it: one that was never recorded has always happened."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._stream = FakeStream()
        self._position = 0

    def record(self, stream: FakeStream) -> None:
        self._cuda.counts["record"] += 1
        self._cuda.users.add(threading.current_thread().name)
        self._stream, self._position = stream, len(stream.queued)

    def query(self) -> bool:
        return self._stream.ended >= self._position

    def synchronize(self) -> None:
        self._cuda.counts["synchronize"] += 1
        if self._cuda.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._stream.run_to(self._position)


class FakeCuda:
    """The functions of `torch.cuda` that `baton_engine.streams` uses."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.users: set[str] = set()
        """Threads with a context of the device."""
        self.broken = False
        """Whether the device has failed: every wait raises."""
        self.default = FakeStream()
        self._current = threading.local()

    def set_device(self, device: torch.device) -> None:
        if device.index is None:
            raise ValueError(f"Expected a torch.device with a specified index, but got {device}")
        # Like torch, this does nothing for the first device, which each thread has.

    def Event(self, blocking: bool) -> FakeEvent:
        return FakeEvent(self)

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream()

    def current_stream(self, device: torch.device) -> FakeStream:
        stream: FakeStream = getattr(self._current, "stream", self.default)
        return stream

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream(torch.device("cpu"))
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before


class LateModel(FakeModel):
    """A model on a fake device: the cache has a pass's keys only once the device ran its work."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        stream = self._cuda.current_stream(cache.kv.device)
        stream.run_to(len(stream.queued))  # the work of one stream runs in order
        real = cache.kv
        cache.kv = real.clone()
        try:
            logits = super().forward(batch, cache)
            block, offset = batch.slots // cache.block_size, batch.slots % cache.block_size
            written = cache.kv[block, ..., offset, :].clone()
        finally:
            cache.kv = real

        def write() -> None:
            real[block, ..., offset, :] = written

        stream.queued.append(write)
        return logits


def on_device(cache: KVCache, cuda: FakeCuda, waiting: Waiting = contextlib.nullcontext) -> KVCache:
    """Return `cache` with the queues of a fake device."""
    cache.streams = DeviceStreams(torch.device("cuda", 0), cuda, waiting)
    return cache
