"""Counts what the engine does, on its thread; any thread can have an `EngineSnapshot` made of it."""

from __future__ import annotations

from collections.abc import Callable

from baton_api.metrics import FIRST_TOKEN_BUCKETS, STEP_BUCKETS
from baton_api.reports import Fallback
from baton_engine.metrics.snapshot import EngineSnapshot, Histogram, Rate, Totals
from baton_engine.requests import Fetched, PromptTiming
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.scheduling.sequence import Job

SMOOTHING = 0.05
NO_TRANSPORT = "none"
"""Nothing was read yet."""

REASON_LENGTH = 32
"""A longer reason is a sentence for the log, not a label for the metrics."""


class Figures:
    """Totals, rates and step times of one engine."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.totals = Totals()
        self.step_times = Histogram(STEP_BUCKETS)
        self.forward_times = Histogram(STEP_BUCKETS)
        self.queue_times = Histogram(FIRST_TOKEN_BUCKETS)
        self.prefill_times = Histogram(FIRST_TOKEN_BUCKETS)
        self._clock = clock
        self.decode_step_s = 0.0
        """Of a step in which nothing but tokens was generated, averaged over about the last twenty."""
        self._generated = Rate(clock())
        self._computed = Rate(clock())

    def stepped(self, seconds: float, *, mixed: bool) -> None:
        """A step has ended; `mixed` if it computed parts of prompts too."""
        self.totals.steps += 1
        self.step_times.add(seconds)
        if not mixed:
            self.decode_step_s += (seconds - self.decode_step_s) * (SMOOTHING if self.decode_step_s else 1.0)

    def computed(self, prompt_tokens: int) -> None:
        self.totals.prompt_tokens_computed += prompt_tokens
        self._computed.add(prompt_tokens, self._clock())

    def computed_here(self, job: Job, local_prefill_tokens: int) -> None:
        """A prompt is computed here without having been asked for elsewhere."""
        if job.request.remote is None:
            reason = "no_prefill_worker"
        elif job.reading is not None:
            reason = "reads_prompt"
        else:
            reason = "short" if len(job.request.prompt) <= local_prefill_tokens else "cached"
        self.totals.local_prefills[reason] += 1

    def looked_for(self, job: Job) -> None:
        """A prompt has been looked for in the prefix cache."""
        self.totals.prompt_tokens_cached += job.local_tokens
        self.totals.prompt_tokens_looked_for += len(job.request.prompt)

    def began(self, timing: PromptTiming) -> None:
        """A prompt that was computed here has its first token."""
        self.queue_times.add(timing.queue_s)
        self.prefill_times.add(timing.compute_s)

    def fetch_failed(self, fetched: Fetched) -> None:
        """A prompt is computed here after all. Reasons that are sentences all count as the same one."""
        reason = fetched.reason
        label = reason if reason.isidentifier() and len(reason) <= REASON_LENGTH else Fallback.TRANSFER_FAILED
        self.totals.local_prefills[label] += 1
        self.totals.transfer_failures[fetched.transport or NO_TRANSPORT, label] += 1

    def quarantined(self, fetched: Fetched) -> None:
        """Blocks of a fetch are set aside."""
        self.totals.quarantined[fetched.transport or NO_TRANSPORT] += len(fetched.unsafe)

    def generated(self, tokens: int) -> None:
        self.totals.generated_tokens += tokens
        self._generated.add(tokens, self._clock())

    def snapshot(self, scheduler: Scheduler, arriving: int) -> EngineSnapshot:
        """`arriving` requests have been submitted, but the scheduler does not know them yet."""
        pool, now = scheduler.pool, self._clock()
        # A list is copied in one go; the engine's thread may append to the original meanwhile.
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        return EngineSnapshot(
            running=len(running),
            queued=len(waiting) + arriving,
            fetching=len(scheduler.fetching),
            held=len(scheduler.held),
            queued_tokens=sum(job.request.pending for job in waiting)
            + sum(job.request.pending for job in running if not job.decoding),
            block_size=scheduler.block_size,
            total_blocks=pool.capacity,
            free_blocks=pool.free,
            cached_blocks=pool.cached,
            owned_blocks=pool.owned,
            pinned_blocks=pool.pinned,
            quarantined_blocks=pool.quarantined,
            generated_per_s=self._generated.at(now),
            computed_per_s=self._computed.at(now),
            totals=self.totals.copy(),
            step_times=self.step_times.times(),
            forward_times=self.forward_times.times(),
            queue_times=self.queue_times.times(),
            prefill_times=self.prefill_times.times(),
            evictions=pool.evictions,
            max_running=scheduler.limits.max_running,
            decode_step_s=self.decode_step_s,
        )
