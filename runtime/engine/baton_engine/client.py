"""
The engine as asyncio sees it: `async for output in client.generate(request)`.

The engine's thread wakes the event loop once per step, not once per token; everything else runs on the loop.
A generation is aborted when its task is cancelled, or its iterator is closed or dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from baton_api.hashing import block_hashes, root_hash
from baton_engine.engine import Engine
from baton_engine.kv.cache import KVCache
from baton_engine.kv.events import KvEvents, KvSnapshot
from baton_engine.metrics.counters import EngineSnapshot
from baton_engine.model.decoder import Model
from baton_engine.requests import Output, Request
from baton_engine.scheduling.limits import EngineLimits


class AsyncEngine:
    """An `Engine` and the event loop on which its outputs arrive."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        limits: EngineLimits,
        *,
        on_fatal: Callable[[str], None] | None = None,
        kv_events: KvEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = Engine(
            model,
            cache,
            limits,
            on_outputs=self._arrived,
            on_fatal=on_fatal,
            kv_events=kv_events,
            clock=clock,
        )
        self._block_size = cache.block_size
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, _Stream] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self) -> None:
        """Start the compute thread; outputs arrive on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.engine.start()

    async def close(self) -> None:
        """Stop the compute thread; generations that are left end with ABORT."""
        await asyncio.to_thread(self.engine.stop)
        await asyncio.sleep(0)  # what the thread reported last is delivered

    def hashes(self, prompt: Sequence[int], salt: str) -> Sequence[bytes]:
        """`Request.hashes` of a prompt. Takes a while for a long one: not for the event loop."""
        return tuple(block_hashes(prompt, self._block_size, root_hash(salt)))

    def generate(self, request: Request) -> Generation:
        """
        Submit a request, or raise as `Engine.submit` does. Iterate the result to its end or close it.

        >>> async with contextlib.aclosing(client.generate(request)) as outputs:  # doctest: +SKIP
        ...     async for output in outputs: ...
        """
        self.engine.submit(request)
        stream = self._streams[request.id] = _Stream()
        self._idle.clear()
        return Generation(self, request.id, stream)

    def finish(self, request_id: str) -> None:
        """The server saw a stop string; the last output comes with STOP."""
        self.engine.finish(request_id)

    def abort(self, request_id: str) -> None:
        """End a generation. Its iterator gets an output with ABORT."""
        self.engine.abort(request_id)

    def clear_cache(self) -> None:
        """Empty the prefix cache, except for blocks in use."""
        self.engine.clear_cache()

    def snapshot(self) -> EngineSnapshot:
        return self.engine.snapshot()

    async def kv_snapshot(self) -> KvSnapshot:
        """As `Engine.kv_snapshot`."""
        return await asyncio.wrap_future(self.engine.kv_snapshot())

    async def idle(self) -> None:
        """Wait until no generation is under way."""
        await self._idle.wait()

    def _arrived(self, outputs: list[Output]) -> None:
        """On the engine's thread."""
        assert self._loop is not None
        if not self._loop.is_closed():  # a closed loop delivers no outputs
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.outputs.append(output)
                stream.wake()
                if output.finish is not None:
                    self._forget(output.request_id)

    def _forget(self, request_id: str) -> None:
        del self._streams[request_id]
        if not self._streams:
            self._idle.set()

    def _drop(self, request_id: str, stream: _Stream) -> None:
        """Abort a generation that is no longer iterated."""
        if self._streams.get(request_id) is stream:  # and not a later one of the same name
            self._forget(request_id)
            self.engine.abort(request_id)


class _Stream:
    """What has arrived for one generation and was not yet read."""

    __slots__ = ("outputs", "waiter")

    def __init__(self) -> None:
        self.outputs: deque[Output] = deque()
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Generation(AsyncIterator[Output]):
    """The outputs of one request, in order; the one with `finish` is the last."""

    def __init__(self, client: AsyncEngine, request_id: str, stream: _Stream) -> None:
        self._client = client
        self._request_id = request_id
        self._stream = stream
        self._ended = False

    async def __anext__(self) -> Output:
        stream = self._stream
        while not stream.outputs:
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
        output = stream.outputs.popleft()
        self._ended = output.finish is not None
        return output

    async def aclose(self) -> None:
        """Abort the request if it has not ended; nothing more will come."""
        self._close()

    def __del__(self) -> None:
        self._close()  # the reader went away without a word

    def _close(self) -> None:
        if not self._ended:
            self._ended = True
            self._stream.outputs.clear()
            self._client._drop(self._request_id, self._stream)
            self._stream.wake()
