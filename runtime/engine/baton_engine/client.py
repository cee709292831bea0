"""
Clients of the engine for asyncio: `async for output in client.generate(request)`.

The engine's thread wakes the event loop once per step, not once per token; everything else runs on the loop.
A reader with `together`, such as that of a batch line, is woken once in `TOGETHER` tokens.
A request is aborted when its task is cancelled, or its iterator is closed or garbage-collected.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import msgspec

from baton_api.hashing import block_hashes
from baton_engine.captured_passes import PassModel
from baton_engine.engine import Engine
from baton_engine.kv.cache import KVCache
from baton_engine.kv.events import KvEvents, KvSnapshot
from baton_engine.metrics.counters import EngineSnapshot
from baton_engine.model.decoder import Model
from baton_engine.requests import FinishReason, Output, Request
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.speculation.head_drafts import StateKeeper
from baton_engine.tiers.tier import EngineTier

TOGETHER = 16
"""Tokens after which a reader with `together` is woken."""

FAILED = (FinishReason.ABORT, FinishReason.ERROR)


class EngineClient(ABC):
    """The requests of one event loop to an engine, and their outputs."""

    joins = False
    """Whether outputs that have come meanwhile are read as one. Beside the computing thread, one by one was
    measured to be faster."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._streams: dict[str, OutputSink] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def hashes(self, prompt: Sequence[int], root: bytes) -> Sequence[bytes]:
        """Return `Request.hashes` of a prompt under `Request.root`. Not for the event loop: 131k tokens take
        18 ms.
        """
        return tuple(block_hashes(prompt, self._block_size, root))

    def generate(self, request: Request, *, together: bool = False) -> Generation:
        """
        Submit a request and return the iterator of its outputs. Iterate it to its end, or close it.

        With `together`, outputs after the first one arrive later and joined.

        The errors of `Engine.submit` are raised here, or by `Generation.accepted` and the iterator.

        >>> async with contextlib.aclosing(client.generate(request)) as outputs:  # doctest: +SKIP
        ...     async for output in outputs: ...
        """
        accepted = self._submit(request)
        stream = Stream(joins=self.joins or together, together=together)
        self._add(request.id, stream)
        return Generation(self, request.id, stream, accepted)

    @abstractmethod
    def finish(self, request_id: str) -> None:
        """End a request at a stop string; its last output has STOP."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Abort a request; its last output has ABORT."""

    async def idle(self) -> None:
        """Wait until no request is running or queued."""
        await self._idle.wait()

    @abstractmethod
    def _submit(self, request: Request) -> asyncio.Future[None] | None:
        """Submit a request. Returns the future of its acceptance; None: it is accepted."""

    def _add(self, request_id: str, stream: OutputSink) -> None:
        self._streams[request_id] = stream
        self._idle.clear()

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.append(output)
                if output.finish is not None:
                    self._forget(output.request_id)

    def _forget(self, request_id: str) -> None:
        del self._streams[request_id]
        if not self._streams:
            self._idle.set()

    def drop(self, request_id: str, stream: OutputSink) -> None:
        """Abort a request whose outputs are no longer read."""
        if self._streams.get(request_id) is stream:  # not a later request with the same id
            self._forget(request_id)
            self.abort(request_id)


class AsyncEngine(EngineClient):
    """Wraps an `Engine` and delivers its outputs on an event loop."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        limits: EngineLimits,
        *,
        on_fatal: Callable[[str], None] | None = None,
        kv_events: KvEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
        draft: tuple[Model, KVCache] | None = None,
        head: tuple[StateKeeper, PassModel] | None = None,
        tiers: Sequence[EngineTier] = (),
    ) -> None:
        super().__init__(cache.block_size)
        self.engine = Engine(
            model,
            cache,
            limits,
            on_outputs=self._receive,
            on_fatal=on_fatal,
            kv_events=kv_events,
            clock=clock,
            draft=draft,
            head=head,
            tiers=tiers,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self.delivered: set[Callable[[], None]] = set()
        """Called once all outputs of a step are delivered."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._block_size

    def start(self) -> None:
        """Start the compute thread; outputs are delivered on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.engine.start()

    async def close(self) -> None:
        """Stop the compute thread; unfinished requests end with ABORT."""
        await asyncio.to_thread(self.engine.stop)
        await asyncio.sleep(0)  # deliver the thread's last outputs

    def submit_for(self, request: Request, sink: OutputSink) -> None:
        """Submit a request whose outputs `sink` receives. Raises the errors of `Engine.submit`."""
        self._submit(request)
        self._add(request.id, sink)

    def finish(self, request_id: str) -> None:
        self.engine.finish(request_id)

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    def clear_cache(self) -> None:
        """Empty the prefix cache and its tiers, except for blocks in use."""
        self.engine.clear_cache()

    def snapshot(self) -> EngineSnapshot:
        return self.engine.snapshot()

    async def kv_snapshot(self) -> KvSnapshot:
        """See `Engine.kv_snapshot`."""
        return await asyncio.wrap_future(self.engine.kv_snapshot())

    def _submit(self, request: Request) -> None:
        self.engine.submit(request)

    def _deliver(self, outputs: list[Output]) -> None:
        super()._deliver(outputs)
        for call in tuple(self.delivered):
            call()

    def _receive(self, outputs: list[Output]) -> None:
        """Pass outputs to the event loop. Called on the engine's thread."""
        assert self._loop is not None
        if not self._loop.is_closed():  # a closed loop delivers no outputs
            self._loop.call_soon_threadsafe(self._deliver, outputs)


class OutputSink(Protocol):
    """What receives the outputs of one request, on the event loop."""

    def append(self, output: Output) -> None:
        """The next output; the one with `finish` is the last."""
        ...


class Stream:
    """The unread outputs of one request."""

    __slots__ = ("begun", "joins", "outputs", "together", "waiter")

    def __init__(self, *, joins: bool, together: bool) -> None:
        """
        `joins`: the outputs after the first one that are here are read as one. `together`: the reader waits
        for several.
        """
        self.outputs: deque[Output] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self.joins = joins
        self.together = together
        self.begun = False

    @property
    def ready(self) -> bool:
        """Whether the reader takes an output now."""
        if not self.together or not self.begun:
            return bool(self.outputs)
        return len(self.outputs) >= TOGETHER or (bool(self.outputs) and self.outputs[-1].finish is not None)

    def append(self, output: Output) -> None:
        self.outputs.append(output)
        if self.waiter is not None and self.ready:
            self.wake()

    def take(self) -> Output:
        """Return the next output. Only the first one has fields about the prompt, so others are joined."""
        output = self.outputs.popleft()
        if self.joins and self.begun and self.outputs:
            tokens = list(output.tokens)
            while self.outputs and self.outputs[0].finish not in FAILED:  # tokens before an error are read
                output = self.outputs.popleft()
                tokens += output.tokens
            output = msgspec.structs.replace(output, tokens=tuple(tokens))
        self.begun = True
        return output

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Generation(AsyncIterator[Output]):
    """Iterator of one request's outputs, in order; the output with `finish` is the last."""

    def __init__(
        self, client: EngineClient, request_id: str, stream: Stream, accepted: asyncio.Future[None] | None
    ) -> None:
        self._accepted = accepted
        self._client = client
        self._request_id = request_id
        self._stream = stream
        self._ended = False

    async def __anext__(self) -> Output:
        stream = self._stream
        while not stream.ready:
            if self._ended:
                raise StopAsyncIteration
            stream.waiter = asyncio.get_running_loop().create_future()
            try:
                await stream.waiter
            except asyncio.CancelledError:
                self._close()
                raise
            finally:
                stream.waiter = None
        output = stream.take()
        self._ended = output.finish is not None
        return output

    async def accepted(self) -> None:
        """Return when the engine has accepted the request. Raises the errors of `Engine.submit`."""
        if self._accepted is not None:
            await asyncio.shield(self._accepted)

    async def aclose(self) -> None:
        """Abort the request if it has not ended, and end the iteration."""
        self._close()

    def __del__(self) -> None:
        self._close()  # the reader dropped the iterator without closing it

    def _close(self) -> None:
        if not self._ended:
            self._ended = True
            self._stream.outputs.clear()
            self._client.drop(self._request_id, self._stream)
            self._stream.wake()
