"""
The engine: one compute thread that generates tokens for requests, step by step.

A step runs the commands of other threads, plans and launches a forward pass, reads its results, applies them,
and reports outputs. If passes overlap, one stays in flight between two steps: a step then launches the next
pass, and reads the last one while the device computes (`pass_pipeline`).

Other threads only append commands and wake the thread, so the engine's state needs no lock. Without work the
thread sleeps until a command arrives.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import torch

from baton_api.errors import BatonError, InternalError, NotReady
from baton_api.prompt_report import Fallback
from baton_engine import forward_pass
from baton_engine.batch import PassInterrupted
from baton_engine.captured_passes import PassModel
from baton_engine.devices import release_memory
from baton_engine.failures import EngineFailed, PassFailures
from baton_engine.forward_pass import ScheduledChunk
from baton_engine.kv.block_pool import BlockPool
from baton_engine.kv.cache import KVCache
from baton_engine.kv.events import KvEvents, KvSnapshot
from baton_engine.kv.new_memory import NewMemory
from baton_engine.lifecycle import Lifecycle, PassResults, log_fields
from baton_engine.metrics.counters import EngineCounters, EngineSnapshot
from baton_engine.metrics.step_log import BatchLog
from baton_engine.model.decoder import Model
from baton_engine.pass_pipeline import LaunchedPass, PassInterruption, PassPipeline
from baton_engine.requests import Fetch, FetchResult, FinishReason, LentBlocks, Output, Request
from baton_engine.sampling.token_masks import MaskFiller
from baton_engine.scheduling import limits as admission
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.scheduler import Scheduler, StepPlan
from baton_engine.scheduling.sequence import Sequence, Stage
from baton_engine.speculation.draft_model import DraftModel
from baton_engine.speculation.head_drafts import HeadDrafts, StateKeeper
from baton_engine.speculation.speculator import DraftSource, Speculator
from baton_engine.tiers.tier import EngineTier, TierPrefix, Tiers

__all__ = ["Engine", "EngineLimits"]

log = logging.getLogger(__name__)

Command = Callable[[], None]


class CommandQueue:
    """Commands in order of arrival. The engine's thread takes them between two steps."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._commands: list[Command] = []
        self._closed = False

    def post(self, command: Command) -> bool:
        """Append a command and wake the thread. False if the queue is closed."""
        with self._wake:
            if self._closed:
                return False
            self._commands.append(command)
            self._wake.notify()
            return True

    def close(self) -> None:
        """Stop the thread; commands still in the queue are dropped."""
        with self._wake:
            self._closed = True
            self._wake.notify()

    def take(self, *, wait: bool) -> list[Command] | None:
        """Return all commands, at least one if `wait`; None after the queue was closed."""
        with self._wake:
            while wait and not self._commands and not self._closed:
                self._wake.wait()
            if self._closed:
                return None
            commands, self._commands = self._commands, []
            return commands


Result = TypeVar("Result")


class Engine:
    """
    Owns a model, its KV cache and one compute thread. Public methods are thread-safe.

    The compute thread calls `on_outputs` at most twice per step; it must return without blocking. It calls
    `on_fatal` with the reason of a failure that only a new process can recover from.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        limits: EngineLimits,
        *,
        on_outputs: Callable[[list[Output]], None],
        on_fatal: Callable[[str], None] | None = None,
        kv_events: KvEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
        draft: tuple[Model, KVCache] | None = None,
        head: tuple[StateKeeper, PassModel] | None = None,
        tiers: Iterable[EngineTier] = (),
    ) -> None:
        """
        `draft` is a model for drafts, with the vocabulary of `model` and a cache of as many blocks. `head` is
        the draft head of `model`, and what computes its passes. `tiers` are those behind the cache, the
        fastest first. The caller closes them after `stop`.
        """
        self.limits = limits
        self._model = model
        self._cache = cache
        self._on_outputs = on_outputs
        self._on_fatal = on_fatal
        self._clock = clock
        self._kv_events = kv_events
        self._commands = CommandQueue()
        self._tiers = Tiers(tiers)
        evicted = kv_events.removed if kv_events is not None else None
        self._pool = BlockPool(cache.blocks, evicted, self._tiers if self._tiers.all else None)
        for tier in self._tiers.all:
            tier.attach(self._pool, self._commands.post, self.fetched, kv_events)
        self._scheduler = Scheduler(self._pool, limits, cache.block_size, kv_events, self._tiers.all)
        self._counters = EngineCounters(clock)
        self._new_memory = [NewMemory(each) for each in (cache, *(draft[1:] if draft else ()))]
        heads = None if head is None else HeadDrafts(*head, cache, clock)
        drafts: DraftSource | None = heads if draft is None else DraftModel(*draft, clock)
        keep = None if heads is None else heads.keep
        self._speculator = Speculator(self._scheduler, self._counters, drafts, keep)
        self._lifecycle = Lifecycle(self._scheduler, self._counters, clock)
        self._thread = threading.Thread(target=self._run, name="baton-engine", daemon=True)
        self._interruption = PassInterruption(model)
        self._mask_filler = MaskFiller(model.spec.vocab)
        self._results = PassResults(self._scheduler, self._lifecycle, cache, clock)
        depth = int(limits.overlap and drafts is None)  # drafts need the last tokens before a pass
        self._pipeline = PassPipeline(
            model, cache, self._scheduler, self._mask_filler, clock, cache.streams.finish, depth
        )
        self._in_flight: LaunchedPass | None = None
        """The pass that the next step reads; always None with a depth of 0."""
        self._finished_at = 0.0
        """Time at which the results of the last pass were applied."""
        release = partial(release_memory, cache.kv.device)
        self._failures = PassFailures(self._scheduler, self._lifecycle, self._counters, release)
        self._log = BatchLog(clock)

    # --- From any thread ---

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the remaining requests with ABORT and join the thread."""
        self._commands.close()
        if self._thread.ident is not None:
            self._thread.join()

    def submit(self, request: Request) -> None:
        """
        Queue a request.

        Raises ContextTooLong, PromptTooLarge, Overloaded, NotReady, or another InvalidRequest.
        """
        size, blocks, longest = self._cache.block_size, self._pool.capacity, self.limits.max_model_len
        vocab = self._model.spec.vocab
        admission.check(request, vocab=vocab, max_model_len=longest, blocks=blocks, block_size=size)
        longest = min(len(request.prompt) + request.sampling.max_tokens, longest)
        sequence = Sequence(request, size, min(-(-longest // size), blocks))
        sequence.arrived_at = self._clock()
        if request.step_summary is not None:
            request.step_summary.arrived = sequence.arrived_at
        if not self._lifecycle.reserve(
            request.id, request.tenant, lambda: self._commands.post(lambda: self._lifecycle.add(sequence))
        ):
            raise NotReady("The worker is shutting down.")
        self._interruption.interrupt_for(sequence)

    def abort(self, request_id: str) -> None:
        """End a request in any state, with ABORT if it has not ended, and free its exported blocks."""
        self._commands.post(lambda: self._lifecycle.abort(request_id))

    def finish(self, request_id: str) -> None:
        """End a request with STOP, because the server found a stop string."""
        self._commands.post(lambda: self._lifecycle.finish(request_id))

    def fetched(self, fetched: FetchResult) -> None:
        """Take the result of a `RemotePrefill.start`, of a `CachedPrefix` too."""
        self._commands.post(lambda: self._fetched(fetched))
        self._interruption.interrupt_for(self._scheduler.fetching.get(fetched.request_id))

    def settled(self, blocks: Collection[int]) -> None:
        """Free these quarantined blocks: no transfer writes them any more."""
        self._commands.post(lambda: self._pool.settle(blocks))

    def check_quarantine(self) -> None:
        """A read that was given up has not ended for long: fail if too many blocks are quarantined."""
        self._commands.post(self._check_quarantine)

    def lend(self, name: str, hashes: tuple[bytes, ...]) -> Future[LentBlocks]:
        """
        Keep the leading ones of these blocks that are cached until `take_back(name)`, for another worker.

        The future fails with NotReady if the engine has ended.
        """
        lent: Future[LentBlocks] = Future()

        def lend() -> None:
            if lent.set_running_or_notify_cancel():
                blocks = self._scheduler.lend(name, hashes)
                lent.set_result(LentBlocks(tuple(blocks), self._cache.streams.record()))

        if not self._commands.post(lend):
            lent.set_exception(NotReady("The worker is shutting down."))
        return lent

    def take_back(self, name: str) -> None:
        """Release the blocks that were lent under this name. No reader needs them."""
        self._commands.post(lambda: self._scheduler.take_back(name))

    def clear_cache(self) -> None:
        """Empty the prefix cache and its tiers, except for blocks in use."""

        def clear() -> None:
            self._pool.clear()
            self._tiers.clear()

        self._commands.post(clear)

    def release(self, request_id: str) -> None:
        """Free an exported request's blocks: they were read, or are no longer needed."""
        self.abort(request_id)

    def kv_snapshot(self) -> Future[KvSnapshot]:
        """
        Return a future of all published blocks, taken between two steps.

        Raises NotReady if this worker does not publish KV events.
        """
        taken: Future[KvSnapshot] = Future()
        events = self._kv_events

        def take() -> None:
            assert events is not None
            taken.set_result(KvSnapshot(events.flush(), *self._pool.published()))
            self._tiers.announce()  # the snapshot is of the pool, and replaces all that was known

        if events is None or not self._commands.post(take):
            raise NotReady("This worker publishes no KV events: start it with --kv-events.")
        return taken

    def snapshot(self) -> EngineSnapshot:
        tiers = tuple(tier.snapshot() for tier in self._tiers.all)
        return self._counters.snapshot(self._scheduler, self._lifecycle.arriving, tiers)

    # --- The thread ---

    def _run(self) -> None:
        with torch.inference_mode(), contextlib.closing(self._mask_filler):
            idle = True
            while (commands := self._commands.take(wait=idle)) is not None:
                try:
                    self._run_commands(commands)
                    if commands:
                        self._report()  # a fetched prompt's first token does not wait for the next pass
                    commands.clear()  # else they would keep requests, and their adapters, until the next one
                    idle = not self._step()
                    for tier in self._tiers.all:
                        tier.clean(idle)
                    announces = self._tiers.announces()
                    idle = idle and not announces and not self._touch_memory()
                except Exception as error:  # without this, clients would wait forever
                    log.exception("The engine's step failed; every request of this worker ends.")
                    # Others than EngineFailed are bugs.
                    self._fatal(str(error) if isinstance(error, EngineFailed) else "the engine's step failed")
                    self._end_all(FinishReason.ERROR, InternalError())
                    return
            self._end_all(FinishReason.ABORT)
            self._finish_device()

    def _finish_device(self) -> None:
        """Wait for passes under way: they use graphs that are freed next, and ranks that end next."""
        try:
            self._cache.streams.finish()
        except Exception as error:
            log.warning("The last pass failed: %s", error)

    def _run_commands(self, commands: list[Command]) -> None:
        for command in commands:
            try:
                command()
            except Exception:  # a bug in one command must not end the other requests
                log.exception("A command to the engine failed.")

    def _touch_memory(self) -> bool:
        """Touch some memory that blocks will use, if there is no request. Return whether it did."""
        used = self._pool.used_below
        return self._lifecycle.empty and any(memory.touch(used) for memory in self._new_memory)

    def _step(self) -> bool:
        """Run one step. Return False if nothing can change until another command arrives."""
        launched, self._in_flight = self._in_flight, None
        changed = True
        if launched is None:
            started = self._clock()
            plan = self._plan()
            changed = plan.changed
            launched = self._launch(plan, started)
            if launched is not None and launched.overlaps:
                self._in_flight, launched = launched, None  # commands run before the next one is launched
        if launched is not None:
            self._in_flight = self._finish(launched)
        self._report()
        return changed

    def _plan(self) -> StepPlan:
        """Plan a pass, and do for its sequences what the scheduler does not."""
        plan = self._scheduler.plan()
        self._counters.totals.retractions += len(plan.retracted)
        for sequence in plan.outgrown:
            self._lifecycle.end(sequence, FinishReason.LENGTH)
        for sequence in plan.starved:
            self._lifecycle.end(sequence, FinishReason.ERROR, self._starvation(sequence))
        for sequence in plan.fetches:
            self._start_fetch(sequence)
        for sequence in plan.admitted:
            self._note_admission(sequence)
        return plan

    def _launch(self, plan: StepPlan, started: float) -> LaunchedPass | None:
        """Launch the pass of a step that has `started`. None: it has no tokens, was interrupted or failed."""
        drafts = self._speculator.plan(plan)
        chunks = [
            forward_pass.decode(sequence, drafts.get(sequence, ()))
            for sequence in plan.decodes
            if sequence.stage is Stage.RUNNING  # it has ended if its blocks could not be announced
        ]
        chunks += [
            forward_pass.schedule(sequence, tokens)
            for sequence, tokens in plan.prefills
            if sequence.stage is Stage.RUNNING
        ]
        if not chunks:
            return None

        def launch() -> LaunchedPass:
            with self._interruption.during(chunks):
                return self._pipeline.launch(plan, chunks, started)

        try:
            return self._survive(chunks, launch)
        except PassInterrupted:
            self._speculator.forget(chunks)
            return None

    def _finish(self, launched: LaunchedPass) -> LaunchedPass | None:
        """Read a pass and apply its results. Returns the pass after it, if that was launched before."""
        ahead = self._look_ahead(launched)
        running = launched.running
        result = self._survive(running.values(), lambda: self._pipeline.read(launched))
        if result is None:
            return None  # the pass ahead has the same sequences
        self._count_pass(launched.chunks, result.seconds)
        generated = 0
        for index, chunk in running.items():
            self._results.advance(chunk, result.seconds, result.sampled.get(index), launched.written)
            generated += chunk.samples
        accepted = self._speculator.verify(
            launched.chunks, result, self._mask_filler, self._results.take_further
        )
        self._counters.add_generated(generated + accepted)
        now = self._clock()
        step_s, self._finished_at = now - max(launched.started, self._finished_at), now
        self._counters.add_step(step_s, launched.plan, accepted)
        if self._pipeline.depth and not launched.overlaps:
            self._speculator.times.add_delay(step_s - result.seconds)
        self._log.note(launched.plan, self._scheduler, accepted)
        if ahead is None:
            return None
        runs = self._survive(ahead.running.values(), lambda: self._pipeline.select(ahead))
        return ahead if runs else None

    def _look_ahead(self, launched: LaunchedPass) -> LaunchedPass | None:
        """Launch the next pass if it needs neither a plan nor drafts."""
        if not launched.overlaps:
            return None
        sampling = [chunk.sequence for chunk in launched.running.values() if chunk.samples]
        if self._speculator.expects(sampling):
            return None
        return self._pipeline.look_ahead(launched)

    def _survive(self, chunks: Collection[ScheduledChunk], run: Callable[[], Result]) -> Result | None:
        """Return the result of `run`, a part of the pass of `chunks`. None: it failed, as is processed."""
        try:
            return run()
        except PassInterrupted:
            raise
        except Exception as error:
            failed = self._failures.note(chunks, error)
        # After the handler, whose traceback keeps the tensors of the pass.
        if reason := self._failures.recover(chunks, *failed):
            self._fatal(reason)
        return None

    def _count_pass(self, chunks: list[ScheduledChunk], seconds: float) -> None:
        self._failures.succeeded()
        self._counters.forward_times.add(seconds)
        prompt_tokens = sum(chunk.tokens for chunk in chunks if not chunk.is_decode)
        self._counters.add_computed(prompt_tokens)
        self._scheduler.prompt_speed.add(prompt_tokens, seconds)

    def _end_all(self, finish: FinishReason, error: Exception | None = None) -> None:
        self._commands.close()
        self._lifecycle.end_all(finish, error)
        self._report()

    def _report(self) -> None:
        outputs = self._lifecycle.take_outputs()
        if outputs:
            self._on_outputs(outputs)
        if self._kv_events is not None:
            self._kv_events.flush()

    # --- Fetches and exports ---

    def _start_fetch(self, sequence: Sequence, counted: bool = False) -> None:
        """`counted`: as in `_note_admission`."""
        request, fetch, source = sequence.request, sequence.fetch, sequence.source
        assert source is not None and fetch is not None
        if source is not request.remote and not sequence.admitted_at:
            sequence.admitted_at = self._clock()  # the time of reading is part of computing
        if not counted:
            self._count_lookup(sequence)
        try:
            source.start(fetch, self._cache.streams.record())
        except Exception:
            log.exception("Cannot start the fetch for request %s.", request.id, extra=log_fields(sequence))
            self._fetched(FetchResult(request.id, arrived=0, reason=Fallback.TRANSFER_FAILED))

    def _fetched(self, fetched: FetchResult) -> None:
        sequence = self._lifecycle.get(fetched.request_id)
        if sequence is None or sequence.stage is not Stage.FETCHING:
            log.error("Unexpected fetch result for request %s.", fetched.request_id)
            return
        request, fetch, source = sequence.request, sequence.fetch, sequence.source
        assert fetch is not None
        complete = self._scheduler.fetched(sequence, fetched.arrived, fetched.unsafe)
        if fetched.unsafe:
            self._counters.add_quarantined(fetched)
            if source is request.remote:  # a peer's read is given up early: `check_quarantine`
                self._check_quarantine()
        if sequence.cancelled:
            self._scheduler.end(sequence)
            self._lifecycle.forget(sequence)
        elif source is not request.remote:
            self._after_read(sequence, fetch, fetched)
        elif fetched.first is not None and complete:
            sequence.cached_tokens, sequence.peer_tokens = fetched.cached_tokens, fetched.peer_tokens
            sequence.tier_tokens = fetched.tier_tokens
            before = fetch.start_block * self._cache.block_size
            self._counters.totals.prompt_tokens_remote += len(request.prompt) - before
            self._counters.add_generated(1)
            self._scheduler.join(sequence)
            self._lifecycle.add_token(sequence, fetched.first, relay=fetched.relay)
        else:
            reason = sequence.fallback = fetched.reason or Fallback.TRANSFER_FAILED
            log.warning(
                "Request %s is computed locally: %s", fetched.request_id, reason, extra=log_fields(sequence)
            )
            self._counters.add_failed_fetch(fetched)
            self._scheduler.requeue(sequence)

    def _after_read(self, sequence: Sequence, fetch: Fetch, fetched: FetchResult) -> None:
        """Compute a prompt of which a tier or another worker had blocks, or fetch more of it."""
        request, size = sequence.request, self._cache.block_size
        if fetched.reason and fetched.reason != Fallback.MISSING:
            fields = log_fields(sequence)
            log.warning("Request %s computes what is cached: %s", request.id, fetched.reason, extra=fields)
        tokens = max(0, sequence.computed - fetch.start_block * size)
        source = sequence.source
        if source is request.cached_prefix:
            self._counters.add_peer_read(fetched, tokens, len(fetch.blocks) * size)
        elif isinstance(source, TierPrefix):
            self._counters.add_restore(source.name, fetched, tokens)
        if sequence.blocks and not sequence.readmitted:
            sequence.cached_tokens = sequence.computed
            if source is request.cached_prefix:
                sequence.peer_tokens = tokens
            elif isinstance(source, TierPrefix) and tokens:
                sequence.tier_tokens += ((source.name, tokens),)
        if not sequence.blocks:  # a read of some blocks has not ended
            self._scheduler.requeue(sequence)
        elif self._scheduler.fetch_more(sequence):
            self._start_fetch(sequence, counted=True)
        else:
            self._scheduler.join(sequence)
            self._note_admission(sequence, counted=True)

    def _note_admission(self, sequence: Sequence, counted: bool = False) -> None:
        """`counted`: its lookup in the prefix cache was counted already."""
        request = sequence.request
        if not sequence.admitted_at:  # the first admission may have been for a fetch
            sequence.admitted_at = self._clock()
        if not sequence.readmitted:
            if not counted:
                self._count_lookup(sequence)
            if request.export is None:
                self._counters.add_local_prefill(sequence, self.limits.local_prefill_tokens)
        if request.export is not None:
            self._results.announce(sequence)

    def _count_lookup(self, sequence: Sequence) -> None:
        self._counters.add_prefix_lookup(sequence)
        for tier in self._tiers.all:
            tier.totals.queries += (sequence.cacheable - sequence.local_tokens) // self._cache.block_size

    # --- Failures ---

    def _starvation(self, sequence: Sequence) -> BatonError:
        needed, pool = sequence.blocks_for(sequence.length), self._pool
        return NotReady(
            f"The request needs {needed} KV blocks, but {pool.quarantined} of {pool.capacity} are "
            "quarantined until their transfers end. Try again later."
        )

    def _check_quarantine(self) -> None:
        limit = self.limits.quarantine_limit * self._pool.capacity
        if self._pool.quarantined > limit:
            self._fatal(
                f"{self._pool.quarantined} of {self._pool.capacity} KV blocks are quarantined, more than "
                f"{limit:.0f}: transfers from a peer hang; only a restart frees the blocks"
            )

    def _fatal(self, reason: str) -> None:
        log.critical("The worker cannot continue: %s.", reason)
        if self._on_fatal is not None:
            self._on_fatal(reason)
