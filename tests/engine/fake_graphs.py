"""
CUDA's graphs on a CPU: a capture records the calls of torch and of kernels, a replay repeats them in place.

As on a device, a replay reads the memory of the capture and the numbers of the capture. So a pass that takes
a value from the host, or whose input was replaced instead of overwritten, gives wrong results.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from baton_engine.batch import Batch, StaticBatch
from baton_engine.kv.cache import KVCache
from tests.engine.fake_model import FakeModel
from tests.engine.fake_streams import FakeCuda, FakeStream

READS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__")


class FakeGraph:
    """The calls of a captured graph, and how often they were replayed."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.replays = 0

    def run(self) -> None:
        with torch.inference_mode(), torch._C.DisableTorchFunction():
            for call in self.calls:
                call()


class FakeHandle:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, graph: FakeGraph, launch: Callable[[Callable[[], None]], None]) -> None:
        self.graph = graph
        self._launch = launch

    def pool(self) -> tuple[int, int]:
        return (1, 1)

    def replay(self) -> None:
        self.graph.replays += 1
        self._launch(self.graph.run)


class FakeGraphs(FakeCuda):
    """`FakeCuda` with graphs. Calls run at once, replays too unless they are `late`."""

    def __init__(self, *, late: bool = False) -> None:
        """`late`: a replay runs when something waits for it."""
        super().__init__()
        self.captured: list[FakeGraph] = []
        self.alive: WeakSet[FakeHandle] = WeakSet()
        """Graphs whose memory is not free."""
        self.warm: WeakSet[FakeStream] = WeakSet()
        """Streams on which something has run before a capture."""
        self.capturing: FakeGraph | None = None
        self.failure: BaseException | None = None
        """Raised by a capture."""
        self.fails_after = 0
        """Number of captures before the one that fails."""
        self.on_replay: Callable[[], None] = lambda: None
        """Called before a replay."""
        self._late = late

    def CUDAGraph(self) -> FakeHandle:
        self.captured.append(FakeGraph())
        handle = FakeHandle(self.captured[-1], self._launch)
        self.alive.add(handle)
        return handle

    def _launch(self, run: Callable[[], None]) -> None:
        self.on_replay()
        if self._late:
            self.default.queued.append(run)
        else:
            run()

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.warm.add(stream)
        with super().stream(stream):
            yield

    @contextlib.contextmanager
    def graph(
        self, handle: FakeHandle, pool: Any, stream: FakeStream, capture_error_mode: str
    ) -> Iterator[None]:
        graph, others = handle.graph, len(self.alive) - 1
        assert stream in self.warm, "a library would keep its workspace in the memory of the graph"
        if pool is not None and not others:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        assert pool == ((1, 1) if others else None), "graphs share their memory"
        if self.failure is not None and len(self.captured) > self.fails_after:
            raise type(self.failure)(*self.failure.args)  # a new one, because its traceback has the graph
        self.capturing = graph
        try:
            with _kernels(graph), _Refusing(), _Recording(graph):
                yield
        finally:
            self.capturing = None


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._graph.calls.append(lambda: _repeat(func, args, kwargs, result))
        return result


def _repeat(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Call `func` again, and write its results to the memory of the first ones. Views have it already."""
    for new, old in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(result), strict=True):
        if isinstance(old, Tensor) and new.data_ptr() != old.data_ptr():
            old.copy_(new)


class _Refusing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS or name == "tensor":
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {name}")
        return func(*args, **(kwargs or {}))


_kernel_lock = threading.Lock()
_captures: dict[int, FakeGraph] = {}
"""The graph under capture of each thread."""
_run: list[Any] = []
"""The interpreter's function, while a thread captures."""


@contextlib.contextmanager
def _kernels(graph: FakeGraph) -> Iterator[None]:
    """Record launches of Triton's interpreter by this thread, if it is installed."""
    try:
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:
        yield
        return
    with _kernel_lock:
        if not _captures:
            _run.append(InterpretedFunction.run)
            InterpretedFunction.run = _recorded(InterpretedFunction.run)
        _captures[threading.get_ident()] = graph
    try:
        yield
    finally:
        with _kernel_lock:
            del _captures[threading.get_ident()]
            if not _captures:
                InterpretedFunction.run = _run.pop()


def _recorded(run: Any) -> Callable[..., None]:
    without_modes = _disable_current_modes

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        def call() -> None:
            with without_modes():
                run(kernel, *args, **kwargs)

        call()
        if (graph := _captures.get(threading.get_ident())) is not None:
            graph.calls.append(call)

    return launch


class TensorModel(FakeModel):
    """A fake model whose decode passes are operations on tensors only, so that they can be captured."""

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        if not isinstance(batch, StaticBatch):
            return super().forward(batch, cache)
        memory = cache.kv.view(cache.blocks, 2, cache.block_size, 2)
        slots, positions = batch.slots.clamp(min=0), batch.positions
        block, offset = slots // cache.block_size, slots % cache.block_size
        held = (batch.slots >= 0)[:, None]
        entry = torch.stack((batch.tokens, positions), dim=1).float()
        memory[block, 0, offset] = torch.where(held, entry, memory[block, 0, offset])
        entries = memory[batch.block_table.long(), 0].flatten(1, 2).long()  # [R, context, 2]
        place = torch.arange(entries.shape[1])
        visible = place <= positions[:, None]
        wrong = ((entries[..., 1] != place) & visible).any(1)
        weights = torch.where(visible, self._weights[: len(place)], 0)
        states = ((entries[..., 0] + 1) * weights).sum(1) % len(self._table)
        if self.nan_on is not None:
            wrong = wrong | (batch.tokens == self.nan_on)
        return torch.where(wrong[:, None], torch.nan, self._table[states])
