"""
The engine as asyncio sees it: `async for output in client.generate(request)`.

The engine's thread wakes the event loop once per step, not once per token; everything else happens on
the loop. A generation that is no longer iterated, because its task was cancelled or its iterator
closed, is aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from baton_engine.cache import KVCache
from baton_engine.engine import Engine
from baton_engine.limits import EngineLimits
from baton_engine.model.decoder import Model
from baton_engine.requests import Output, Request
from baton_engine.snapshot import EngineSnapshot


class AsyncEngine:
    """An `Engine` and the event loop on which its outputs arrive."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        limits: EngineLimits,
        *,
        on_fatal: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = Engine(model, cache, limits, on_outputs=self._arrived, on_fatal=on_fatal, clock=clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._generations: dict[str, Generation] = {}
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

    def generate(self, request: Request) -> Generation:
        """
        Submit a request, or raise as `Engine.submit` does. Iterate the result to its end or close it.

        >>> async with contextlib.aclosing(client.generate(request)) as outputs:  # doctest: +SKIP
        ...     async for output in outputs: ...
        """
        generation = Generation(self, request.id)
        self.engine.submit(request)
        self._generations[request.id] = generation
        self._idle.clear()
        return generation

    def finish(self, request_id: str) -> None:
        """The server saw a stop string; the last output comes with STOP."""
        self.engine.finish(request_id)

    def abort(self, request_id: str) -> None:
        """End a generation from outside; whoever iterates it gets an output with ABORT."""
        self.engine.abort(request_id)

    def snapshot(self) -> EngineSnapshot:
        return self.engine.snapshot()

    async def idle(self) -> None:
        """Wait until no generation is under way."""
        await self._idle.wait()

    def _arrived(self, outputs: list[Output]) -> None:
        """On the engine's thread."""
        assert self._loop is not None
        if not self._loop.is_closed():  # else nobody is left to tell
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            generation = self._generations.get(output.request_id)
            if generation is not None:
                generation._push(output)
                if output.finish is not None:
                    self._forget(output.request_id)

    def _forget(self, request_id: str) -> None:
        self._generations.pop(request_id, None)
        if not self._generations:
            self._idle.set()

    def _drop(self, request_id: str) -> None:
        """Nobody wants the rest of it."""
        if request_id in self._generations:
            self._forget(request_id)
            self.engine.abort(request_id)


class Generation(AsyncIterator[Output]):
    """The outputs of one request, in order; the one with `finish` is the last."""

    def __init__(self, client: AsyncEngine, request_id: str) -> None:
        self._client = client
        self._request_id = request_id
        self._outputs: deque[Output] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    async def __anext__(self) -> Output:
        while not self._outputs:
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                await self.aclose()
                raise
            finally:
                self._waiter = None
        output = self._outputs.popleft()
        self._ended = output.finish is not None
        return output

    async def aclose(self) -> None:
        """Abort the request if it has not ended; nothing more will come."""
        self._ended = True
        self._outputs.clear()
        self._client._drop(self._request_id)
        self._wake()

    def _push(self, output: Output) -> None:
        self._outputs.append(output)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
