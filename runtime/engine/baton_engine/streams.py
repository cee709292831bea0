"""
The order of an accelerator's work and of the host's threads. No other module uses streams, events and graphs.

A launch returns before its kernel runs, and a network card does not know the device's queue. So blocks are
announced to readers, and overwritten by a transfer, only after an event behind all kernels that use them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Event(Protocol):
    """A point in the queue of a device."""

    def done(self) -> bool:
        """Return whether all work before it has ended. Does not block."""
        ...

    def wait(self) -> None:
        """Block the thread until all work before it has ended. Raises the device's error."""
        ...


class Streams(Protocol):
    """The queues of one device. Any thread may use them."""

    def use(self) -> None:
        """Make the device the current one of the calling thread, for libraries that allocate or copy."""
        ...

    def record(self) -> Event:
        """Return an event behind all work that the calling thread has queued on its current stream."""
        ...

    def finish(self) -> None:
        """Block the thread until all work on its current stream has ended. Raises the device's error."""
        ...

    def side_stream(self) -> AbstractContextManager[object]:
        """
        Return a context whose work has a queue of its own, so that it need not wait for passes of the model.

        The queue does not order it behind other work: wait for an event first.
        """
        ...


class HostEvent:
    """The event of a device without a queue."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class HostStreams:
    """A CPU, whose operations have ended when they return."""

    def use(self) -> None:
        return

    def record(self) -> Event:
        return HostEvent()

    def finish(self) -> None:
        return

    def side_stream(self) -> AbstractContextManager[object]:
        return nullcontext()


Waiting = Callable[[], AbstractContextManager[object]]
"""Returns a context in which a thread waits for a device. It may limit the wait, and raise at its end."""


class DeviceEvent:
    """An event of CUDA or ROCm."""

    def __init__(self, event: Any, waiting: Waiting = nullcontext) -> None:
        self._event = event
        self._waiting = waiting

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        with self._waiting():
            self._event.synchronize()


class DeviceStreams:
    """A GPU. torch has CUDA and ROCm under the same names."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, waiting: Waiting = nullcontext) -> None:
        self._device = device
        self._cuda = cuda
        self._waiting = waiting
        self._users = threading.local()
        """Whether the thread has a context of the device."""
        self._side_stream: Any = None
        self._capturing: Any = None
        """The stream of captures."""
        self._graphs: WeakSet[Any] = WeakSet()
        """Captured graphs, which share their memory. torch refuses the memory of graphs that were freed."""

    def use(self) -> None:
        self._cuda.set_device(self._device)
        if not getattr(self._users, "have_context", False):
            # torch does nothing for the first device, and libraries beside it find no context in the driver.
            self.record()
            self._users.have_context = True

    def record(self) -> Event:
        event = self._cuda.Event(blocking=True)  # the waiting thread sleeps, and leaves its core to others
        event.record(self._cuda.current_stream(self._device))
        return DeviceEvent(event, self._waiting)

    def finish(self) -> None:
        with self._waiting():
            self._cuda.current_stream(self._device).synchronize()

    def side_stream(self) -> AbstractContextManager[object]:
        if self._side_stream is None:
            self._side_stream = self._cuda.Stream(self._device)
        context: AbstractContextManager[object] = self._cuda.stream(self._side_stream)
        return context

    def capture(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """
        Record the launches of `run` as a graph. Returns a function that repeats them, and the result.

        `run` is called twice, and recorded at the second time.
        The graph uses the same memory in each replay. Its result lasts until the next replay of any graph.
        Launches of other threads are not recorded. Raises RuntimeError if `run` reads results on the host.
        """
        if self._capturing is None:
            self._capturing = self._cuda.Stream(self._device)
        stream = self._capturing
        stream.wait_stream(self._cuda.current_stream(self._device))
        # The first run compiles kernels and connects ranks: NCCL connects at the first operation of each
        # kind, which cannot be captured. It has the stream of the capture, because cuBLAS keeps a workspace
        # for each stream, which would outlive the graph in the graph's memory.
        with self._cuda.stream(stream):
            run()
        graph, pool = self._cuda.CUDAGraph(), next((graph.pool() for graph in self._graphs), None)
        with self._cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = run()
        self._graphs.add(graph)
        return graph.replay, result


def streams_of(device: torch.device, waiting: Waiting = nullcontext) -> Streams:
    """Return the queues of `device`."""
    return HostStreams() if device.type == "cpu" else DeviceStreams(device, waiting=waiting)


def staged(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return `values` on the host, in page-locked memory if `device` is a GPU: copies then do not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if device.type == "cpu" else tensor.pin_memory()


def copied(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return `values` on `device`, without waiting for its queue. On a CPU they share their memory."""
    return staged(values, device).to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """Return a copy on the host without waiting for the device: it is complete after an event behind it."""
    if values.device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def finish(device: torch.device) -> None:
    """Wait for the current queue of `device`, but for no other one. Raises the device's error."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
