"""Counters of one engine: written by its thread, read by any thread through an `EngineSnapshot`."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from baton_api.metrics import FIRST_TOKEN_BUCKETS, STEP_BUCKETS
from baton_api.prompt_report import Fallback
from baton_engine.requests import FetchResult, PromptTiming
from baton_engine.scheduling.scheduler import Scheduler, StepPlan
from baton_engine.scheduling.sequence import Sequence
from baton_engine.tiers.tier import TierSnapshot

SMOOTHING = 0.05
NO_TRANSPORT = "none"
"""The transport label before the first read."""

READ = "read"
"""The outcome of a read from a tier, or another worker's prefix cache, that brought all blocks."""

REASON_LENGTH = 32
"""Longer reasons are sentences for the log, not labels of a metric."""
RATE_WINDOW_S = 10.0
"""Time constant of the rates' exponential average."""


class Rate:
    """Events per second, averaged with a weight that falls off exponentially."""

    __slots__ = ("_updated", "_value")

    def __init__(self, now: float) -> None:
        self._value = 0.0
        self._updated = now

    def add(self, count: int, now: float) -> None:
        self._value = self.at(now) + count / RATE_WINDOW_S
        self._updated = now

    def at(self, now: float) -> float:
        return self._value * math.exp(-max(0.0, now - self._updated) / RATE_WINDOW_S)


@dataclass(frozen=True, slots=True)
class Times:
    """A histogram in Prometheus' form."""

    buckets: tuple[tuple[float, int], ...]
    """(upper bound in seconds, cumulative count); the last bound is infinite."""
    total_s: float

    @property
    def count(self) -> int:
        return self.buckets[-1][1]


class Histogram:
    """Counts of durations by bucket."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds`: upper bounds in seconds, without the infinite one."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Count `count` durations of `seconds` each."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._total += count * seconds

    def times(self) -> Times:
        bounds = (*self._bounds, math.inf)
        return Times(tuple(zip(bounds, accumulate(self._counts), strict=True)), self._total)


@dataclass(slots=True)
class Totals:
    """Sums since the start. The engine's thread adds to them; a snapshot copies them."""

    prompt_tokens_computed: int = 0
    """By forward passes of this worker, recomputation after retractions included."""
    prompt_tokens_cached: int = 0
    """Found in the prefix cache at admission."""
    prompt_tokens_looked_up: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prompt_tokens_remote: int = 0
    """Received from a prefill worker."""
    prompt_tokens_peer: int = 0
    """Read from another worker's prefix cache."""
    prompt_tokens_peer_looked_up: int = 0
    """Prompt tokens of the reads from other workers' prefix caches."""
    peer_reads: Counter[str] = field(default_factory=Counter)
    """Reads from other workers' prefix caches, by outcome: `read`, or a `Fallback`."""
    restores: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Reads from tiers, by tier and outcome: `read`, or a `Fallback`."""
    prompt_tokens_restored: Counter[str] = field(default_factory=Counter)
    """By tier."""
    generated_tokens: int = 0
    retractions: int = 0
    out_of_memory: int = 0
    """Forward passes that ran out of memory."""
    steps: int = 0
    drafts: int = 0
    """Rows of forward passes with draft tokens."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Draft tokens that were part of an answer."""
    finished: Counter[str] = field(default_factory=Counter)
    """Requests by `FinishReason`."""
    local_prefills: Counter[str] = field(default_factory=Counter)
    """
    Prompts computed locally, by reason. `no_prefill_worker`: the request does not name a prefill worker.
    `reads_prompt`: it requests prompt outputs. `short`: the prompt is short. `cached`: it is short without
    its cached prefix. Other reasons are those of failed fetches.
    """

    transfer_failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Failed fetches by transport (`none` before the first read) and reason."""
    quarantined: Counter[str] = field(default_factory=Counter)
    """Blocks put into quarantine, by transport."""

    def copy(self) -> Totals:
        return Totals(
            prompt_tokens_computed=self.prompt_tokens_computed,
            prompt_tokens_cached=self.prompt_tokens_cached,
            prompt_tokens_looked_up=self.prompt_tokens_looked_up,
            prompt_tokens_remote=self.prompt_tokens_remote,
            prompt_tokens_peer=self.prompt_tokens_peer,
            prompt_tokens_peer_looked_up=self.prompt_tokens_peer_looked_up,
            peer_reads=self.peer_reads.copy(),
            restores=self.restores.copy(),
            prompt_tokens_restored=self.prompt_tokens_restored.copy(),
            generated_tokens=self.generated_tokens,
            retractions=self.retractions,
            out_of_memory=self.out_of_memory,
            steps=self.steps,
            drafts=self.drafts,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            finished=self.finished.copy(),
            local_prefills=self.local_prefills.copy(),
            transfer_failures=self.transfer_failures.copy(),
            quarantined=self.quarantined.copy(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """State of one engine at one moment, for `/load`, `/metrics` and tests."""

    running: int
    """Requests in the batch."""
    queued: int
    """Requests waiting for admission."""
    fetching: int
    """Requests whose prompt is being fetched, aborted ones that still pin blocks included."""
    held: int
    """Ended requests whose exported blocks have not been released."""
    queued_tokens: int
    """Prompt tokens still to be computed by this worker."""
    block_size: int
    total_blocks: int
    """Blocks that requests can use: all but block 0."""
    free_blocks: int
    """Blocks without known content."""
    cached_blocks: int
    """Blocks with known content that are not in use; they count as available."""
    owned_blocks: int
    """Blocks in use, pinned ones included."""
    pinned_blocks: int
    quarantined_blocks: int
    generated_per_s: float
    computed_per_s: float
    """Prompt tokens."""
    totals: Totals
    step_times: Times
    """Whole steps, the forward pass included."""
    forward_times: Times
    """Forward passes alone: the difference is the engine's overhead."""
    queue_times: Times
    """From arrival to the first forward pass, for prompts computed locally."""
    prefill_times: Times
    """From the first forward pass to the first token, for the same prompts."""
    tiers: tuple[TierSnapshot, ...] = ()
    evictions: int = 0
    """Known blocks that were dropped for new ones."""
    max_running: int = 0
    """Most requests in the batch."""
    decode_step_s: float = 0.0
    """Seconds of a step without prompt tokens, by generated token of a sequence, averaged; 0 before the first
    one."""

    @property
    def available_blocks(self) -> int:
        """Blocks available to a new request."""
        return self.free_blocks + self.cached_blocks

    @property
    def usage(self) -> float:
        """Fraction of the blocks that are not available."""
        return 1 - self.available_blocks / self.total_blocks


class EngineCounters:
    """Totals, rates and step times of one engine."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.totals = Totals()
        self.step_times = Histogram(STEP_BUCKETS)
        self.forward_times = Histogram(STEP_BUCKETS)
        self.queue_times = Histogram(FIRST_TOKEN_BUCKETS)
        self.prefill_times = Histogram(FIRST_TOKEN_BUCKETS)
        self._clock = clock
        self.decode_step_s = 0.0
        """Seconds of a step without prompt tokens, by generated token of a sequence, averaged over about the
        last 20 steps."""
        self._generated = Rate(clock())
        self._computed = Rate(clock())

    def add_step(self, seconds: float, plan: StepPlan, accepted: int) -> None:
        """Count a step that accepted `accepted` draft tokens."""
        self.totals.steps += 1
        self.step_times.add(seconds)
        if not plan.prefills:
            each_s = seconds * len(plan.decodes) / (len(plan.decodes) + accepted)
            self.decode_step_s += (each_s - self.decode_step_s) * (SMOOTHING if self.decode_step_s else 1.0)

    def add_drafts(self, drafts: int, proposed: int, accepted: int) -> None:
        """Count the draft tokens of a pass: `proposed` in `drafts` rows, of which `accepted` were correct."""
        self.totals.drafts += drafts
        self.totals.draft_tokens += proposed
        self.totals.accepted_tokens += accepted

    def add_computed(self, prompt_tokens: int) -> None:
        self.totals.prompt_tokens_computed += prompt_tokens
        self._computed.add(prompt_tokens, self._clock())

    def add_local_prefill(self, sequence: Sequence, local_prefill_tokens: int) -> None:
        """Count a prompt that is computed locally without a fetch."""
        if sequence.request.remote is None:
            reason = "no_prefill_worker"
        elif sequence.prompt_output is not None:
            reason = "reads_prompt"
        else:
            reason = "short" if len(sequence.request.prompt) <= local_prefill_tokens else "cached"
        self.totals.local_prefills[reason] += 1

    def add_prefix_lookup(self, sequence: Sequence) -> None:
        """Count a lookup of a prompt in the prefix cache."""
        self.totals.prompt_tokens_cached += sequence.local_tokens
        self.totals.prompt_tokens_looked_up += len(sequence.request.prompt)

    def add_first_token(self, timing: PromptTiming) -> None:
        """Record the times of a prompt that was computed locally."""
        self.queue_times.add(timing.queue_s)
        self.prefill_times.add(timing.compute_s)

    def add_failed_fetch(self, fetched: FetchResult) -> None:
        """Count a local prefill after a failed fetch. All reasons that are sentences share a label."""
        reason = fetched.reason
        label = reason if reason.isidentifier() and len(reason) <= REASON_LENGTH else Fallback.TRANSFER_FAILED
        self.totals.local_prefills[label] += 1
        self.totals.transfer_failures[fetched.transport or NO_TRANSPORT, label] += 1

    def add_peer_read(self, fetched: FetchResult, tokens: int, looked_up: int) -> None:
        """Count a read from another worker's prefix cache: `tokens` of `looked_up` have arrived."""
        self.totals.prompt_tokens_peer += tokens
        self.totals.prompt_tokens_peer_looked_up += looked_up
        self.totals.peer_reads[fetched.reason or READ] += 1

    def add_restore(self, tier: str, fetched: FetchResult, tokens: int) -> None:
        """Count a read from a tier that brought `tokens` tokens."""
        self.totals.restores[tier, fetched.reason or READ] += 1
        self.totals.prompt_tokens_restored[tier] += tokens

    def add_quarantined(self, fetched: FetchResult) -> None:
        """Count the quarantined blocks of a fetch."""
        self.totals.quarantined[fetched.transport or NO_TRANSPORT] += len(fetched.unsafe)

    def add_generated(self, tokens: int) -> None:
        self.totals.generated_tokens += tokens
        self._generated.add(tokens, self._clock())

    def snapshot(
        self, scheduler: Scheduler, arriving: int, tiers: tuple[TierSnapshot, ...] = ()
    ) -> EngineSnapshot:
        """`arriving` is the number of submitted requests that the scheduler does not have yet."""
        pool, now = scheduler.pool, self._clock()
        # A list is copied in one go; the engine's thread may append to the original meanwhile.
        running, waiting = list(scheduler.running), scheduler.waiting.copy()
        return EngineSnapshot(
            running=len(running),
            queued=len(waiting) + arriving,
            fetching=len(scheduler.fetching),
            held=len(scheduler.held),
            queued_tokens=sum(sequence.pending for sequence in waiting)
            + sum(sequence.pending for sequence in running if not sequence.decoding),
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
            tiers=tiers,
            evictions=pool.evictions,
            max_running=scheduler.limits.max_running,
            decode_step_s=self.decode_step_s,
        )
