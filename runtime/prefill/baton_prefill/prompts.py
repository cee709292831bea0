"""
One prompt that is computed for a decode worker: carries out what its `Room` decides.

The room is only touched on the event loop. The engine tells of its progress on its own thread, which
hops over; checksums are computed on a third, since they read every byte of the blocks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from baton_api import logs, trace_context
from baton_api.errors import BatonError, InvalidRequest
from baton_api.otlp import Attributes
from baton_api.sampling import Constraint, SamplingParams, Thinking
from baton_engine.kv.cache import KVCache
from baton_engine.metrics.tracing import WorkerTrace, WorkerTracing
from baton_engine.requests import FinishReason, GrammarMatcher, Output, Request
from baton_engine.transfer.control import Connection
from baton_engine.transfer.integrity import block_checksums
from baton_prefill.sessions import Action, Checksum, Release, Room, Send, State, Submit

log = logging.getLogger(__name__)

NAME_LENGTH = 200
"""Characters of a peer's names that the log repeats."""

MatchersOf = Callable[[Constraint | None, Thinking | None], Awaitable[Callable[[], GrammarMatcher]]]


class Client(Protocol):
    """What of `baton_engine.client.AsyncEngine` is used here."""

    def generate(self, request: Request) -> AsyncIterator[Output]: ...


class PromptEngine(Protocol):
    """What of `baton_engine.engine.Engine` is used here."""

    def abort(self, request_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Computer:
    """What all prompts of one worker share."""

    client: Client
    engine: PromptEngine
    cache: KVCache
    checksums: Executor
    """One thread: answers come in the order of the questions."""
    matchers: MatchersOf
    """Makes what keeps a prompt's first token to its constraint; may take a while."""
    tracing: WorkerTracing | None = None
    """Makes this worker's spans, if any are wanted."""


class Prompt:
    """A room, its request to the engine, and its deadline."""

    def __init__(
        self,
        room: Room,
        request_id: str,
        hashes: Sequence[bytes],
        computer: Computer,
        connection: Connection,
        on_released: Callable[[Prompt], None],
    ) -> None:
        """`hashes` are `Request.hashes` of its prompt."""
        self.room = room
        self._hashes = hashes
        self.request_id = request_id
        self._computer = computer
        self._connection = connection
        self._on_released = on_released
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked_at = time.monotonic()
        self._started_at: float | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._spans = self._traced(room.ask.trace)
        self._of = logs.of((room.ask.request_id or request_id)[:NAME_LENGTH])

    def _traced(self, trace: str) -> WorkerTrace | None:
        if self._computer.tracing is None or not trace:
            return None
        parent = trace_context.read([(trace_context.TRACEPARENT, trace.encode())])
        return self._computer.tracing.begin("prefill worker", parent, self._asked_at)

    def begin(self, deadline_s: float) -> None:
        self._deadline = self._loop.call_later(deadline_s, lambda: self.do(self.room.deadline()))
        self.do(self.room.begin())

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Submit():
                    self._spawn(self._compute())
                case Checksum():
                    self._spawn(self._checksum(action))
                case Send(message):
                    self._connection.send(message)
                case Release():
                    self._end_spans()
                    if self._deadline is not None:
                        self._deadline.cancel()
                    self._computer.engine.abort(self.request_id)
                    self._on_released(self)

    def _end_spans(self) -> None:
        """The prompt's blocks are not needed any more."""
        if self._spans is None:
            return
        ask = self.room.ask
        told: Attributes = {
            "baton.request_id": ask.request_id[:NAME_LENGTH],
            "baton.tokens.prompt": len(ask.tokens),
        }
        self._spans.end(told)
        self._spans = None

    def computed(self, request_id: str, tokens: int, blocks: Sequence[int]) -> None:
        """`Export`: called on the engine's thread, whose list may grow later."""
        self._loop.call_soon_threadsafe(self._progress, tokens, tuple(blocks), time.monotonic())

    def _progress(self, tokens: int, blocks: tuple[int, ...], now: float) -> None:
        if self._started_at is None:
            self._started_at = now
        self.do(self.room.computed(tokens, blocks))

    async def _compute(self) -> None:
        ask = self.room.ask
        sampling = ask.sampling
        try:
            matcher = await self._matcher(sampling)
            if self.room.state is State.RELEASED:  # given up before this task had its turn, or meanwhile
                return
            request = Request(
                id=self.request_id,
                prompt=tuple(ask.tokens),
                sampling=sampling,
                salt=ask.salt,
                hashes=self._hashes,
                matcher=matcher,
                client_id=ask.request_id,
                step_summary=None if self._spans is None else self._spans.step_summary(),
                export=self,
            )
            async for output in self._computer.client.generate(request):
                if output.finish is not None:
                    self._ended(output)
        except BatonError as error:  # a constraint that cannot be met, or refused by the engine
            self.do(self.room.failed(error.message, retry=not isinstance(error, InvalidRequest)))

    async def _matcher(self, sampling: SamplingParams) -> GrammarMatcher | None:
        if sampling.constraint is None and sampling.thinking is None:
            return None
        matchers = await self._computer.matchers(sampling.constraint, sampling.thinking)
        return matchers()

    def _ended(self, output: Output) -> None:
        if output.finish in (FinishReason.STOP, FinishReason.LENGTH):
            now = time.monotonic()
            started = self._started_at or now
            first = output.tokens[0]
            queue_s, compute_s = started - self._asked_at, now - started
            self.do(self.room.finished(first, output.cached_tokens, queue_s, compute_s))
            log.info(
                "prompt %s is computed: tokens=%d cached=%d queue=%.3fs compute=%.3fs",
                self.request_id[:NAME_LENGTH],
                len(self.room.ask.tokens),
                output.cached_tokens,
                queue_s,
                compute_s,
                extra=self._of,
            )
        else:
            reason = str(output.error or "the prefill worker's engine dropped the prompt")
            self.do(self.room.failed(reason, retry=not isinstance(output.error, InvalidRequest)))

    async def _checksum(self, ask: Checksum) -> None:
        cache = self._computer.cache
        checksums = await self._loop.run_in_executor(
            self._computer.checksums, block_checksums, cache, ask.blocks
        )
        self.do(self.room.checksummed(ask.first_block, ask.blocks, checksums))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("prompt %s broke", self.request_id[:NAME_LENGTH], exc_info=error, extra=self._of)
            self.do(self.room.failed("internal error of the prefill worker", retry=True))
