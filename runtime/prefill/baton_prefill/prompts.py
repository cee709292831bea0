"""
One prompt computed for a decode worker: runs the actions of its `PrefillSession`.

The session is used on the event loop only. The engine reports progress on its own thread. Other threads wait
for a device to write blocks, and compute checksums, since these read every byte of the blocks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Protocol

from baton_api import logs, trace_context
from baton_api.errors import BatonError, InvalidRequest
from baton_api.otlp import Attributes
from baton_api.sampling import Constraint, SamplingParams, Thinking
from baton_engine.adapters import AdapterRegistry
from baton_engine.requests import FinishReason, GrammarMatcher, LoadedAdapter, Output, Request
from baton_engine.streams import Event, HostEvent
from baton_engine.tiers.peers import PeerCaches, PeerPrefix
from baton_engine.tracing import WorkerTrace, WorkerTracing
from baton_engine.transfer import Transfer
from baton_engine.transfer.control import ControlConnection
from baton_engine.transfer.server import LendingEngine
from baton_prefill.sessions import (
    Action,
    AwaitBlocks,
    ComputeChecksums,
    PrefillSession,
    PrefillState,
    ReleaseBlocks,
    SendToDecode,
    SubmitPrompt,
)

log = logging.getLogger(__name__)

NAME_LENGTH = 200
"""Maximum characters of a peer's names in the log."""

MatchersOf = Callable[[Constraint | None, Thinking | None, str], Awaitable[Callable[[], GrammarMatcher]]]


class PromptClient(Protocol):
    """The part of `baton_engine.client.AsyncEngine` that prompts use."""

    def generate(self, request: Request) -> AsyncIterator[Output]: ...


class PromptEngine(LendingEngine, Protocol):
    """The part of `baton_engine.engine.Engine` that prompts use."""

    def abort(self, request_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class ComputeContext:
    """Shared by all prompts of one worker."""

    client: PromptClient
    engine: PromptEngine
    transfer: Transfer
    checksums: Executor
    matchers: MatchersOf
    """`Grammars.prepare`: creates the matcher of a prompt's first token."""
    tracing: WorkerTracing | None = None
    """Creates this worker's spans, if tracing is on."""
    adapters: AdapterRegistry = field(default_factory=AdapterRegistry)
    """Its LoRA adapters."""
    peers: PeerCaches | None = None
    """Caches from which parts of prompts may be read; None: all of them are computed."""


class PromptTask:
    """A session, its request to the engine, and its deadline."""

    def __init__(
        self,
        session: PrefillSession,
        request_id: str,
        hashes: Sequence[bytes],
        sums: bool,
        context: ComputeContext,
        connection: ControlConnection,
        on_released: Callable[[PromptTask], None],
    ) -> None:
        """`hashes` are `Request.hashes` of the prompt. `sums` is the kind of checksums (`by_sums`)."""
        self.session = session
        self._hashes = hashes
        self._sums = sums
        self.request_id = request_id
        self._context = context
        self._connection = connection
        self._on_released = on_released
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrived_at = time.monotonic()
        self._started_at: float | None = None
        self._written: Event = HostEvent()
        self._deadline: asyncio.TimerHandle | None = None
        self._spans = self._traced(session.prefill.trace)
        self._of = logs.of((session.prefill.request_id or request_id)[:NAME_LENGTH])

    @property
    def epoch(self) -> int:
        return self.session.prefill.epoch

    def done(self) -> None:
        """The decode worker has read the blocks."""
        self.do(self.session.done())

    def abort(self) -> None:
        """The decode worker cancels the prompt."""
        self.do(self.session.abort())

    def lost(self) -> None:
        """The connection has ended."""
        self.do(self.session.lost())

    def _traced(self, trace: str) -> WorkerTrace | None:
        if self._context.tracing is None or not trace:
            return None
        parent = trace_context.read([(trace_context.TRACEPARENT, trace.encode())])
        return self._context.tracing.begin("prefill worker", parent, self._arrived_at)

    def begin(self, deadline_s: float) -> None:
        self._deadline = self._loop.call_later(deadline_s, lambda: self.do(self.session.deadline()))
        self.do(self.session.begin())

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SubmitPrompt():
                    self._spawn(self._compute())
                case AwaitBlocks():
                    self._announce(action)
                case ComputeChecksums():
                    self._spawn(self._checksum(action))
                case SendToDecode(message):
                    self._connection.send(message)
                case ReleaseBlocks():
                    self._end_spans()
                    if self._deadline is not None:
                        self._deadline.cancel()
                    self._context.engine.abort(self.request_id)
                    self._on_released(self)

    def _end_spans(self) -> None:
        """End the span: the blocks are released."""
        if self._spans is None:
            return
        prefill = self.session.prefill
        attributes: Attributes = {
            "baton.request_id": prefill.request_id[:NAME_LENGTH],
            "baton.tokens.prompt": len(prefill.tokens),
        }
        self._spans.end(attributes)
        self._spans = None

    def computed(self, request_id: str, tokens: int, blocks: Sequence[int], written: Event) -> None:
        """`Export`: called on the engine's thread; its list may grow later."""
        self._loop.call_soon_threadsafe(self._progress, tokens, tuple(blocks), written, time.monotonic())

    def _progress(self, tokens: int, blocks: tuple[int, ...], written: Event, now: float) -> None:
        if self._started_at is None:
            self._started_at = now
        self._written = written  # later events include earlier ones
        self.do(self.session.computed(tokens, blocks))

    async def _compute(self) -> None:
        prefill = self.session.prefill
        sampling = prefill.sampling
        try:
            adapter = self._adapter()  # held from now on, even if it is unloaded meanwhile
            matcher = await self._matcher(sampling)
            if self.session.state is PrefillState.RELEASED:  # released before this task ran, or meanwhile
                return
            request = Request(
                id=self.request_id,
                prompt=tuple(prefill.tokens),
                sampling=sampling,
                salt=prefill.salt,
                adapter=adapter,
                hashes=self._hashes,
                matcher=matcher,
                client_id=prefill.request_id,
                step_summary=None if self._spans is None else self._spans.step_summary(),
                tenant=prefill.tenant or prefill.request_id,
                cached_prefix=self._cached_prefix(),
                export=self,
            )
            async for output in self._context.client.generate(request):
                if output.finish is not None:
                    self._ended(output)
        except BatonError as error:  # an invalid constraint, or refused by the engine
            self.do(self.session.failed(error.message, retry=not isinstance(error, InvalidRequest)))

    def _cached_prefix(self) -> PeerPrefix | None:
        """Return the blocks that the decode worker has, if they may be read."""
        prefill, peers = self.session.prefill, self._context.peers
        if peers is None or not prefill.source or not prefill.start_block:
            return None
        return peers.prefix(prefill.source, self._hashes[: prefill.start_block], prefill.request_id)

    def _adapter(self) -> LoadedAdapter | None:
        """Return the prompt's adapter. Raises InvalidRequest if no adapter has the same digest."""
        prefill = self.session.prefill
        if not prefill.adapter_digest:
            return None
        adapter = self._context.adapters.of_digest(prefill.adapter_digest)
        if adapter is None:
            raise InvalidRequest(
                f"the adapter {prefill.adapter[:NAME_LENGTH]!r} with digest {prefill.adapter_digest[:32]} is "
                "not loaded on the prefill worker"
            )
        return adapter

    async def _matcher(self, sampling: SamplingParams) -> GrammarMatcher | None:
        if sampling.constraint is None and sampling.thinking is None:
            return None
        matchers = await self._context.matchers(
            sampling.constraint, sampling.thinking, self.session.prefill.tenant
        )
        return matchers()

    def _ended(self, output: Output) -> None:
        if output.finish in (FinishReason.STOP, FinishReason.LENGTH):
            now = time.monotonic()
            started = self._started_at or now
            first = output.tokens[0]
            restored_s = 0.0 if output.timing is None else output.timing.compute_s  # a tier's time is in it
            compute_s = max(now - started, restored_s)
            queue_s = max(0.0, now - self._arrived_at - compute_s)
            cached, peer, tiers = output.cached_tokens, output.peer_tokens, output.tier_tokens
            self.do(self.session.finished(first, cached, peer, queue_s, compute_s, tiers))
            log.info(
                "prompt %s is computed: tokens=%d cached=%d peer=%d queue=%.3fs compute=%.3fs",
                self.request_id[:NAME_LENGTH],
                len(self.session.prefill.tokens),
                output.cached_tokens,
                output.peer_tokens,
                queue_s,
                compute_s,
                extra=self._of,
            )
        else:
            reason = str(output.error or "the prefill worker's engine aborted the prompt")
            self.do(self.session.failed(reason, retry=not isinstance(output.error, InvalidRequest)))

    def _announce(self, written: AwaitBlocks) -> None:
        """Announce blocks at once if the device has written them, as it has on a CPU."""
        if self._written.done():
            self.do(self.session.written(written.first_block, written.blocks))
        else:
            self._spawn(self._announce_after(self._written, written))

    async def _announce_after(self, event: Event, written: AwaitBlocks) -> None:
        await self._loop.run_in_executor(None, event.wait)
        self.do(self.session.written(written.first_block, written.blocks))

    async def _checksum(self, action: ComputeChecksums) -> None:
        transfer, sums = self._context.transfer, self._sums
        computing = self._loop.run_in_executor(
            self._context.checksums, transfer.checksums, action.blocks, sums
        )
        self.do(self.session.checksummed(action.first_block, await computing))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("prompt %s failed", self.request_id[:NAME_LENGTH], exc_info=error, extra=self._of)
            self.do(self.session.failed("internal error of the prefill worker", retry=True))
