"""
The engine: one thread that turns requests into tokens, step by step.

A step is: carry out what other threads asked for, plan, one forward pass, draw, report. Other threads only
append to a list of commands and wake the thread, so nothing else here needs a lock; with nothing to do,
the thread sleeps until a command comes.

Forward pass and sampling are two calls on purpose: what shapes the logits can be prepared in between.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future

import torch

from baton_api import logs
from baton_api.errors import (
    BatonError,
    InternalError,
    InvalidRequest,
    NotReady,
    Overloaded,
)
from baton_api.messages import TokenChoice
from baton_api.reports import Fallback
from baton_engine import forward_pass
from baton_engine.forward_pass import Share
from baton_engine.kv.block_pool import BlockPool
from baton_engine.kv.cache import KVCache
from baton_engine.kv.events import KvEvents, KvSnapshot
from baton_engine.metrics.counters import Figures
from baton_engine.metrics.snapshot import EngineSnapshot
from baton_engine.metrics.step_log import BatchLog
from baton_engine.model.decoder import Model
from baton_engine.requests import (
    Fetched,
    FinishReason,
    Output,
    PromptLogprobs,
    PromptTiming,
    RelayRecord,
    Request,
    Vector,
)
from baton_engine.sampling.mask_filler import Masks
from baton_engine.scheduling import limits as admission
from baton_engine.scheduling.inbox import Command, Inbox
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.scheduling.sequence import Job, Stage

__all__ = ["Engine", "EngineLimits"]

log = logging.getLogger(__name__)

FAILURES_LIMIT = 5
"""Passes that fail in a row after which the worker ends: a new process may do better."""


class Engine:
    """
    Owns a model, its KV cache and one compute thread. Every method may be called from any thread.

    `on_outputs` is called on the compute thread, at most once per step, and must return at once.
    `on_fatal` is called there with the reason when only a new process can help.
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
    ) -> None:
        self.limits = limits
        self._model = model
        self._cache = cache
        self._on_outputs = on_outputs
        self._on_fatal = on_fatal
        self._clock = clock
        self._kv_events = kv_events
        self._pool = BlockPool(cache.blocks, kv_events.removed if kv_events is not None else None)
        self._scheduler = Scheduler(self._pool, limits, cache.block_size, kv_events)
        self._outputs: list[Output] = []
        self._jobs: dict[str, Job] = {}
        """All that have not ended, those included that only hold blocks."""
        self._names: set[str] = set()
        """Ids of `_jobs` and of requests that are still in the inbox."""
        self._intake = threading.Lock()
        self._inbox = Inbox()
        self._thread = threading.Thread(target=self._run, name="baton-engine", daemon=True)
        self._masks = Masks(model.spec.vocab)
        self._settle = forward_pass.settling(cache.kv.device)
        self._failures = 0
        """Passes that failed since the last one that did not."""
        self._figures = Figures(clock)
        self._log = BatchLog(clock)

    # --- From any thread ---

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End what is left with ABORT and join the thread."""
        self._inbox.close()
        if self._thread.ident is not None:
            self._thread.join()

    def submit(self, request: Request) -> None:
        """
        Take a request, or say at once why not.

        Raises ContextTooLong, PromptTooLarge, Overloaded, NotReady, or another InvalidRequest.
        """
        size, blocks, longest = self._cache.block_size, self._pool.capacity, self.limits.max_model_len
        admission.check(
            request,
            vocab=self._model.spec.vocab,
            max_model_len=longest,
            blocks=blocks,
            block_size=size,
        )
        longest = min(len(request.prompt) + request.sampling.max_tokens, longest)
        job = Job(request, size, min(-(-longest // size), blocks))
        job.arrived_at = self._clock()
        if request.notes is not None:
            request.notes.arrived = job.arrived_at
        with self._intake:
            queued = len(self._scheduler.waiting) + self._arriving
            if queued >= self.limits.max_queued:
                raise Overloaded(queued, self.limits.max_queued)
            if request.id in self._names:
                raise InvalidRequest(f"A request with the id {request.id[:128]!r} is already being served.")
            self._names.add(request.id)
            if not self._inbox.post(lambda: self._add(job)):
                self._names.discard(request.id)
                raise NotReady("The worker is shutting down.")

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is, with ABORT if it was live; free what it exported."""
        self._inbox.post(lambda: self._abort(request_id))

    def finish(self, request_id: str) -> None:
        """The server saw a stop string: end the request with STOP."""
        self._inbox.post(lambda: self._finish(request_id))

    def fetched(self, fetched: Fetched) -> None:
        """A `RemotePrefill.start` has come to its end."""
        self._inbox.post(lambda: self._fetched(fetched))

    def settled(self, blocks: Collection[int]) -> None:
        """Nobody writes these quarantined blocks any more."""
        self._inbox.post(lambda: self._pool.settle(blocks))

    def forget(self) -> None:
        """Empty the prefix cache, but for what requests use."""
        self._inbox.post(self._pool.forget)

    def release(self, request_id: str) -> None:
        """An exported request's blocks were pulled, or nobody wants them."""
        self._inbox.post(lambda: self._abort(request_id))

    def kv_snapshot(self) -> Future[KvSnapshot]:
        """All known blocks, at one moment between two steps. Raises NotReady if nobody is told of them."""
        taken: Future[KvSnapshot] = Future()
        events = self._kv_events

        def take() -> None:
            assert events is not None
            taken.set_result(KvSnapshot(events.flush(), *self._pool.known()))

        if events is None or not self._inbox.post(take):
            raise NotReady("This worker publishes no KV events: start it with --kv-events.")
        return taken

    def snapshot(self) -> EngineSnapshot:
        return self._figures.snapshot(self._scheduler, self._arriving)

    @property
    def _arriving(self) -> int:
        """Requests that are still in the inbox."""
        return max(0, len(self._names) - len(self._jobs))

    # --- The thread ---

    def _run(self) -> None:
        with torch.inference_mode(), contextlib.closing(self._masks):
            idle = True
            while (commands := self._inbox.take(wait=idle)) is not None:
                try:
                    self._carry_out(commands)
                    idle = not self._step()
                except Exception:  # our own mistake: nobody may wait for an answer that never comes
                    log.exception("The engine's step failed; every request of this worker ends.")
                    self._end_all(FinishReason.ERROR, InternalError())
                    self._fatal("the engine's step failed")
                    return
            self._end_all(FinishReason.ABORT)

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            try:
                command()
            except Exception:  # one command's mistake is not the other requests' end
                log.exception("A command to the engine failed.")

    def _step(self) -> bool:
        """One step; False if nothing can change until another command comes."""
        started = self._clock()
        plan = self._scheduler.plan()
        self._figures.totals.retractions += len(plan.retracted)
        for job in plan.outgrown:
            self._end(job, FinishReason.LENGTH)
        for job in plan.starved:
            self._end(job, FinishReason.ERROR, self._starvation(job))
        for job in plan.fetches:
            self._start_fetch(job)
        for job in plan.admitted:
            self._note_admission(job)
        rows = [*((job, 1) for job in plan.decodes), *plan.prefills]
        # An admitted one may have ended since, if it could not be announced.
        shares = [forward_pass.share(job, tokens) for job, tokens in rows if job.stage is Stage.RUNNING]
        if shares:
            self._compute(shares)
            self._figures.stepped(self._clock() - started, mixed=bool(plan.prefills))
            self._log.note(plan, self._scheduler)
        self._report()
        return plan.changed

    def _compute(self, shares: list[Share]) -> None:
        try:
            drawn, seconds = forward_pass.run(
                self._model, self._cache, shares, self._masks, self._clock, self._settle
            )
        except Exception as error:
            names = ", ".join(share.job.request.id for share in shares)
            log.exception("A forward pass failed; these requests end: %s", names)
            for share in shares:
                self._end(share.job, FinishReason.ERROR, InternalError())
            self._check_failures(error)
            return
        self._failures = 0
        self._figures.forward_times.add(seconds)
        self._figures.generated(len(drawn))
        self._figures.computed(sum(share.tokens for share in shares if not share.generates))
        choices = iter(drawn)
        for share in shares:
            job = share.job
            if job.request.notes is not None:
                job.request.notes.passed(self._clock(), seconds, share.tokens, generates=share.generates)
            choice = next(choices) if share.draws else None
            self._scheduler.advance(job, share.tokens)
            if job.request.export is not None:
                self._announce(job)
            if not (share.draws or share.ends) or job.stage is not Stage.RUNNING:
                continue
            reading, job.reading = job.reading, None
            result = None if reading is None else reading.result
            if (share.draws and choice is None) or (reading is not None and result is None):
                log.error(
                    "Request %s ends: the model's logits are not finite.", job.request.id, extra=_of(job)
                )
                self._end(job, FinishReason.ERROR, InternalError())
            elif isinstance(choice, BatonError):
                self._end(job, FinishReason.ERROR, choice)
            elif choice is None:
                self._read(job, result)
            else:
                self._token(job, choice, reading=result)

    def _read(self, job: Job, result: Vector | PromptLogprobs | None) -> None:
        """The prompt is all that was wanted."""
        finish = FinishReason.LENGTH if job.request.pooling is None else FinishReason.STOP
        self._outputs.append(
            Output(job.request.id, finish=finish, cached_tokens=job.request.cached_tokens, reading=result)
        )
        self._leave(job, finish)

    def _token(
        self,
        job: Job,
        choice: TokenChoice,
        relay: RelayRecord | None = None,
        reading: Vector | PromptLogprobs | None = None,
    ) -> None:
        """A token was drawn, here or by a prefill worker: report it; it may be the request's last."""
        request = job.request
        request.output.append(choice.token)
        try:
            job.draw.push(choice.token)
        except Exception as error:  # one request's guide is not the other requests' end
            log.error("Request %s ends.", request.id, exc_info=error, extra=_of(job))
            known = error if isinstance(error, BatonError) else InternalError()
            self._end(job, FinishReason.ERROR, known)
            return
        finish, stop_id = None, None
        if choice.token in request.sampling.stop_ids:
            finish, stop_id = FinishReason.STOP, choice.token
        elif job.draw.permits is not None and job.draw.permits.finished:
            finish = FinishReason.STOP
        elif (
            len(request.output) >= request.sampling.max_tokens
            or request.length >= self.limits.max_model_len
            or request.export is not None  # the rest is another worker's
        ):
            finish = FinishReason.LENGTH
        self._outputs.append(
            Output(
                request.id,
                (choice,),
                finish,
                stop_id,
                request.cached_tokens,
                relay=relay,
                timing=self._timing(job) if relay is None and len(request.output) == 1 else None,
                reading=reading,
            )
        )
        if finish is not None:
            self._leave(job, finish)

    def _timing(self, job: Job) -> PromptTiming:
        timing = PromptTiming(job.admitted_at - job.arrived_at, self._clock() - job.admitted_at)
        self._figures.began(timing)
        return timing

    # --- Commands, carried out between steps ---

    def _add(self, job: Job) -> None:
        self._jobs[job.request.id] = job
        self._scheduler.add(job)

    def _abort(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is None or job.cancelled:
            return
        if job.stage is not Stage.HELD:
            self._outputs.append(
                Output(request_id, finish=FinishReason.ABORT, cached_tokens=job.request.cached_tokens)
            )
        self._leave(job, FinishReason.ABORT, hold=False)
        if job.cancelled and job.request.remote is not None:
            job.request.remote.cancel(request_id)

    def _finish(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is not None and job.stage in (Stage.WAITING, Stage.RUNNING):  # a retracted one may wait
            self._end(job, FinishReason.STOP)

    def _fetched(self, fetched: Fetched) -> None:
        job = self._jobs.get(fetched.request_id)
        if job is None or job.stage is not Stage.FETCHING:
            log.error("A fetch for request %s ended that was not under way.", fetched.request_id)
            return
        whole = self._scheduler.fetched(job, fetched.arrived, fetched.unsafe)
        if fetched.unsafe:
            self._figures.quarantined(fetched)
            self._check_quarantine()
        if job.cancelled:
            self._scheduler.end(job)
            self._forget(job)
        elif fetched.first is not None and whole:
            job.request.cached_tokens = fetched.cached_tokens
            self._figures.totals.prompt_tokens_remote += len(job.request.prompt) - job.local_tokens
            self._figures.generated(1)
            self._scheduler.join(job)
            self._token(job, fetched.first, fetched.relay)
        else:
            reason = job.request.fallback = fetched.reason or Fallback.TRANSFER_FAILED
            log.warning(
                "Request %s is computed here after all: %s", fetched.request_id, reason, extra=_of(job)
            )
            self._figures.fetch_failed(fetched)
            self._scheduler.requeue(job)

    # --- Effects of a plan ---

    def _start_fetch(self, job: Job) -> None:
        request, fetch = job.request, job.fetch
        assert request.remote is not None and fetch is not None
        self._figures.looked_for(job)
        try:
            request.remote.start(fetch)
        except Exception:
            log.exception("The fetch for request %s could not be started.", request.id, extra=_of(job))
            self._fetched(Fetched(request.id, arrived=0, reason=Fallback.TRANSFER_FAILED))

    def _note_admission(self, job: Job) -> None:
        request = job.request
        if not job.admitted_at:  # the first one may have been for a fetch
            job.admitted_at = self._clock()
        if not job.readmitted:
            self._figures.looked_for(job)
            if request.export is None:
                self._figures.computed_here(job, self.limits.local_prefill_tokens)
        if request.export is not None:
            self._announce(job)

    def _announce(self, job: Job) -> None:
        request = job.request
        assert request.export is not None
        try:
            request.export.computed(request.id, request.computed, request.blocks)
        except Exception:
            log.exception("The blocks of request %s could not be announced.", request.id, extra=_of(job))
            self._end(job, FinishReason.ERROR, InternalError())

    def _starvation(self, job: Job) -> BatonError:
        return NotReady(
            f"The request needs {job.blocks_for(job.request.length)} KV blocks, but of {self._pool.capacity} "
            f"{self._pool.quarantined} are quarantined after transfers that have not ended; try again later."
        )

    def _check_quarantine(self) -> None:
        limit = self.limits.quarantine_limit * self._pool.capacity
        if self._pool.quarantined > limit:
            self._fatal(
                f"{self._pool.quarantined} of {self._pool.capacity} KV blocks are quarantined, more than "
                f"{limit:.0f}: transfers from a peer hang; only a restart frees the blocks"
            )

    def _check_failures(self, error: Exception) -> None:
        self._failures += 1
        if forward_pass.is_lasting(error):
            self._fatal(f"its accelerator failed, and fails from now on: {error}")
        elif self._failures == FAILURES_LIMIT:
            self._fatal(f"the last {FAILURES_LIMIT} forward passes failed, the last one with: {error}")

    def _fatal(self, reason: str) -> None:
        log.critical("The worker cannot go on: %s.", reason)
        if self._on_fatal is not None:
            self._on_fatal(reason)

    # --- Ends ---

    def _end(self, job: Job, finish: FinishReason, error: Exception | None = None) -> None:
        self._outputs.append(
            Output(job.request.id, finish=finish, cached_tokens=job.request.cached_tokens, error=error)
        )
        self._leave(job, finish)

    def _leave(self, job: Job, finish: FinishReason, *, hold: bool = True) -> None:
        if job.stage is not Stage.HELD:  # it was counted when it ended
            self._figures.totals.finished[finish] += 1
        self._scheduler.end(job, hold=hold)
        if job.stage is Stage.ENDED:
            self._forget(job)

    def _forget(self, job: Job) -> None:
        del self._jobs[job.request.id]
        self._names.discard(job.request.id)

    def _end_all(self, finish: FinishReason, error: Exception | None = None) -> None:
        """The thread ends: tell everybody who still waits."""
        self._inbox.close()
        for name in list(self._names):
            job = self._jobs.get(name)  # None for one that is still in the inbox
            if job is not None and (job.cancelled or job.stage is Stage.HELD):
                continue
            if job is not None and job.stage is Stage.FETCHING and job.request.remote is not None:
                job.request.remote.cancel(name)
            self._outputs.append(Output(name, finish=finish, error=error))
        self._report()

    def _report(self) -> None:
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._on_outputs(outputs)
        if self._kv_events is not None:
            self._kv_events.flush()


def _of(job: Job) -> dict[str, Mapping[str, str]]:
    """What a line of the log belongs to."""
    return logs.of(job.request.client_id or job.request.id)
